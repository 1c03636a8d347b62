"""How is an HTTP request changed: its body, boundary, headers and query; and how is it handed to the service?"""

import asyncio
import base64
import json
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

from mutated_bytes import Dice, damaged
from mutated_images import changed as changed_image
from mutated_json import changed as changed_json
from tars import picture

KNOWN: Final = "an-answer-that-is-remembered"
PICTURE: Final = picture(7)
LENGTH: Final = b"inference-header-content-length"
ODD_HEADERS: Final = (
    (b"content-length", b"99999999999999999999"), (b"content-length", b"-1"), (b"content-length", b"0"),
    (b"content-type", b"multipart/form-data"), (b"content-type", b"multipart/form-data; boundary="),
    (b"content-type", b"multipart/form-data; boundary*0=ed; boundary*1=ge"), (b"content-type", b"\xff\xfe"),
    (b"content-type", b"multipart/form-data; boundary*=utf-8''edge"), (b"content-type",
    b"multipart/form-data; boundary=\"edge"),
    (b"content-type", b"multipart/form-data; boundary*%s=edge" % (b"9" * 5000)),
    (LENGTH, b"0"), (LENGTH, b"5"), (LENGTH, b"-5"), (LENGTH, b"\xb2"), (LENGTH, b"9" * 5000), (LENGTH,
    b"0" * 12 + b"9" * 5000),
    (b"x-request-id", b"x" * 129), (b"x-request-id", b"\xff"), (b"x-request-id", b""), (b"authorization",
    b"Bearer \xff"),
    (b"if-none-match", b"\xff" * 100), (b"accept-encoding", b"\0"),
)  # fmt: skip
ODD_QUERIES: Final = (
    b"", b"top_k=0", b"top_k=101", b"top_k=" + b"9" * 5000, b"top_k=1e1", b"top_k=%EF%BC%91", b"matcher=%FF",
    b"matcher=mqmk",
    b"matcher=perfect", b"matcher=%ED%A0%80", b"scores=true", b"scores=2", b"top_k=1&top_k=2", b"%", b"a" * 9000,
    b"matcher[]=x",
    b"scores=\xff", b"&&&=&", b"top_k=%00",
)  # fmt: skip
DISPOSITIONS: Final = (
    b'form-data; name="image"', b"form-data; name=image", b"form-data; name*=utf-8''image",
    b"form-data; name*=x'y'%ff%fe",
    b'form-data; name*0="im"; name*1="age"', b"form-data; name*%s=image" % (b"9" * 5000), b"form-data", b"", b'name="',
    b'form-data; name="image"; filename="' + b'\\"' * 2000, b"form-data; " + b';"' * 3000, b"form-data; name=\xff\xfe",
    b"form-data; name*=unknown-charset''image", b"form-data; name*0*=''a; name*2=b", b"a" * 8100,
    b"form-data; name=\0image",
)  # fmt: skip


@dataclass(frozen=True)
class Request:
    """What is sent, byte by byte."""

    path: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes
    query: bytes = b""
    method: str = "POST"

    def to_bytes(self) -> bytes:
        """As it would go over the wire."""
        head = self.method.encode() + b" " + self.path + (b"?" + self.query if self.query else b"") + b" HTTP/1.1\r\n"
        return head + b"".join(name + b": " + value + b"\r\n" for name, value in self.headers) + b"\r\n" + self.body


def changed(dice: Dice) -> Request:
    """A request that was good once."""
    request = dice.choice(REQUESTS)(dice)
    if dice.random() < 0.2:
        request = replace(request, body=damaged(request.body, dice))
    if dice.random() < 0.25:
        request = _with(request, dice.choice(ODD_HEADERS))
    if dice.random() < 0.15:
        request = replace(request, query=dice.choice(ODD_QUERIES))
    if dice.random() < 0.05:
        request = replace(
            request, path=dice.choice((b"/", b"/pool", b"/v2/models/other/infer", b"//predict", b"/\xff", b"/predict/"))
        )
    if dice.random() < 0.05:
        request = replace(request, method=dice.choice(("GET", "PUT", "HEAD", "OPTIONS", "DELETE", "ÿ")))
    return request


def _with(request: Request, header: tuple[bytes, bytes]) -> Request:
    """That header in the place of any other of its name."""
    return replace(request, headers=(*(each for each in request.headers if each[0] != header[0]), header))


def _raw(dice: Dice) -> Request:
    kind = dice.choice((b"image/png", b"image/jpeg", b"application/octet-stream", b"", b"text/html"))
    return Request(b"/predict", ((b"content-type", kind),), changed_image(dice))


def _form(dice: Dice) -> Request:
    parts = []
    for _ in range(dice.choice((0, 1, 1, 2, 20, 70, 1001))):
        head = b"Content-Disposition: " + dice.choice(DISPOSITIONS if dice.random() < 0.5 else DISPOSITIONS[:3])
        if dice.random() < 0.2:
            head += dice.choice(
                (b"\r\nContent-Type: image/png", b"\nx: y", b"\r\n x", b"\r\n" * 2, b"\r\n" + b"a: b\r\n" * 1500)
            )
        content = PICTURE if dice.random() < 0.6 else changed_image(dice)[:100_000]
        parts.append(
            b"--edge"
            + dice.choice((b"", b"", b" \t", b"x")) * dice.randrange(2)
            + b"\r\n"
            + head
            + b"\r\n\r\n"
            + content
            + b"\r\n"
        )
    end = dice.choice((b"--edge--\r\n", b"--edge--", b"--edge", b"--edge--\r\n" * 2, b""))
    body = b"".join(parts) + end
    return Request(b"/predict", ((b"content-type", b"multipart/form-data; boundary=edge"),), body)


