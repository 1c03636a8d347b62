"""Who is killed when, and who lives: the dice of the chaos test, and the processes they may fall on."""

import enum
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mqmk.daemon.processes import arguments
from mqmk.daemon.ray_head import head_processes

LONG: Final = 300.0
"""From this many seconds on a run is long, and the GCS is killed, too."""
PAUSES: Final = (3.0, 6.0)
LONG_PAUSES: Final = (4.0, 8.0)
"""Seconds; a little longer, so that now and then a version is built, published and swapped in between two kills."""
ALONE_SECONDS: Final = 12.0
"""How long the first kill, of the daemon, stays the only one: long enough for its restart."""


class Kind(enum.StrEnum):
    """What may be killed."""

    DAEMON = "daemon"
    TRAINER = "trainer"  # or the builder: actors of one class
    REPLICA = "replica"
    PROXY = "proxy"
    CONTROLLER = "controller"
    RAYLET = "raylet"
    GCS = "GCS"


BAG: Final = {Kind.DAEMON: 1, Kind.TRAINER: 2, Kind.REPLICA: 2, Kind.PROXY: 1, Kind.CONTROLLER: 1, Kind.RAYLET: 1}
"""One bagful is what a minute has room for."""
LONG_BAG: Final = {
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
class Throw:
    """One throw of the dice."""

    kind: Kind
    which: float
    """0 to 1: which one of several."""
    pause: float
    """Seconds until the next one."""


@dataclass(frozen=True)
class Kill:
    """A throw that hit."""

    number: int
    kind: Kind
    at: float
    """Seconds since the epoch, as everything that is compared with it."""
    pid: int


@dataclass(frozen=True)
class Look:
    """Who lived at a moment."""

    at: float
    pids: Mapping[Kind, tuple[int, ...]]


def throws(seed: int, seconds: float) -> list[Throw]:
    """The same seed gives the same throws.

    The daemon is first, and alone for a while; then the bag is emptied in random order and filled again, so that a
    short run has every kind, too.
    """
    dice = random.Random(seed)
    bag, pauses = (LONG_BAG, LONG_PAUSES) if seconds >= LONG else (BAG, PAUSES)
    found, left = [Throw(Kind.DAEMON, 0.0, ALONE_SECONDS)], []
    while sum(each.pause for each in found) < seconds:
        if not left:
            left = [kind for kind, count in bag.items() for _ in range(count)]
            dice.shuffle(left)
        found.append(Throw(left.pop(), dice.random(), dice.uniform(*pauses)))
    return found


def look(at: float, ray_folder: Path, daemon: int | None) -> Look:
    """Find everybody who may be killed."""
    found: dict[Kind, list[int]] = {kind: [] for kind in Kind}
    if daemon is not None:
        found[Kind.DAEMON].append(daemon)
    for each in head_processes(ray_folder):
        kind = _PROGRAMS.get(each.name) or _by_title(arguments(each.pid)[:1])
        if kind is not None:
            found[kind].append(each.pid)
    return Look(at, {kind: tuple(sorted(pids)) for kind, pids in found.items()})


def _by_title(words: Sequence[str]) -> Kind | None:
    """Ray gives its actors' processes titles such as `ray::Worker.do`."""
    title = words[0] if words else ""
    return next((kind for start, kind in _TITLES.items() if title.startswith(start)), None)
