"""Reads what a scrape needs from the state directory: the pool, the replicas, the disk. Without torch."""

import json
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mqmk.daemon.config.sections import Config
from mqmk.deploy.serving.telemetry.heartbeat import ReplicaStatus, live_replicas
from mqmk.matcher.errors import PoolError
from mqmk.matcher.pointer import Pointer, read_pointer


@dataclass(frozen=True)
class Pool:
    """The current version, as described by its files."""

    version: int
    card: str
    tasks: int
    classes: int
    size: int
    matching: Mapping[str, Any]


@dataclass(frozen=True)
class StateSnapshot:
    """The state directory at one moment."""

    pool: Pool | None
    replicas: tuple[ReplicaStatus, ...]
    disk_free: int
    disk_size: int


@dataclass
class StateReader:
    """Reads the state directory; a pool's card is read once."""

    config: Config
    _pool: Pool | None = None

    def read(self) -> StateSnapshot:
        """The state directory now."""
        disk = shutil.disk_usage(self.config.state.dir)
        return StateSnapshot(self._current(), tuple(self._replicas()), disk.free, disk.total)

    def _replicas(self) -> list[ReplicaStatus]:
        served = self.config.serve.enabled and self.config.ray.address != "none"
        return live_replicas(self.config.pools_folder.parent / "replicas") if served else []

    def _current(self) -> Pool | None:
        with suppress(OSError, ValueError, KeyError, TypeError, PoolError):  # absent, or replaced while it is read
            pointer = read_pointer(self.config.pools_folder)
            if pointer is None:
                return None
            if self._pool is None or self._pool.card != pointer.card:
                self._pool = _read(self.config.pools_folder, pointer)
            return self._pool
        return None


def _read(pools: Path, pointer: Pointer) -> Pool:
    """What a card says (matcher/pool_cards.py), without loading torch."""
    data = (pools / "versions" / pointer.card).read_bytes()
    card = json.loads(data)
    pages = [json.loads((pools / "layers" / f"{page}.json").read_bytes()) for page in card["pages"]]
    tasks = [task for page in (*pages, card["tasks"]) for task in page]
    classes, size = sum(len(task["classes"]) for task in tasks), sum(task["bytes"] for task in tasks)
    return Pool(pointer.version, pointer.card, len(tasks), classes, size + len(data), card["matching"])