def _many_headers(dice: Dice) -> Request:
    """As many parts as may be, each with as long a header as may be, whose parameters are hard to tell apart."""
    hard = dice.choice((b';"', b";", b'"', b'\\"', b"; name*1=a", b"=;", b'; a="'))
    head = b"Content-Disposition: form-data" + hard * (7900 // len(hard))
    part = b"--edge\r\n" + head + b"\r\n\r\nx\r\n"
    body = part * dice.choice((100, 999)) + b"--edge--\r\n"
    return Request(b"/predict", ((b"content-type", b"multipart/form-data; boundary=edge"),), body)


def _feedback(dice: Dice) -> Request:
    return Request(
        b"/feedback", ((b"content-type", b"application/json"),), changed_json({"id": KNOWN, "label": "owl"}, dice)
    )


def _tensor(dice: Dice) -> dict[str, Any]:
    if dice.random() < 0.5:
        data = [base64.b64encode(PICTURE).decode()]
        return {"name": "image", "datatype": "BYTES", "shape": [1], "data": data}
    return {"name": "image", "datatype": "UINT8", "shape": [1, 2, 2, 3], "data": [0, 255] * 6}


def _infer(dice: Dice) -> Request:
    document = {
        "id": "mine",
        "inputs": [_tensor(dice)],
        "outputs": [{"name": "label"}],
        "parameters": {"matcher": "mqmk"},
    }
    return Request(b"/v2/models/mqmk/infer", ((b"content-type", b"application/json"),), changed_json(document, dice))


def _infer_pixels(dice: Dice) -> Request:
    """A tensor of pixels whose shape says something else, or something large."""
    sides = (1, 2, 3, 0, -1, 1000, 6324, 10**6, 10**9, 2**31, 2**63, 10**30)
    shape = [dice.choice(sides) if dice.random() < 0.7 else 2 for _ in range(dice.choice((4, 4, 4, 3, 5, 1)))]
    data: Any = (
        [0] * dice.choice((0, 3, 12, 3000))
        if dice.random() < 0.7
        else dice.choice(([[1], 2], "x", {"a": 1}, [None], [1e9]))
    )
    document = {"inputs": [{"name": "image", "datatype": "UINT8", "shape": [*shape[:3], 3], "data": data}]}
    return Request(b"/v2/models/mqmk/infer", (), json.dumps(document).encode())


def _infer_binary(dice: Dice) -> Request:
    """JSON, and after it elements with their lengths."""
    size = dice.choice((len(PICTURE), len(PICTURE), 0, 2**32 - 1, len(PICTURE) + 1, 3))
    tail = (struct.pack("<I", size) + PICTURE) * dice.choice((1, 1, 2))
    tensor = {
        "name": "image",
        "datatype": "BYTES",
        "shape": [dice.choice((1, 1, 2))],
        "parameters": {"binary_data_size": len(tail)},
    }
    document = {"inputs": [tensor], "parameters": {"binary_data_output": dice.random() < 0.5}}
    head = changed_json(document, dice) if dice.random() < 0.4 else json.dumps(document).encode()
    length = str(len(head) + dice.choice((0, 0, 0, 1, -1))).encode()
    return Request(
        b"/v2/models/mqmk/infer", ((LENGTH, length),), head + (damaged(tail, dice) if dice.random() < 0.3 else tail)
    )


REQUESTS: Final[tuple[Callable[[Dice], Request], ...]] = (
    *(_raw,) * 12, *(_form,) * 12, *(_feedback,) * 12, *(_infer,) * 16, *(_infer_pixels,) * 8, *(_infer_binary,) * 8,
    _many_headers,
)  # fmt: skip


@dataclass(frozen=True)
class Reply:
    """What came back."""

    status: int
    body: bytes


async def send(app: Any, request: Request) -> Reply:
    """Hand a request to an ASGI application, as a server would that lets every byte through."""
    parts = [request.body[at : at + 2**16] for at in range(0, len(request.body), 2**16)] or [b""]
    pieces = iter([*({"type": "http.request", "body": part, "more_body": True} for part in parts[:-1]),
                   {"type": "http.request", "body": parts[-1], "more_body": False}])  # fmt: skip
    said: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        piece = next(pieces, None)
        if piece is None:
            await asyncio.sleep(3600)  # a server waits here until the client is gone
        return piece or {"type": "http.disconnect"}

    async def take(message: dict[str, Any]) -> None:
        said.append(message)

    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": request.method, "scheme": "http",
        "path": request.path.decode("utf-8", "replace"), "raw_path": request.path, "query_string": request.query,
        "root_path": "", "headers": list(request.headers), "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80),
    }  # fmt: skip
    await app(scope, receive, take)
    return Reply(said[0]["status"], b"".join(each.get("body", b"") for each in said[1:]))
