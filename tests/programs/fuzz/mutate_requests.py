"""Mutate HTTP requests (body, boundary, headers, query) and send them to an ASGI application."""

import asyncio
import base64
import json
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

from programs.fuzz.mutate_bytes import Rng, mutate_bytes
from programs.fuzz.mutate_images import mutate_image
from programs.fuzz.mutate_json import mutate_json
from support.shards import image_bytes

KNOWN_REQUEST_ID: Final = "an-answer-that-is-remembered"
IMAGE: Final = image_bytes(7)
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
    """A request as raw bytes."""

    path: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes
    query: bytes = b""
    method: str = "POST"

    def to_bytes(self) -> bytes:
        """As it would be sent over the wire."""
        head = self.method.encode() + b" " + self.path + (b"?" + self.query if self.query else b"") + b" HTTP/1.1\r\n"
        return head + b"".join(name + b": " + value + b"\r\n" for name, value in self.headers) + b"\r\n" + self.body


def mutate_request(rng: Rng) -> Request:
    """A valid request with random mutations."""
    request = rng.choice(REQUESTS)(rng)
    if rng.random() < 0.2:
        request = replace(request, body=mutate_bytes(request.body, rng))
    if rng.random() < 0.25:
        request = _set_header(request, rng.choice(ODD_HEADERS))
    if rng.random() < 0.15:
        request = replace(request, query=rng.choice(ODD_QUERIES))
    if rng.random() < 0.05:
        request = replace(
            request, path=rng.choice((b"/", b"/pool", b"/v2/models/other/infer", b"//predict", b"/\xff", b"/predict/"))
        )
    if rng.random() < 0.05:
        request = replace(request, method=rng.choice(("GET", "PUT", "HEAD", "OPTIONS", "DELETE", "ÿ")))
    return request


def _set_header(request: Request, header: tuple[bytes, bytes]) -> Request:
    """Replace every header of that name."""
    return replace(request, headers=(*(each for each in request.headers if each[0] != header[0]), header))


def _image_request(rng: Rng) -> Request:
    kind = rng.choice((b"image/png", b"image/jpeg", b"application/octet-stream", b"", b"text/html"))
    return Request(b"/predict", ((b"content-type", kind),), mutate_image(rng))


def _form_request(rng: Rng) -> Request:
    parts = []
    for _ in range(rng.choice((0, 1, 1, 2, 20, 70, 1001))):
        head = b"Content-Disposition: " + rng.choice(DISPOSITIONS if rng.random() < 0.5 else DISPOSITIONS[:3])
        if rng.random() < 0.2:
            head += rng.choice(
                (b"\r\nContent-Type: image/png", b"\nx: y", b"\r\n x", b"\r\n" * 2, b"\r\n" + b"a: b\r\n" * 1500)
            )
        content = IMAGE if rng.random() < 0.6 else mutate_image(rng)[:100_000]
        parts.append(
            b"--edge"
            + rng.choice((b"", b"", b" \t", b"x")) * rng.randrange(2)
            + b"\r\n"
            + head
            + b"\r\n\r\n"
            + content
            + b"\r\n"
        )
    end = rng.choice((b"--edge--\r\n", b"--edge--", b"--edge", b"--edge--\r\n" * 2, b""))
    body = b"".join(parts) + end
    return Request(b"/predict", ((b"content-type", b"multipart/form-data; boundary=edge"),), body)


