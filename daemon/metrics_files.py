"""What the files of the state directory say at the moment of a scrape: the pool, the replicas, the disk. No torch."""

import json
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mqmk.daemon.config import Config
from mqmk.deploy.reports import ReplicaReport, live_reports
from mqmk.matcher.errors import PoolError
from mqmk.matcher.pointer import read_pointer


@dataclass(frozen=True)
class Pool:
    """The version that CURRENT names, as its files say."""

    version: int
    folder: str
    tasks: int
    classes: int
    size: int
    matching: Mapping[str, Any]


@dataclass(frozen=True)
class FilesLook:
    """Everything that is read for one scrape."""

    pool: Pool | None
    replicas: tuple[ReplicaReport, ...]
    disk_free: int
    disk_size: int


@dataclass
class FilesReader:
    """Reads the files; a pool's card is read once."""

    config: Config
    _pool: Pool | None = None

    def look(self) -> FilesLook:
        """The files now."""
        disk = shutil.disk_usage(self.config.state.dir)
        return FilesLook(self._current(), tuple(self._replicas()), disk.free, disk.total)

    def _replicas(self) -> list[ReplicaReport]:
        served = self.config.serve.enabled and self.config.ray.address != "none"
        return live_reports(self.config.pools_folder.parent / "replicas") if served else []

    def _current(self) -> Pool | None:
        with suppress(OSError, ValueError, KeyError, TypeError, PoolError):  # absent, or moved on while it is read
            pointer = read_pointer(self.config.pools_folder)
            if pointer is None:
                return None
            if self._pool is None or self._pool.folder != pointer.folder:
                self._pool = _read(self.config.pools_folder / pointer.folder, pointer.version)
            return self._pool
        return None


def _read(folder: Path, version: int) -> Pool:
    card = json.loads((folder / "pool.json").read_text())
    classes = sum(len(task["classes"]) for task in card["tasks"])
    size = sum(path.stat().st_size for path in folder.iterdir())
    return Pool(version, folder.name, len(card["tasks"]), classes, size, card.get("matching") or {})
