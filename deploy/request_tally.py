"""How every request ended and how long it took: counted around the whole application, refusals at the door included.

An answer also says where its time went, in the header `Server-Timing`.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Final

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mqmk.deploy.inference_protocol import MODEL
from mqmk.deploy.measures import Measures
from mqmk.deploy.metric_names import NO_MATCHER
from mqmk.deploy.service import Answered, Stages

_ROUTES: Final = {"/predict": "predict", f"/v2/models/{MODEL}/infer": "infer", "/feedback": "feedback"}
_GONE: Final = "499"  # the client did not wait; no fault of ours
_UNEXPECTED: Final = "500"  # what an error that gets this far is answered with, further out


class RequestTally:
    """ASGI middleware, the outermost."""

    def __init__(self, app: ASGIApp, measures: Measures) -> None:
        self._app, self._measures = app, measures

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hand a request on, and count what becomes of it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, code = time.perf_counter(), ""

        async def send_noting(message: Message) -> None:
            nonlocal code
            if message["type"] == "http.response.start":
                code = str(message["status"])
                if stages := scope.get("state", {}).get("stages"):
                    MutableHeaders(scope=message)["Server-Timing"] = _told(stages, time.perf_counter() - began)
            await send(message)

        try:
            await self._app(scope, receive, send_noting)
        except asyncio.CancelledError:
            code = code or _GONE
            raise
        finally:
            matcher = scope.get("state", {}).get("matcher", NO_MATCHER)
            route = _ROUTES.get(scope["path"], "other")
            self._measures.request(route, code or _UNEXPECTED, matcher, time.perf_counter() - began)


def _told(stages: Stages, total: float) -> str:
    """As browsers and tools read it: milliseconds by name."""
    spent = {**asdict(stages), "total": total}
    return ", ".join(f"{name};dur={seconds * 1e3:.3f}" for name, seconds in spent.items())


def note_answers(request: Request, answers: Sequence[Answered]) -> None:
    """From here on it is known where the time of the request went."""
    request.scope["state"]["stages"] = answers[0].stages if answers else None


def note_matcher(request: Request, matcher: str) -> None:
    """From here on the request counts as one of this matcher."""
    request.scope["state"]["matcher"] = matcher
