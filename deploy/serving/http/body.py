"""Reading a request body, and never more of it than allowed."""

from typing import Final

from starlette.requests import Request

from mqmk.deploy.serving.errors import TooLargeError

DRAIN_FACTOR: Final = 4
"""A body of up to this many times the limit is read to its end before it is rejected."""


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body; TooLargeError if it is larger than the limit.

    A body that is somewhat too large is read to its end and dropped: a client that is cut off while it sends sees a
    broken connection and never the reason. One that is far too large is cut off.
    """
    announced = request.headers.get("content-length", "")
    if announced.isascii() and announced.isdigit() and (len(announced) > 15 or int(announced) > DRAIN_FACTOR * limit):
        raise TooLargeError(f"expected at most {limit:,} bytes, got {announced[:15]}")
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > DRAIN_FACTOR * limit:
            break
        if size <= limit:
            parts.append(part)
    if size > limit:
        raise TooLargeError(f"expected at most {limit:,} bytes, got {size:,}")
    return b"".join(parts)


def is_utf8(text: str) -> bool:
    """Whether a response can contain it: JSON can express half a surrogate pair, UTF-8 cannot."""
    return not any("\ud800" <= letter <= "\udfff" for letter in text)
