"""The random schedule of kills and the processes that it may target."""

import enum
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mqmk.daemon.ray_runtime.head import head_processes
from mqmk.daemon.ray_runtime.processes import arguments

LONG_RUN_SECONDS: Final = 300.0
"""Runs of at least this many seconds also kill the GCS."""
PAUSES: Final = (3.0, 6.0)
LONG_PAUSES: Final = (4.0, 8.0)
"""Seconds; longer, so that some versions are built, published and swapped in between two kills."""
FIRST_PAUSE_SECONDS: Final = 12.0
"""Pause after the first kill, the daemon's: long enough for its restart."""


class Kind(enum.StrEnum):
    """Kinds of processes that are killed."""

    DAEMON = "daemon"
    TRAINER = "trainer"  # or the builder: actors of one class
    REPLICA = "replica"
    PROXY = "proxy"
    CONTROLLER = "controller"
    RAYLET = "raylet"
    GCS = "GCS"


ROUND: Final = {Kind.DAEMON: 1, Kind.TRAINER: 2, Kind.REPLICA: 2, Kind.PROXY: 1, Kind.CONTROLLER: 1, Kind.RAYLET: 1}
"""Kills per round; a round takes about a minute."""
LONG_ROUND: Final = {
    Kind.DAEMON: 3, Kind.TRAINER: 3, Kind.REPLICA: 5, Kind.PROXY: 4, Kind.CONTROLLER: 3, Kind.RAYLET: 1, Kind.GCS: 1
}  # fmt: skip
_TITLES: Final = {
    "ray::Worker": Kind.TRAINER,
    "ray::ServeReplica": Kind.REPLICA,
    "ray::ProxyActor": Kind.PROXY,
    "ray::ServeController": Kind.CONTROLLER,
}
_PROGRAMS: Final = {"raylet": Kind.RAYLET, "gcs_server": Kind.GCS}


@dataclass(frozen=True)
class PlannedKill:
    """One entry of the schedule."""

    kind: Kind
    which: float
    """0 to 1: selects one of several processes."""
    pause: float
    """Seconds until the next kill."""


@dataclass(frozen=True)
class Kill:
    """A kill that was carried out."""

    number: int
    kind: Kind
    at: float
    """Seconds since the epoch, comparable with request times."""
    pid: int


@dataclass(frozen=True)
class ProcessSnapshot:
    """The running processes at one moment."""

    at: float
    pids: Mapping[Kind, tuple[int, ...]]


def plan_kills(seed: int, seconds: float) -> list[PlannedKill]:
    """A schedule of kills, reproducible from the seed.

    The daemon comes first, followed by a longer pause. Then every round is shuffled and used up before the next one, so
    that even a short run contains every kind.
    """
    rng = random.Random(seed)
    kills_per_round, pauses = (LONG_ROUND, LONG_PAUSES) if seconds >= LONG_RUN_SECONDS else (ROUND, PAUSES)
    found, left = [PlannedKill(Kind.DAEMON, 0.0, FIRST_PAUSE_SECONDS)], []
    while sum(each.pause for each in found) < seconds:
        if not left:
            left = [kind for kind, count in kills_per_round.items() for _ in range(count)]
            rng.shuffle(left)
        found.append(PlannedKill(left.pop(), rng.random(), rng.uniform(*pauses)))
    return found


def snapshot_processes(at: float, ray_folder: Path, daemon: int | None) -> ProcessSnapshot:
    """Find all processes that may be killed."""
    found: dict[Kind, list[int]] = {kind: [] for kind in Kind}
    if daemon is not None:
        found[Kind.DAEMON].append(daemon)
    for each in head_processes(ray_folder):
        kind = _PROGRAMS.get(each.name) or _by_title(arguments(each.pid)[:1])
        if kind is not None:
            found[kind].append(each.pid)
    return ProcessSnapshot(at, {kind: tuple(sorted(pids)) for kind, pids in found.items()})


def _by_title(words: Sequence[str]) -> Kind | None:
    """Ray titles the processes of its actors like `ray::Worker.run`."""
    title = words[0] if words else ""
    return next((kind for start, kind in _TITLES.items() if title.startswith(start)), None)
