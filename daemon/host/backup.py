"""Online backup of a state directory: the copy is what a crash at one moment would have left.

    result = back_up(config, Path("/backups/monday"))

The copy is itself a state directory: `mqmk-daemon start --state /backups/monday` continues from it. MLflow's database
is copied first, so that it never has a version that the ledger lacks; then the ledger, with SQLite's online backup,
between two equal reads of CURRENT; then files, which are immutable or replaced whole. Left out are the state of the
local Ray, the bucket, and the queries of held-out images, which can be recomputed.
"""

import hashlib
import json
import os
import shutil
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Final

from mqmk.daemon.config.sections import Config
from mqmk.daemon.errors import DaemonError, LedgerError
from mqmk.daemon.ledger.rows import State
from mqmk.daemon.registry.recorder import SERVED
from mqmk.daemon.state_dir import StateDir
from mqmk.matcher.durable import replace_file, sync_folder
from mqmk.matcher.errors import PoolError
from mqmk.matcher.pointer import version_name
from mqmk.matcher.pool_cards import PoolCard
from mqmk.matcher.pool_files import read_pool
from mqmk.matcher.pool_store import Pointer

REPAIR: Final = "repair it first (`mqmk-daemon doctor --rebuild`, or restore a backup)"
SCHEMA: Final = 1
NOTE, SUMS = "BACKUP.json", "SHA256SUMS"


class _ChangedError(Exception):
    """The daemon changed something during the copy; the next attempt may succeed."""


@dataclass(frozen=True)
class BackupSummary:
    """The contents of a backup, as in its BACKUP.json."""

    made_at: str
    release: str
    ledger_schema: int
    current: int | None
    versions: tuple[int, ...]
    missing: tuple[int, ...]
    """Versions in the ledger whose files had been removed from the store."""
    tasks: int
    bytes: int
    schema: int = SCHEMA


def back_up(config: Config, destination: Path, timeout: float = 60.0) -> BackupSummary:
    """Copy the state directory to a new folder, which appears complete or not at all; the daemon may run or not."""
    if destination.exists():
        raise DaemonError(f"{destination} already exists; name a folder that does not exist")
    if not config.ledger_file.exists():
        raise LedgerError(
            f"{config.ledger_file} does not exist: nothing to back up; --state chooses the state directory"
        )
    part = destination.with_name(f".{destination.name}.part")
    deadline = time.monotonic() + timeout
    while True:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(mode=0o700, parents=True)
        try:
            done = _Copy(config, StateDir(config.state.dir), StateDir(part)).make()
            break
        except (_ChangedError, FileNotFoundError, shutil.Error) as error:
            if time.monotonic() > deadline:
                raise DaemonError(
                    f"the state directory kept changing for {timeout:g} s ({error}); try again later"
                ) from error
            time.sleep(0.1)
    part.rename(destination)
    sync_folder(destination.parent)
    return done


@dataclass(frozen=True)
class _Row:
    """A version of the copied ledger."""

    version: int
    digest: str
    step: str

    @property
    def pointer(self) -> Pointer:
        return Pointer(self.version, self.digest)


