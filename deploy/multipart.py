"""The files of a multipart/form-data body (RFC 7578), split in memory: the body's size is limited before."""

from collections.abc import Iterator
from dataclasses import dataclass
from email.message import Message
from typing import Final

from mqmk.deploy.errors import BadRequestError

_HEADER_BYTES: Final = 8192
_MOST_PARTS: Final = 1000


@dataclass(frozen=True)
class Part:
    """One field of a form."""

    name: str
    content: bytes


def parse_multipart(content_type: str, body: bytes) -> list[Part]:
    """Every part, in order; BadRequestError if it is not a complete form."""
    boundary = str(_header(content_type, "boundary") or "").encode("latin-1", "replace")
    if not 1 <= len(boundary) <= 70:
        raise BadRequestError("multipart/form-data: expected a boundary of 1 to 70 characters in Content-Type")
    return list(_parts(body, boundary))


def _parts(body: bytes, boundary: bytes) -> Iterator[Part]:
    _, *pieces = (b"\r\n" + body).split(b"\r\n--" + boundary, _MOST_PARTS + 1)
    if not pieces or not pieces[-1].startswith(b"--"):
        raise BadRequestError(f"multipart/form-data: expected at most {_MOST_PARTS} parts and a closing boundary")
    for piece in pieces[:-1]:
        padding, found, rest = piece.partition(b"\r\n")
        head, blank, content = (b"\r\n" + rest).partition(b"\r\n\r\n")
        if padding.strip(b" \t") or not found or not blank or len(head) > _HEADER_BYTES:
            raise BadRequestError("multipart/form-data: expected headers, an empty line and content in every part")
        yield Part(_name(head), content)


def _name(head: bytes) -> str:
    for line in head.decode("utf-8", "replace").split("\r\n"):
        title, _, value = line.partition(":")
        if title.strip().lower() == "content-disposition":
            return str(_header(value, "name") or "")
    return ""


def _header(value: str, parameter: str) -> object:
    message = Message()
    message["content-disposition"] = value.replace("\r", " ").replace("\n", " ")
    found = message.get_param(parameter, header="content-disposition")
    return found[2] if isinstance(found, tuple) else found  # RFC 2231 values come with charset and language
