"""What happens to a request before any route sees it: its id, its key, and never more of its body than allowed."""

import re
import uuid
from typing import Any, Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mqmk.deploy.errors import BadRequestError, RequestError, TooLargeError, UnauthorizedError
from mqmk.deploy.keys import ApiKeys

_ID = re.compile(r"[\x21-\x7e]{1,128}")
_OPEN = ("/", "/docs", "/openapi.json", "/v2/health/live", "/v2/health/ready")
"""What anybody may see: pages that hold no data, and health."""
_PATIENCE: Final = 4
"""A body of up to this many times the limit is read to its end before it is refused."""


class Doorman:
    """ASGI middleware. Behind Serve's proxy the proxy echoes the id, and `echo_id` is off."""

    def __init__(self, app: ASGIApp, keys: ApiKeys, echo_id: bool) -> None:
        self._app, self._keys, self._echo_id = app, keys, echo_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request in, or answer it here."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = headers.get("x-request-id") or uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if self._echo_id and message["type"] == "http.response.start" and _ID.fullmatch(request_id):
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        try:
            self._check(scope, headers, request_id)
        except RequestError as error:
            await error_response(error)(scope, receive, send_with_id)
            return
        await self._app(scope, receive, send_with_id)

    def _check(self, scope: Scope, headers: Headers, request_id: str) -> None:
        if not _ID.fullmatch(request_id):
            raise BadRequestError("X-Request-Id: expected 1 to 128 visible ASCII characters")
        if scope["path"] not in _OPEN and not self._keys.accept(_key(headers)):
            raise UnauthorizedError("expected a valid API key: Authorization: Bearer KEY, or X-Api-Key: KEY")


def error_response(error: RequestError) -> JSONResponse:
    """How a request error is answered."""
    headers: dict[str, str] = {}
    if error.retry_after is not None:
        headers["Retry-After"] = str(error.retry_after)
    if isinstance(error, UnauthorizedError):
        headers["WWW-Authenticate"] = "Bearer"
    said = str(error).encode("utf-8", "backslashreplace").decode()  # it may quote what no answer can hold
    return JSONResponse({"error": said}, error.status, headers)


def is_utf8(text: str) -> bool:
    """Whether an answer can hold it: JSON can say half a surrogate pair, UTF-8 cannot."""
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


async def read_body(request: Request, most: int) -> bytes:
    """The whole body; TooLargeError if it is larger.

    A body that is somewhat too large is read to its end and dropped: a client that is cut off while it sends sees a
    broken connection and never the reason. One that is far too large is cut off.
    """
    announced = request.headers.get("content-length", "")
    if announced.isascii() and announced.isdigit() and (len(announced) > 15 or int(announced) > _PATIENCE * most):
        raise TooLargeError(f"expected at most {most:,} bytes, got {announced[:15]}")
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > _PATIENCE * most:
            break
        if size <= most:
            parts.append(part)
    if size > most:
        raise TooLargeError(f"expected at most {most:,} bytes, got {size:,}")
    return b"".join(parts)


def request_id_of(request: Request) -> str:
    """The id that the answer carries and that feedback names."""
    state: Any = request.scope["state"]
    return str(state["request_id"])


def _key(headers: Headers) -> str | None:
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key")
