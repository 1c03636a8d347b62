"""What a row of the ledger says: tasks and their states, versions, events, commands, health."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, Literal


class State(StrEnum):
    """Where a task is."""

    DISCOVERED = "DISCOVERED"  # complete in the bucket, not read yet
    VALIDATED = "VALIDATED"  # every sample read once: fit to be learned
    TRAINING = "TRAINING"  # a worker learns it
    TRAINED = "TRAINED"  # its prompt is on disk, in no pool yet
    PUBLISHED = "PUBLISHED"  # in the pool version that CURRENT names
    SERVING = "SERVING"  # every live replica answers with it
    QUARANTINED = "QUARANTINED"  # will not be learned, for the reason given
    CONFLICT = "CONFLICT"  # another task of this name has other content
    HELD = "HELD"  # learned but not served: the gate or an operator said no
    FORGOTTEN = "FORGOTTEN"  # removed on request


IN_POOL: Final = (State.PUBLISHED, State.SERVING)


@dataclass(frozen=True)
class TaskRow:
    """One task."""

    id: int
    name: str
    folder: str
    fingerprint: str
    state: State
    identity: str | None
    reason: str | None
    code: str | None
    manifest: bytes | None
    report: Mapping[str, Any] | None
    approved: bool
    attempts: int
    not_before: float
    split: int
    version: int | None
    metrics: Mapping[str, Any]
    tidied: bool
    recorded: bool
    discovered_at: float
    updated_at: float


@dataclass(frozen=True)
class VersionRow:
    """One pool version; PLANNED until its files are in the store and CURRENT names it."""

    version: int
    digest: str
    parent: int | None
    kind: Literal["learn", "forget"]
    task: int | None
    step: Literal["PLANNED", "PUBLISHED"]
    evaluation: Mapping[str, Any]
    recorded: bool
    created_at: float


@dataclass(frozen=True)
class Event:
    """Something that happened."""

    number: int
    at: float
    task: int | None
    event: str
    state: str | None
    detail: Mapping[str, Any]


@dataclass(frozen=True)
class Command:
    """Something that an operator asked for."""

    id: int
    at: float
    kind: str
    subject: str
    state: Literal["PENDING", "DONE", "REFUSED"]
    answer: str | None


@dataclass(frozen=True)
class Health:
    """Whether something the daemon depends on works, and since when."""

    part: str
    up: bool
    says: str
    since: float
