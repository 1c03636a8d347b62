"""Lets Serve's HTTP proxy answer in JSON where it answers itself: no replica, a timeout, an unknown route.

Ray 2.60 answers those in plain text and has no setting for it. It does call one function for Starlette middlewares when
a proxy starts, named by RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH; proxies of an external cluster have their own
environment and keep Ray's text.
"""

import json
from http import HTTPStatus

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

RETRY_AFTER_SECONDS = 5
"""A replacement replica is there within seconds, or not at all."""


def proxy_middlewares() -> list[Middleware]:
    """What Serve's proxy calls at its start."""
    return [Middleware(JsonErrors)]


def environment() -> dict[str, str]:
    """The variable with which proxies find this file."""
    return {"RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": f"{__name__}.{proxy_middlewares.__name__}"}


class JsonErrors:
    """Turns an error in plain text into `{"error", "code"}`; every other response passes unchanged."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith("/-/"):  # Ray's own routes
            await self.app(scope, receive, send)
            return
        start: Message | None = None
        text = b""

        async def send_json(message: Message) -> None:
            nonlocal start, text
            if message["type"] == "http.response.start" and _is_plain_error(message):
                start = message
            elif start is None:
                await send(message)
            else:
                text += message.get("body", b"")
                if not message.get("more_body"):
                    await _send_error(send, start, text)

        await self.app(scope, receive, send_json)


def _is_plain_error(message: Message) -> bool:
    types = [value for name, value in message.get("headers", ()) if name.lower() == b"content-type"]
    return message["status"] >= HTTPStatus.BAD_REQUEST and (not types or types[0].startswith(b"text/plain"))


async def _send_error(send: Send, start: Message, text: bytes) -> None:
    status = start["status"]
    reason = text.decode("utf-8", "backslashreplace").strip() or HTTPStatus(status).phrase
    body = json.dumps({"error": reason, "code": HTTPStatus(status).name.lower()}).encode()
    headers = [(name, value) for name, value in start.get("headers", ()) if not name.lower().startswith(b"content-")]
    headers += [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if status == HTTPStatus.SERVICE_UNAVAILABLE:
        headers.append((b"retry-after", str(RETRY_AFTER_SECONDS).encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
