"""What a running daemon costs: bytes on disk, memory of its processes, what a swap reads, how long a call takes.

Nothing here knows how pools are stored: folders are walked, and the pool that CURRENT names is either a folder of its
own or a card that names layers by their hashes.
"""

import json
import os
import re
import sqlite3
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from programs.soak.run import database_size, process_group, processes

from mqmk.deploy.serving.telemetry.heartbeat import live_replicas
from mqmk.matcher.errors import PoolError
from mqmk.matcher.pointer import read_pointer

MIB: Final = 2.0**20
_HASH: Final = re.compile(r"[0-9a-f]{64}")
_JOURNALS: Final = ("-wal", "-shm", "-journal")


# Bytes on disk


def bytes_by_part(state: Path) -> Counter[str]:
    """Bytes of every part of a state directory, such as `pools/layers`, `mlflow/mlflow.db`, `evaluations`.

    A file with several names counts once, a database by its pages in use: its journal comes and goes.
    """
    found: Counter[str] = Counter()
    seen: set[tuple[int, int]] = set()
    for folder, _, names in os.walk(state):
        for name in names:
            path = Path(folder) / name
            with suppress(FileNotFoundError):  # removed meanwhile
                known = path.stat()
                if (known.st_dev, known.st_ino) not in seen and not name.endswith(_JOURNALS):
                    seen.add((known.st_dev, known.st_ino))
                    found[_part(path.relative_to(state))] += _bytes(path, known.st_size)
    return found


def _part(path: Path) -> str:
    """The first folder, and in `pools` and `mlflow` the second, unless it is one of many versions."""
    first, *rest = path.parts
    if first in ("pools", "mlflow") and rest and not rest[0][0].isdigit():
        return f"{first}/{rest[0]}"
    return first


def _bytes(path: Path, found: int) -> int:
    if path.suffix in (".sqlite", ".db"):
        with suppress(sqlite3.Error):
            return int(1000 * database_size(path))
    return found


def bytes_under(parts: Mapping[str, int], *first: str) -> int:
    """Of the named parts; of all if none is named."""
    return sum(value for name, value in parts.items() if not first or name.split("/")[0] in first)


@dataclass(frozen=True)
class PoolBytes:
    """The size of the pool that CURRENT names."""

    served: int
    """What a replica loads: card and layers, without statistics."""
    statistics: int
    """Layers that only the builder reads."""


def pool_bytes(pools: Path) -> PoolBytes:
    """Of the current version: its card, pages and layers."""
    pointer = read_pointer(pools)
    if pointer is None:
        return PoolBytes(0, 0)
    card = pools / "versions" / pointer.card
    fields = json.loads(card.read_bytes())
    pages = [json.loads((pools / "layers" / f"{page}.json").read_bytes()) for page in fields.get("pages", [])]
    builder, replica = set[str](), set[str]()
    for field_name, value in _strings([fields, *pages]):
        if _HASH.fullmatch(value):
            (builder if field_name == "statistics" else replica).add(value)
    layers = {path.stem: path.stat().st_size for path in (pools / "layers").iterdir() if path.is_file()}
    return PoolBytes(
        card.stat().st_size + sum(layers.get(each, 0) for each in replica),
        sum(layers.get(each, 0) for each in builder - replica),
    )


