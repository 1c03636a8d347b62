"""What middlewares and routes tell each other about one request, kept in its ASGI scope."""

from dataclasses import dataclass
from typing import Final

from starlette.requests import Request
from starlette.types import Scope

from mqmk.deploy.serving.inference import StageTimes
from mqmk.deploy.serving.telemetry.declared import NO_MATCHER

_STATE: Final = "mqmk.request"


@dataclass
class RequestState:
    """Of one request; filled in on its way."""

    request_id: str = ""
    matcher: str = NO_MATCHER
    stages: StageTimes | None = None


def state_of(scope: Scope) -> RequestState:
    """The state of a request; a new one at first."""
    state: RequestState = scope.setdefault(_STATE, RequestState())
    return state


def request_id_of(request: Request) -> str:
    """The id that the response carries and that feedback names."""
    return state_of(request.scope).request_id


def set_matcher(request: Request, matcher: str) -> None:
    """From now on the request counts as one of this matcher."""
    state_of(request.scope).matcher = matcher


def set_timings(request: Request, stages: StageTimes) -> None:
    """Where the time of the request went, for the header `Server-Timing`."""
    state_of(request.scope).stages = stages
