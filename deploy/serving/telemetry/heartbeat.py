"""The status of each replica: `replicas/<id>.json`, touched every second.

Files survive kill -9 of anything, cover every replica (a Serve handle reaches one), and are read without Ray. A replica
whose file was not touched for a few seconds is gone.
"""

import json
import os
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Final

HEARTBEAT_SECONDS: Final = 1.0
LIVE_SECONDS: Final = 5.0
"""Older than this: the replica is gone. A busy machine may delay a heartbeat by a few seconds."""
STALE_SECONDS: Final = 60.0
DEPLOYED: Final = "DEPLOYED"
"""A file beside those of the replicas: what the service was started with."""


@dataclass(frozen=True)
class ReplicaStatus:
    """One replica, as it sees itself."""

    replica_id: str
    pid: int
    ready: bool
    pool_version: int | None = None
    digest: str | None = None
    swaps: int = 0
    failures: int = 0
    """Pools that were rejected; each counts once."""
    failures_by_stage: dict[str, int] = field(default_factory=dict)
    last_failure: str | None = None
    """Why the pool that CURRENT names is not served; None when it is."""
    feedback: dict[str, int] = field(default_factory=dict)
    """Feedback by result (`feedback.COUNTED`)."""
    matched_by_task: dict[str, int] = field(default_factory=dict)
    """Feedback on answers of each matched task whose match was right."""
    mismatched_by_task: dict[str, int] = field(default_factory=dict)
    node: str = ""
    """The address of its machine."""
    age_seconds: float = 0.0
    """Since the last heartbeat, when it was read."""


class StatusFile:
    """One replica's file: rewritten when something changed, else touched as a heartbeat."""

    def __init__(self, folder: Path, replica_id: str) -> None:
        self._path = folder / f"{replica_id}.json"
        self._last: tuple[str, float] = ("", 0.0)
        folder.mkdir(parents=True, exist_ok=True)
        _remove_stale(folder)

    def write(self, status: ReplicaStatus) -> None:
        """Never raises: a full disk must not end serving, and readers notice a missing heartbeat."""
        with suppress(OSError):
            self._write(json.dumps(asdict(status) | {"age_seconds": 0.0}))

    def remove(self) -> None:
        """The replica shuts down."""
        with suppress(OSError):
            self._path.unlink(missing_ok=True)

    def _write(self, text: str) -> None:
        now = time.monotonic()
        if text == self._last[0]:
            if now - self._last[1] < HEARTBEAT_SECONDS:
                return
            try:
                os.utime(self._path)
            except FileNotFoundError:  # removed by another replica's start, or by an operator
                self._replace(text)
        else:
            self._replace(text)
        self._last = (text, now)

    def _replace(self, text: str) -> None:
        self._path.parent.mkdir(exist_ok=True)  # not its parents: a removed state directory stays removed
        part = self._path.with_suffix(".part")
        part.write_text(text)
        part.replace(self._path)  # not synced: after a power cut there is no replica either


def live_replicas(folder: Path, within: float = LIVE_SECONDS) -> list[ReplicaStatus]:
    """The live replicas, sorted by id."""
    found = (_read(path) for path in sorted(folder.glob("*.json")))
    return [status for status in found if status and status.age_seconds <= within]


def deployed_service(folder: Path) -> dict[str, str]:
    """What the service was started with: `settings`, a digest, and `url`; empty if none was started."""
    with suppress(OSError, ValueError, AttributeError):
        found = json.loads((folder / DEPLOYED).read_text())
        return {str(name): str(value) for name, value in found.items()}
    return {}


def _read(path: Path) -> ReplicaStatus | None:
    """None if it is being replaced, or is malformed."""
    with suppress(OSError, ValueError, TypeError, AttributeError):
        values: dict[str, Any] = json.loads(path.read_text())
        known = {name.name for name in fields(ReplicaStatus)}
        age = max(0.0, time.time() - path.stat().st_mtime)
        return ReplicaStatus(
            **({name: value for name, value in values.items() if name in known} | {"age_seconds": age})
        )
    return None


def _remove_stale(folder: Path) -> None:
    for path in folder.glob("*.json"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > STALE_SECONDS:
                path.unlink()
