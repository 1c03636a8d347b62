"""What a worker is asked to do and what it answers: plain values that travel between processes.

A worker keeps nothing: what it needs comes with the job, what it made goes back with the answer, so any worker on any
machine can take over from one that died.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

from mqmk.daemon.config import Config
from mqmk.matcher.pool_files import PoolFiles

CREDENTIALS: Final = ("AWS_", "GOOGLE_", "AZURE_", "FSSPEC_")
"""How variables begin that a bucket's store reads."""


@dataclass(frozen=True)
class Tools:
    """What every job needs besides itself, the daemon's credentials included, whoever started Ray and when.

    They travel with each call: what an actor is made with and its runtime environment, Ray writes to disk and logs.
    """

    config: Config = field(repr=False)
    credentials: Mapping[str, str] = field(repr=False)

    @classmethod
    def of(cls, config: Config) -> Self:
        """The tools of this process."""
        return cls(config, {name: value for name, value in os.environ.items() if name.startswith(CREDENTIALS)})

    def take_up(self) -> Config:
        """Make the credentials those of this process."""
        os.environ.update(self.credentials)
        return self.config


@dataclass(frozen=True)
class Validate:
    """Read a task once and say whether it is fit to be learned."""

    task: int
    name: str
    folder: str
    manifest: bytes | None
    """TASK.json; None where it is to be derived from the shards."""
    known_classes: Mapping[str, str]


@dataclass(frozen=True)
class Validated:
    """The task's manifest and what it holds."""

    manifest: bytes
    report: Mapping[str, Any]


@dataclass(frozen=True)
class Learn:
    """Train a task's prompt."""

    task: int
    name: str
    folder: str
    manifest: bytes
    report: Mapping[str, Any]
    base: PoolFiles | None
    """The g-prompt, and the prompt to begin with; None for the first task."""
    split: int
    checkpoint: bytes | None


@dataclass(frozen=True)
class Progressed:
    """A whole epoch of a task."""

    detail: Mapping[str, Any]
    checkpoint: bytes


@dataclass(frozen=True)
class Learned:
    """The task's prompt as a pool of one, and the held-out pictures by which it is judged."""

    prompt: PoolFiles
    held_out: bytes


@dataclass(frozen=True)
class Build:
    """Make the next pool version from the current one, evaluate it, and pass it through the gate."""

    task: int
    kind: str  # learn or forget
    name: str
    identity: str
    version: int
    parent: str | None
    """Folder name of the current version."""
    approved: bool
    state: Path
    """The state directory: a build works beside the pool store."""


@dataclass(frozen=True)
class Built:
    """A candidate that is on disk and what was found about it."""

    version: int
    digest: str
    parent: int | None
    evaluation: Mapping[str, Any]
    refused: str | None
    """Why the gate says no."""


@dataclass(frozen=True)
class Stale:
    """The prompt was trained for another g-prompt than the pool has now: it must be learned again."""

    reason: str


Job = Validate | Learn | Build
Result = Validated | Learned | Built | Stale


@dataclass(frozen=True)
class Finished:
    """A job that came to its end."""

    job: Job
    result: Result


@dataclass(frozen=True)
class Failed:
    """A job that did not."""

    job: Job
    error: Exception


@dataclass(frozen=True)
class Reported:
    """A job that is under way."""

    job: Learn
    progress: Progressed


News = Finished | Failed | Reported