@dataclass(frozen=True)
class _Copy:
    """One attempt."""

    config: Config
    here: StateDir
    there: StateDir

    def make(self) -> BackupSummary:
        """Copy everything, in order."""
        self._copy_mlflow()
        current = self._copy_ledger()
        with closing(sqlite3.connect(self.there.folder / "ledger.sqlite")) as db:
            rows = [_Row(*row) for row in db.execute("SELECT version, digest, step FROM versions ORDER BY version")]
            tasks = list(db.execute("SELECT identity, state FROM tasks"))
            ledger_schema = int(db.execute("PRAGMA user_version").fetchone()[0])
        found = {row.version: self._copy_pool(row) for row in rows}
        if current is not None:
            if not found.get(current.version):
                raise _ChangedError(f"version {current.version} is current, but the ledger or the store lacks it")
            self.there.store.point_at(current)
        for identity, state in tasks:
            if identity and state != State.FORGOTTEN:
                self._copy_task(identity, state)
        done = BackupSummary(
            made_at=datetime.now(UTC).isoformat(timespec="seconds"),
            release=version("mqmk-daemon"),
            ledger_schema=ledger_schema,
            current=current.version if current else None,
            versions=tuple(number for number, is_there in found.items() if is_there),
            missing=tuple(number for number, is_there in found.items() if not is_there),
            tasks=len(tasks),
            bytes=_write_checksums(self.there.folder),
        )
        replace_file(self.there.folder / NOTE, (json.dumps(asdict(done), indent=2) + "\n").encode())
        return done

    def _copy_mlflow(self) -> None:
        """Only MLflow's files in the state directory: a tracking server has its own backups."""
        database = self.config.state.dir / "mlflow" / "mlflow.db"
        if self.config.mlflow.tracking_uri is None and database.exists():
            _snapshot(database, self.there.folder / "mlflow" / "mlflow.db")
            _copy_tree(self.config.artifacts_folder, self.there.folder / "mlflow" / "artifacts")

    def _copy_ledger(self) -> Pointer | None:
        """Copy the ledger; the pointer at the same moment."""
        before = self.here.store.current()
        copy = self.there.folder / "ledger.sqlite"
        _snapshot(self.config.ledger_file, copy)
        if self.here.store.current() != before:
            raise _ChangedError("CURRENT changed")
        with closing(sqlite3.connect(copy)) as db, db:  # MLflow's copy is a little older: check it again
            db.execute("UPDATE versions SET recorded = 0")
            (table,) = db.execute("SELECT name FROM sqlite_master WHERE name IN ('key_values', 'facts')").fetchone()
            db.execute(f"DELETE FROM {table} WHERE name = ?", (SERVED,))  # `facts` until release 0.1
        return before

    def _copy_pool(self, row: _Row) -> bool:
        """A version with what was measured for it; False if its files are nowhere. Layers are copied once."""
        here, name = self.here.store, row.pointer.card
        if row.step == "PLANNED" and not (here.versions / name).exists():
            if (self.here.candidates / name).exists():
                self._copy_layers(here.parse((self.here.candidates / name).read_bytes()))
                _copy_tree(self.here.candidates / name, self.there.candidates / name)
            return True
        if not (here.versions / name).exists():
            return self._copy_whole_pool(here.folder / version_name(row.version, row.digest))
        try:
            self._copy_layers(here.card(row.pointer))
            self.there.store.add_card(row.pointer, here.card_bytes(row.pointer))
        except PoolError as error:
            if not (here.versions / name).exists():  # removed in this moment
                raise _ChangedError(f"version {row.version} was removed") from error
            raise DaemonError(f"{error}; {REPAIR}") from error
        _copy_tree(self.here.evaluation(row.digest), self.there.evaluation(row.digest))
        return True

    def _copy_whole_pool(self, folder: Path) -> bool:
        """A version in the store of release 0.1, which no daemon has upgraded yet; False if it is not there."""
        if not folder.is_dir():
            return False
        try:
            read_pool(folder)
        except PoolError as error:
            raise DaemonError(f"{error}; {REPAIR}") from error
        _copy_tree(folder, self.there.store.folder / folder.name)
        return True

    def _copy_layers(self, card: PoolCard) -> None:
        for name in sorted(card.files):
            if not self.there.store.has_layer(name):
                self.there.store.add_layer(name, self.here.store.read_layer(name))

    def _copy_task(self, identity: str, state: str) -> None:
        """What training left, and the images that versions are measured on."""
        _copy_tree(self.here.work(identity), self.there.work(identity))
        _copy_tree(self.here.held_out(identity), self.there.held_out(identity))
        if state == State.TRAINED and self.there.trained_folder(identity) is None:
            raise _ChangedError(f"the trained prompt of {identity} is missing")


def _snapshot(source: Path, target: Path) -> None:
    """Copy a live database as of one moment, into a single file without a log."""
    target.parent.mkdir(parents=True, exist_ok=True)
    address = f"{source.absolute().as_uri()}?mode=rw"
    with closing(sqlite3.connect(address, uri=True, timeout=30)) as live, closing(sqlite3.connect(target)) as copy:
        live.backup(copy)
        copy.execute("PRAGMA journal_mode = DELETE")
        found = copy.execute("PRAGMA quick_check").fetchone()[0]
    if found != "ok":
        raise LedgerError(f"{source} is damaged: {found}; restore a backup, or `mqmk-daemon doctor --rebuild`")


def _copy_tree(source: Path, target: Path) -> None:
    """Copy a file or a folder if it exists; hidden files are half written."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns(".*"), copy_function=shutil.copyfile)
    elif source.exists():
        shutil.copyfile(source, target)


def _write_checksums(folder: Path) -> int:
    """Sync everything to disk, with the hash of every file for `sha256sum -c`; returns the size in bytes."""
    lines, size = [], 0
    for path in sorted(_files(folder)):
        with path.open("r+b") as file:
            lines.append(f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {path.relative_to(folder)}\n")
            os.fsync(file.fileno())
        size += path.stat().st_size
    for each in (path for path in folder.rglob("*") if path.is_dir()):
        sync_folder(each)
    replace_file(folder / SUMS, "".join(lines).encode())
    return size


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())
