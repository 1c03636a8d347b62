"""The jobs of workers and their results: plain values that travel between processes.

A worker is stateless: a job carries all it needs and the result all it made, so any worker on any machine can take over
from one that died. A job belongs to one attempt of each of its tasks; its result is dropped once one of them is over.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

from mqmk.daemon.config.sections import Config
from mqmk.learner.data.manifest import Manifest
from mqmk.matcher.pointer import Pointer
from mqmk.matcher.pool_files import PoolFiles

CREDENTIALS: Final = ("AWS_", "GOOGLE_", "AZURE_", "FSSPEC_")
"""Prefixes of the environment variables that object stores read."""


@dataclass(frozen=True)
class JobContext:
    """What every job needs besides itself: the configuration and the daemon's credentials.

    Sent with each call: Ray writes the constructor arguments and the runtime environment of an actor to disk and logs.
    """

    config: Config = field(repr=False)
    credentials: Mapping[str, str] = field(repr=False)

    @classmethod
    def of_this_process(cls, config: Config) -> Self:
        """With the credentials of this process."""
        return cls(config, {name: value for name, value in os.environ.items() if name.startswith(CREDENTIALS)})

    def apply(self) -> Config:
        """Set the credentials in this process; returns the configuration."""
        os.environ.update(self.credentials)
        return self.config


@dataclass(frozen=True)
class Validate:
    """Read a task once and decide whether it can be learned."""

    task: int
    attempt: int
    name: str
    folder: str
    manifest: Manifest | None
    """None if it is to be derived from the shards."""
    known_classes: Mapping[str, str]


@dataclass(frozen=True)
class Validated:
    """The task's manifest, and what its samples contain."""

    manifest: Manifest
    report: Mapping[str, Any]


@dataclass(frozen=True)
class Learn:
    """Train a task's prompt."""

    task: int
    attempt: int
    name: str
    folder: str
    manifest: Manifest
    report: Mapping[str, Any]
    base: PoolFiles | None
    """The g-prompt, and the prompt to start from; None for the first task."""
    split: int
    checkpoint: bytes | None


@dataclass(frozen=True)
class EpochProgress:
    """A completed epoch of a task's training."""

    detail: Mapping[str, Any]
    checkpoint: bytes


@dataclass(frozen=True)
class Learned:
    """The task's prompt as a pool of one, and the held-out images to evaluate it on."""

    prompt: PoolFiles
    held_out: bytes


@dataclass(frozen=True)
class BuildTask:
    """A trained task that a version may add, or the one that it leaves out."""

    task: int
    attempt: int
    name: str
    identity: str
    approved: bool
    """An operator wants it whatever its accuracy."""


@dataclass(frozen=True)
class Build:
    """Make the next pool version from the current one, evaluate it, and check it against the gate."""

    kind: str  # learn or forget
    tasks: tuple[BuildTask, ...]
    """Those to add, in order; one to leave out."""
    version: int
    parent: Pointer | None
    """Folder name of the current version."""
    state: Path
    """The state directory: candidates are written beside the pool store."""

    @property
    def name(self) -> str:
        """What it is about, for people."""
        return ", ".join(task.name for task in self.tasks)


@dataclass(frozen=True)
class GateRejection:
    """Why the gate refused a task, and the figures that it reached."""

    reason: str
    metrics: Mapping[str, Any]


@dataclass(frozen=True)
class Built:
    """A candidate version on disk with its evaluation, and what became of each task.

    A task in none of `added`, `refused` and `stale` waits for the next version.
    """

    candidate: Pointer | None
    """None if the gate refused all there was to publish."""
    parent: int | None
    evaluation: Mapping[str, Any]
    added: tuple[int, ...] = ()
    """Tasks that the candidate adds, in order."""
    refused: Mapping[int, GateRejection] = field(default_factory=dict)
    stale: tuple[int, ...] = ()
    """Tasks trained with another g-prompt than the pool has now: they must be trained again."""


Job = Validate | Learn | Build
Result = Validated | Learned | Built


def attempts_of(job: Job) -> dict[int, int]:
    """The tasks that a job is about, each with the attempt that it belongs to."""
    return {each.task: each.attempt for each in (job.tasks if isinstance(job, Build) else (job,))}


@dataclass(frozen=True)
class Finished:
    """A job that completed."""

    job: Job
    result: Result


@dataclass(frozen=True)
class Failed:
    """A job that failed."""

    job: Job
    error: Exception


@dataclass(frozen=True)
class ProgressUpdate:
    """A job that is running."""

    job: Learn
    progress: EpochProgress


JobUpdate = Finished | Failed | ProgressUpdate
