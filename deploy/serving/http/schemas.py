"""JSON bodies that only the HTTP API knows; those of answers and feedback are in answer.py and feedback.py."""

from typing import Any, Final

from pydantic import BaseModel, Field


class ErrorBody(BaseModel):
    """Every error."""

    error: str
    """What was expected, and what came."""
    code: str
    """A word for programs."""


class ReadyBody(BaseModel):
    """The pool that a replica serves."""

    ready: bool
    pool_version: int
    current: bool
    """Whether that is the version that CURRENT names; if not, `mqmk-daemon status` says why."""


class TaskBody(BaseModel):
    """A task that was learned."""

    name: str
    classes: list[str]
    samples: int
    trained_at: str
    metrics: dict[str, Any]


class PoolBody(BaseModel):
    """What has been learned so far; `pool_version` is null before the first task."""

    pool_version: int | None
    digest: str | None
    backbone: str
    matcher: str
    """The default; `auto` is resolved for this pool."""
    matchers: list[str]
    """Those that a request may name."""
    classes: int
    """The same as `num_classes`."""
    num_tasks: int
    num_classes: int
    """Distinct names; both numbers are of the whole pool, whatever page or search was asked for."""
    found: int
    """Tasks that the search found; all of them without one."""
    next: str | None
    """The query of the next page, relative to the address of this one; null on the last."""
    tasks: list[TaskBody]
    """Those of this page."""
    matching: dict[str, Any]


LABEL_LENGTH: Final = 1000


class FeedbackIn(BaseModel):
    """The true label of an answer."""

    id: str = Field(min_length=1, max_length=LABEL_LENGTH)
    label: str = Field(min_length=1, max_length=LABEL_LENGTH)