def _many_headers_request(rng: Rng) -> Request:
    """Up to the maximum number of parts, each with the longest header allowed, whose parameters are costly to parse."""
    hard = rng.choice((b';"', b";", b'"', b'\\"', b"; name*1=a", b"=;", b'; a="'))
    head = b"Content-Disposition: form-data" + hard * (7900 // len(hard))
    part = b"--edge\r\n" + head + b"\r\n\r\nx\r\n"
    body = part * rng.choice((100, 999)) + b"--edge--\r\n"
    return Request(b"/predict", ((b"content-type", b"multipart/form-data; boundary=edge"),), body)


def _feedback_request(rng: Rng) -> Request:
    return Request(
        b"/feedback",
        ((b"content-type", b"application/json"),),
        mutate_json({"id": KNOWN_REQUEST_ID, "label": "owl"}, rng),
    )


def _tensor(rng: Rng) -> dict[str, Any]:
    if rng.random() < 0.5:
        data = [base64.b64encode(IMAGE).decode()]
        return {"name": "image", "datatype": "BYTES", "shape": [1], "data": data}
    return {"name": "image", "datatype": "UINT8", "shape": [1, 2, 2, 3], "data": [0, 255] * 6}


def _infer_request(rng: Rng) -> Request:
    document = {
        "id": "mine",
        "inputs": [_tensor(rng)],
        "outputs": [{"name": "label"}],
        "parameters": {"matcher": "mqmk"},
    }
    return Request(b"/v2/models/mqmk/infer", ((b"content-type", b"application/json"),), mutate_json(document, rng))


def _infer_pixels_request(rng: Rng) -> Request:
    """A pixel tensor whose shape does not match the data or is huge."""
    sides = (1, 2, 3, 0, -1, 1000, 6324, 10**6, 10**9, 2**31, 2**63, 10**30)
    shape = [rng.choice(sides) if rng.random() < 0.7 else 2 for _ in range(rng.choice((4, 4, 4, 3, 5, 1)))]
    data: Any = (
        [0] * rng.choice((0, 3, 12, 3000))
        if rng.random() < 0.7
        else rng.choice(([[1], 2], "x", {"a": 1}, [None], [1e9]))
    )
    document = {"inputs": [{"name": "image", "datatype": "UINT8", "shape": [*shape[:3], 3], "data": data}]}
    return Request(b"/v2/models/mqmk/infer", (), json.dumps(document).encode())


def _infer_binary_request(rng: Rng) -> Request:
    """JSON followed by length-prefixed binary elements."""
    size = rng.choice((len(IMAGE), len(IMAGE), 0, 2**32 - 1, len(IMAGE) + 1, 3))
    tail = (struct.pack("<I", size) + IMAGE) * rng.choice((1, 1, 2))
    tensor = {
        "name": "image",
        "datatype": "BYTES",
        "shape": [rng.choice((1, 1, 2))],
        "parameters": {"binary_data_size": len(tail)},
    }
    document = {"inputs": [tensor], "parameters": {"binary_data_output": rng.random() < 0.5}}
    head = mutate_json(document, rng) if rng.random() < 0.4 else json.dumps(document).encode()
    length = str(len(head) + rng.choice((0, 0, 0, 1, -1))).encode()
    return Request(
        b"/v2/models/mqmk/infer", ((LENGTH, length),), head + (mutate_bytes(tail, rng) if rng.random() < 0.3 else tail)
    )


REQUESTS: Final[tuple[Callable[[Rng], Request], ...]] = (
    *(_image_request,) * 12,
    *(_form_request,) * 12,
    *(_feedback_request,) * 12,
    *(_infer_request,) * 16,
    *(_infer_pixels_request,) * 8,
    *(_infer_binary_request,) * 8,
    _many_headers_request,
)


@dataclass(frozen=True)
class Reply:
    """The response."""

    status: int
    body: bytes


async def send(app: Any, request: Request) -> Reply:
    """Send a request to an ASGI application without the checks that an HTTP server would make."""
    parts = [request.body[at : at + 2**16] for at in range(0, len(request.body), 2**16)] or [b""]
    pieces = iter([*({"type": "http.request", "body": part, "more_body": True} for part in parts[:-1]),
                   {"type": "http.request", "body": parts[-1], "more_body": False}])  # fmt: skip
    messages: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        piece = next(pieces, None)
        if piece is None:
            await asyncio.sleep(3600)  # a server waits here until the client disconnects
        return piece or {"type": "http.disconnect"}

    async def collect(message: dict[str, Any]) -> None:
        messages.append(message)

    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": request.method, "scheme": "http",
        "path": request.path.decode("utf-8", "replace"), "raw_path": request.path, "query_string": request.query,
        "root_path": "", "headers": list(request.headers), "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80),
    }  # fmt: skip
    await app(scope, receive, collect)
    return Reply(messages[0]["status"], b"".join(each.get("body", b"") for each in messages[1:]))
