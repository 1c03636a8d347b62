"""What happens around every route: request id and API key, and outermost the metrics of how each request ended."""

import asyncio
import re
import time
import uuid
from dataclasses import asdict
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mqmk.deploy.serving.api_keys import AcceptsKeys
from mqmk.deploy.serving.errors import BadRequestError, RequestError, UnauthorizedError
from mqmk.deploy.serving.http.errors import error_response
from mqmk.deploy.serving.http.oip_codec import MODEL
from mqmk.deploy.serving.http.request_state import state_of
from mqmk.deploy.serving.inference import StageTimes
from mqmk.deploy.serving.telemetry.recorder import RequestMetrics

PUBLIC_PATHS: Final = ("/", "/docs", "/openapi.json", "/healthz", "/readyz", "/v2/health/live", "/v2/health/ready")
"""Paths that need no API key: pages that contain no data, and health."""
_ID: Final = re.compile(r"[\x21-\x7e]{1,128}")
_ROUTES: Final = {"/predict": "predict", f"/v2/models/{MODEL}/infer": "infer", "/feedback": "feedback"}
_DISCONNECTED: Final = "499"  # the client did not wait; not our failure
_UNHANDLED: Final = "500"  # the status of an error that gets this far


class AuthMiddleware:
    """ASGI middleware. Behind Serve's proxy the proxy echoes the id, and `echo_id` is off."""

    def __init__(self, app: ASGIApp, keys: AcceptsKeys, echo_id: bool) -> None:
        self._app, self._keys, self._echo_id = app, keys, echo_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or reject it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = headers.get("x-request-id") or uuid.uuid4().hex
        state_of(scope).request_id = request_id

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
        if scope["path"] not in PUBLIC_PATHS and not self._keys.accept(_api_key(headers)):
            raise UnauthorizedError("expected a valid API key: Authorization: Bearer KEY, or X-Api-Key: KEY")


class MetricsMiddleware:
    """ASGI middleware, the outermost: counts every request, also those that are rejected, and adds `Server-Timing`."""

    def __init__(self, app: ASGIApp, metrics: RequestMetrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and count how it ends."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, code, state = time.perf_counter(), "", state_of(scope)

        async def send_with_timing(message: Message) -> None:
            nonlocal code
            if message["type"] == "http.response.start":
                code = str(message["status"])
                if state.stages:
                    timing = _server_timing(state.stages, time.perf_counter() - began)
                    MutableHeaders(scope=message)["Server-Timing"] = timing
            await send(message)

        try:
            await self._app(scope, receive, send_with_timing)
        except asyncio.CancelledError:
            code = code or _DISCONNECTED
            raise
        finally:
            route = _ROUTES.get(scope["path"], "other")
            self._metrics.count_request(route, code or _UNHANDLED, state.matcher, time.perf_counter() - began)


def _api_key(headers: Headers) -> str | None:
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key")


def _server_timing(stages: StageTimes, total: float) -> str:
    """As browsers and tools read it: milliseconds by name."""
    spent = {**asdict(stages), "total": total}
    return ", ".join(f"{name};dur={seconds * 1e3:.3f}" for name, seconds in spent.items())
