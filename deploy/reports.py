"""What each replica says it holds: `replicas/<id>.json`, renewed every second.

Files outlive kill -9 of anything, reach every replica (a Serve handle reaches one), and are read without Ray. A replica
whose file was not renewed for a few seconds is gone.
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
"""Older than this: the replica is gone. A busy machine may delay a heartbeat by a few of them."""
KEPT_SECONDS: Final = 60.0
DEPLOYED: Final = "DEPLOYED"
"""Beside the reports: what the service was started with."""


@dataclass(frozen=True)
class ReplicaReport:
    """One replica, as it saw itself."""

    replica_id: str
    pid: int
    ready: bool
    pool_version: int | None = None
    digest: str | None = None
    swaps: int = 0
    failures: int = 0
    """Pools that were refused, the first time each."""
    failures_by_stage: dict[str, int] = field(default_factory=dict)
    last_failure: str | None = None
    """Why the pool that CURRENT names is not served; None when it is."""
    feedback: dict[str, int] = field(default_factory=dict)
    """How often the true label said what (`feedback.COUNTED`)."""
    matched_by_task: dict[str, int] = field(default_factory=dict)
    """Feedback on answers of each matched task whose match was right."""
    mismatched_by_task: dict[str, int] = field(default_factory=dict)
    node: str = ""
    """The address of its machine."""
    age_seconds: float = 0.0
    """Since the last heartbeat, when it was read."""


class Reporter:
    """Writes one replica's file: at once when something changed, else as a heartbeat."""

    def __init__(self, folder: Path, replica_id: str) -> None:
        self._path = folder / f"{replica_id}.json"
        self._last: tuple[str, float] = ("", 0.0)
        folder.mkdir(parents=True, exist_ok=True)
        _forget_the_gone(folder)

    def write(self, report: ReplicaReport) -> None:
        """Never raises: a full disk must not end serving, and silence is what readers notice."""
        with suppress(OSError):
            self._write(json.dumps(asdict(report) | {"age_seconds": 0.0}))

    def remove(self) -> None:
        """The replica ends in order."""
        with suppress(OSError):
            self._path.unlink(missing_ok=True)

    def _write(self, text: str) -> None:
        now = time.monotonic()
        if text == self._last[0]:
            if now - self._last[1] < HEARTBEAT_SECONDS:
                return
            os.utime(self._path)
        else:
            part = self._path.with_suffix(".part")
            part.write_text(text)
            part.replace(self._path)  # not synced: after a power cut there is no replica either
        self._last = (text, now)


def live_reports(folder: Path, within: float = LIVE_SECONDS) -> list[ReplicaReport]:
    """The replicas that are alive, in order of their ids."""
    found = (_read(path) for path in sorted(folder.glob("*.json")))
    return [report for report in found if report and report.age_seconds <= within]


def deployed(folder: Path) -> dict[str, str]:
    """What the service was started with: `settings`, a digest, and `url`; empty where none ever was."""
    with suppress(OSError, ValueError, AttributeError):
        found = json.loads((folder / DEPLOYED).read_text())
        return {str(name): str(value) for name, value in found.items()}
    return {}


def _read(path: Path) -> ReplicaReport | None:
    """None if it is being replaced, or is not a report."""
    with suppress(OSError, ValueError, TypeError, AttributeError):
        values: dict[str, Any] = json.loads(path.read_text())
        known = {name.name for name in fields(ReplicaReport)}
        age = max(0.0, time.time() - path.stat().st_mtime)
        return ReplicaReport(
            **({name: value for name, value in values.items() if name in known} | {"age_seconds": age})
        )
    return None


def _forget_the_gone(folder: Path) -> None:
    for path in folder.glob("*.json"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > KEPT_SECONDS:
                path.unlink()
