"""The rows of the ledger as values: tasks and their states, versions, events, commands, health."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, Literal


class State(StrEnum):
    """Where a task is on its way to being served."""

    DISCOVERED = "DISCOVERED"  # complete in the bucket, not read yet
    VALIDATED = "VALIDATED"  # every sample was read once and the task can be learned
    TRAINING = "TRAINING"  # a worker is training its prompt
    TRAINED = "TRAINED"  # its prompt is on disk, in no pool yet
    PUBLISHED = "PUBLISHED"  # in the pool version that CURRENT names
    SERVING = "SERVING"  # every live replica serves that version
    QUARANTINED = "QUARANTINED"  # rejected; the row has the reason
    CONFLICT = "CONFLICT"  # another task has the same name or the same content
    HELD = "HELD"  # learned but not served, by decision of the gate or an operator
    FORGOTTEN = "FORGOTTEN"  # removed on request


IN_POOL: Final = (State.PUBLISHED, State.SERVING)
LIVE: Final = (State.DISCOVERED, State.VALIDATED, State.TRAINING, State.TRAINED, State.HELD, *IN_POOL)
"""A task in one of these states owns its name, its classes and its content."""

_TRANSITIONS: Final[Mapping[State, tuple[State, ...]]] = {
    State.DISCOVERED: (State.VALIDATED, State.QUARANTINED, State.CONFLICT),
    State.VALIDATED: (State.TRAINING, State.QUARANTINED, State.HELD, State.PUBLISHED),
    State.TRAINING: (State.TRAINED, State.QUARANTINED, State.HELD, State.PUBLISHED),
    State.TRAINED: (State.PUBLISHED, State.HELD, State.VALIDATED, State.QUARANTINED),
    State.PUBLISHED: (State.SERVING, State.HELD),
    State.SERVING: (State.PUBLISHED, State.HELD),
    State.QUARANTINED: (State.DISCOVERED, State.CONFLICT),
    State.CONFLICT: (State.DISCOVERED, State.QUARANTINED),
    State.HELD: (State.TRAINED, State.VALIDATED, State.PUBLISHED),
    State.FORGOTTEN: (State.DISCOVERED,),
}
"""Allowed transitions. VALIDATED, TRAINING and HELD lead to PUBLISHED by a rollback to a version that contains the
task."""


def is_allowed(now: State, to: State) -> bool:
    """Whether a transition is allowed; every task can be forgotten, and every step retried."""
    return to in (now, State.FORGOTTEN) or to in _TRANSITIONS[now]


@dataclass(frozen=True)
class TaskRow:
    """One task, without its manifest and its report: they may be large."""

    id: int
    name: str
    folder: str
    fingerprint: str
    state: State
    attempt: int
    """Incremented by every transition; results of jobs of an earlier attempt are dropped."""
    identity: str | None
    reason: str | None
    code: str | None
    base: Mapping[str, Any] | None
    """What training read besides the task's own data: {"digest", "made_from": identities}."""
    approved: bool
    failures: int
    stale: int
    not_before: float
    split: int
    version: int | None
    metrics: Mapping[str, Any]
    cleaned_up: bool
    discovered_at: float
    updated_at: float


@dataclass(frozen=True)
class VersionTask:
    """A task that a version adds or leaves out."""

    task: int
    attempt: int | None
    """The task's when the version was built; None in versions of release 0.1."""
    base: Mapping[str, Any] | None
    """What the training of a task that it adds read besides the task's own data; None in versions of release 0.1."""


@dataclass(frozen=True)
class VersionRow:
    """One pool version; PLANNED until its files are in the store and CURRENT names it."""

    version: int
    digest: str
    parent: int | None
    kind: Literal["learn", "forget"]
    tasks: tuple[VersionTask, ...]
    """Those that it adds, in order, or the one that it leaves out."""
    step: Literal["PLANNED", "PUBLISHED"]
    evaluation: Mapping[str, Any]
    exact: bool | None
    """Of `forget`: nothing that can still be served was made from the task's data."""
    withdrawn: int | None
    """A forgotten task that this version contains: it is never served again."""
    recorded: bool
    created_at: float
    former_digest: str | None = None
    """What it had in the store of release 0.1."""


@dataclass(frozen=True)
class Event:
    """An entry of the history."""

    number: int
    at: float
    task: int | None
    event: str
    state: str | None
    detail: Mapping[str, Any]


@dataclass(frozen=True)
class Command:
    """An operator command."""

    id: int
    at: float
    kind: str
    subject: str
    task: int | None
    """The task it applies to, once decided: several tasks may have the same name."""
    state: Literal["PENDING", "DONE", "REFUSED", "CANCELLED"]
    answer: str | None


@dataclass(frozen=True)
class Health:
    """Whether a dependency of the daemon works, and since when."""

    dependency: str
    up: bool
    message: str
    since: float