def _strings(document: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Every text of a JSON document with the name of its field."""
    if isinstance(document, str):
        yield name, document
    elif isinstance(document, dict):
        for key, value in document.items():
            yield from _strings(value, key)
    elif isinstance(document, list):
        for value in document:
            yield from _strings(value, name)


# Memory


def peak_mib(pid: int) -> float:
    """The most resident memory the process ever had; 0 if it has ended."""
    return _status_row(Path(f"/proc/{pid}/status"), "VmHWM:")


def shared_mib(pid: int) -> float:
    """Proportional memory now: pages that several processes have are divided among them. 0 if it has ended."""
    return _status_row(Path(f"/proc/{pid}/smaps_rollup"), "Pss:")


def _status_row(path: Path, name: str) -> float:
    with suppress(OSError, StopIteration):
        row = next(row for row in path.read_text().splitlines() if row.startswith(name))
        return int(row.split()[1]) / 1024
    return 0.0


@dataclass
class BuilderWatch:
    """Which of Ray's workers builds versions: the one that computes most from TRAINED to PUBLISHED."""

    state: Path
    pid: int | None = None
    peak: float = 0.0
    """MiB, of all builders so far."""
    _before: Mapping[int, int] = field(default_factory=dict)

    def build_begins(self) -> None:
        self._before = self._ticks()

    def build_ends(self) -> None:
        spent = {pid: ticks - self._before.get(pid, 0) for pid, ticks in self._ticks().items()}
        if spent and self._before:
            self.pid = max(spent, key=lambda pid: spent[pid])
        self._before = {}
        self.peak = max(self.peak, peak_mib(self.pid) if self.pid else 0.0)

    def _ticks(self) -> dict[int, int]:
        """Processor time of every worker."""
        found = {}
        with suppress(OSError, ValueError, KeyError):
            head = json.loads((self.state / "ray" / "head.json").read_text())["pid"]
            for each in processes():
                if each.session == head and process_group(each) == "trainers":
                    with suppress(OSError):
                        numbers = Path(f"/proc/{each.pid}/stat").read_text().rpartition(")")[2].split()
                        found[each.pid] = int(numbers[11]) + int(numbers[12])
        return found


# Swaps


@dataclass(frozen=True)
class Swap:
    """A version's way from CURRENT to every replica."""

    version: int
    ms: float
    bytes_read: float
    """By a replica, with system calls (`rchar`); what it maps into memory is not among them."""


@dataclass
class SwapWatch:
    """A thread that looks at CURRENT and at the replicas' status files, and notes every swap."""

    state: Path
    seconds: float = 0.025
    swaps: list[Swap] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> "SwapWatch":
        self._thread = threading.Thread(target=self._run, name="swaps", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def of_versions(self, first: int, last: int) -> list[Swap]:
        return [swap for swap in self.swaps if first <= swap.version <= last]

    def _run(self) -> None:
        version, since, before = self._version(), None, dict[int, int]()
        while not self._stop.wait(self.seconds):
            found = self._version()
            if found != version:
                version, since = found, time.monotonic()  # `before` is of the moment before it moved
            replicas = [each for each in live_replicas(self.state / "replicas") if each.ready]
            if since is None or version is None:
                before = {each.pid: bytes_read(each.pid) for each in replicas}
            elif replicas and all(each.pool_version == version for each in replicas):
                read = [bytes_read(pid) - count for pid, count in before.items() if bytes_read(pid)]
                self.swaps.append(Swap(version, 1000 * (time.monotonic() - since), max(read, default=0)))
                since = None

    def _version(self) -> int | None:
        with suppress(PoolError, OSError):
            pointer = read_pointer(self.state / "pools")
            return pointer.version if pointer else None
        return None


def bytes_read(pid: int) -> int:
    """With system calls, from files and pipes; not from sockets."""
    with suppress(OSError, StopIteration):
        rows = Path(f"/proc/{pid}/io").read_text().splitlines()
        return int(next(row for row in rows if row.startswith("rchar:")).split()[1])
    return 0


# The ledger


@dataclass(frozen=True)
class TaskTimes:
    """When a task reached each state first, in seconds since the epoch."""

    dropped: float
    reached: Mapping[str, float]

    def between(self, begin: str | None, end: str) -> float | None:
        """Seconds from one state, or from the drop, to another; None where it was not in both."""
        first = self.dropped if begin is None else self.reached.get(begin)
        last = self.reached.get(end)
        return last - first if first is not None and last is not None else None


class LedgerView:
    """Reads a ledger that a daemon writes."""

    def __init__(self, path: Path) -> None:
        self._db = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=30)

    def close(self) -> None:
        self._db.close()

    def task(self, name: str) -> tuple[int, str, str] | None:
        """Its number, its state and why it is there."""
        asked = "SELECT id, state, coalesce(reason, '') FROM tasks WHERE name = ? ORDER BY id DESC LIMIT 1"
        return self._db.execute(asked, (name,)).fetchone()

    def times(self, number: int, dropped: float) -> TaskTimes:
        asked = "SELECT state, min(at) FROM events WHERE task = ? AND state IS NOT NULL GROUP BY state"
        return TaskTimes(dropped, dict(self._db.execute(asked, (number,)).fetchall()))

    def served(self) -> list[str]:
        """Names of the tasks that are served."""
        return [name for (name,) in self._db.execute("SELECT name FROM tasks WHERE state = 'SERVING' ORDER BY id")]

    def accuracy(self, version: int) -> float | None:
        """On held-out images, as the version's evaluation says."""
        with suppress(sqlite3.Error, TypeError, ValueError):
            row = self._db.execute("SELECT evaluation FROM versions WHERE version = ?", (version,)).fetchone()
            return float(json.loads(row[0])["accuracy"])
        return None

    def all_recorded(self) -> bool:
        """Whether MLflow has every published version."""
        with suppress(sqlite3.Error):
            asked = "SELECT count(*) FROM versions WHERE step = 'PUBLISHED' AND NOT recorded"
            return not self._db.execute(asked).fetchone()[0]
        return True


# Time


def milliseconds(what: Callable[[], object], times: int) -> float:
    """Median of a few."""
    found = []
    for _ in range(times):
        began = time.monotonic()
        what()
        found.append(1000 * (time.monotonic() - began))
    return statistics.median(found)


def quantile(values: Sequence[float], share: float) -> float | None:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


def median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def ledger_exists(state: Path) -> bool:
    """Whether there is one with its tables."""
    path = state / "ledger.sqlite"
    if not path.exists():
        return False
    with suppress(sqlite3.Error), closing(sqlite3.connect(path)) as db:
        return bool(db.execute("SELECT count(*) FROM sqlite_master WHERE name = 'versions'").fetchone()[0])
    return False
