"""How a state directory is copied while its daemon works: the copy is what a kill at one moment would have left.

    done = back_up(config, Path("/backups/monday"))

The copy is a state directory itself: `mqmk-daemon start --state /backups/monday` goes on from there. MLflow's database
is copied first, so that it never knows a version that the ledger does not; then the ledger, by SQLite's online backup,
between two looks at CURRENT that see the same; then files, which are immutable or replaced whole. What belongs to the
local Ray is left out, and so are the bucket and the queries of held-out pictures, which can be computed again.
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

from mqmk.daemon.config import Config
from mqmk.daemon.errors import DaemonError, LedgerError
from mqmk.daemon.ledger_rows import State
from mqmk.daemon.records import SERVED
from mqmk.daemon.state_files import StateFiles
from mqmk.matcher.durable import replace_file, sync_folder
from mqmk.matcher.pool_files import CARD, TENSORS
from mqmk.matcher.pool_store import Pointer

SCHEMA: Final = 1
NOTE, SUMS = "BACKUP.json", "SHA256SUMS"


class _Moved(Exception):  # noqa: N818 - what happened
    """The daemon changed something between two looks; the next try may be luckier."""


@dataclass(frozen=True)
class BackedUp:
    """What a copy holds; the same is in its BACKUP.json."""

    made_at: str
    release: str
    ledger_schema: int
    current: int | None
    versions: tuple[int, ...]
    missing: tuple[int, ...]
    """Versions that the ledger knows and whose files were removed from the store before."""
    tasks: int
    bytes: int
    schema: int = SCHEMA


def back_up(config: Config, destination: Path, patience: float = 60.0) -> BackedUp:
    """Copy the state directory to a new folder, which appears whole or not at all; the daemon may run or not."""
    if destination.exists():
        raise DaemonError(f"{destination} is there already; name a folder that does not exist")
    if not config.ledger_file.exists():
        raise LedgerError(f"{config.ledger_file} is not there: nothing to back up; --state names the state directory")
    part = destination.with_name(f".{destination.name}.part")
    deadline = time.monotonic() + patience
    while True:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(mode=0o700, parents=True)
        try:
            done = _Copy(config, StateFiles(config.state.dir), StateFiles(part)).make()
            break
        except (_Moved, FileNotFoundError, shutil.Error) as error:
            if time.monotonic() > deadline:
                raise DaemonError(f"no moment of rest within {patience:g} s ({error}); try again later") from error
            time.sleep(0.1)
    part.rename(destination)
    sync_folder(destination.parent)
    return done


@dataclass(frozen=True)
class _Row:
    """A version in the copied ledger."""

    version: int
    digest: str
    step: str

    @property
    def folder(self) -> str:
        return Pointer(self.version, self.digest).folder


@dataclass(frozen=True)
class _Copy:
    """One try."""

    config: Config
    here: StateFiles
    there: StateFiles

    def make(self) -> BackedUp:
        """Everything in its order."""
        self._mlflow()
        current = self._ledger()
        with closing(sqlite3.connect(self.there.folder / "ledger.sqlite")) as db:
            rows = [_Row(*row) for row in db.execute("SELECT version, digest, step FROM versions ORDER BY version")]
            tasks = list(db.execute("SELECT identity, state FROM tasks"))
            ledger_schema = int(db.execute("PRAGMA user_version").fetchone()[0])
        found = {row.version: self._pool(row) for row in rows}
        if current is not None:
            if not found.get(current.version):
                raise _Moved(f"version {current.version} is current, and the ledger or the store does not have it")
            self.there.store.point_at(current)
        for identity, state in tasks:
            if identity and state != State.FORGOTTEN:
                self._task(identity, state)
        done = BackedUp(
            made_at=datetime.now(UTC).isoformat(timespec="seconds"),
            release=version("mqmk-daemon"),
            ledger_schema=ledger_schema,
            current=current.version if current else None,
            versions=tuple(number for number, is_there in found.items() if is_there),
            missing=tuple(number for number, is_there in found.items() if not is_there),
            tasks=len(tasks),
            bytes=_seal(self.there.folder),
        )
        replace_file(self.there.folder / NOTE, (json.dumps(asdict(done), indent=2) + "\n").encode())
        return done

    def _mlflow(self) -> None:
        """Only what is in the state directory: a tracking server has backups of its own."""
        database = self.config.state.dir / "mlflow" / "mlflow.db"
        if self.config.mlflow.tracking_uri is None and database.exists():
            _snapshot(database, self.there.folder / "mlflow" / "mlflow.db")
            _copy_tree(self.config.artifacts_folder, self.there.folder / "mlflow" / "artifacts")

    def _ledger(self) -> Pointer | None:
        """The ledger, and the pointer of the same moment."""
        before = self.here.store.current()
        copy = self.there.folder / "ledger.sqlite"
        _snapshot(self.config.ledger_file, copy)
        if self.here.store.current() != before:
            raise _Moved("CURRENT was moved")
        with closing(sqlite3.connect(copy)) as db, db:  # MLflow's copy is a little older: what it has is looked up anew
            db.execute("UPDATE versions SET recorded = 0")
            db.execute("UPDATE tasks SET recorded = 0")
            db.execute("DELETE FROM facts WHERE name = ?", (SERVED,))
        return before

    def _pool(self, row: _Row) -> bool:
        """A version with what was measured for it; False if its files are nowhere."""
        stored = self.here.store.folder / row.folder
        if row.step == "PLANNED" and not stored.exists():
            _copy_tree(self.here.candidates / row.folder, self.there.candidates / row.folder)
            return True
        if not stored.exists():
            return False
        copy = self.there.store.folder / row.folder
        _copy_tree(stored, copy)
        if hashlib.sha256((copy / TENSORS).read_bytes()).hexdigest() != _card(copy)["tensors_sha256"]:
            raise DaemonError(f"{stored} is damaged: mend it first (`mqmk-daemon doctor --rebuild`, or a backup)")
        _copy_tree(self.here.evaluation(row.digest), self.there.evaluation(row.digest))
        return True

    def _task(self, identity: str, state: str) -> None:
        """What training left, and the pictures that versions are measured on."""
        _copy_tree(self.here.work(identity), self.there.work(identity))
        _copy_tree(self.here.held_out(identity), self.there.held_out(identity))
        if state == State.TRAINED and self.there.trained(identity) is None:
            raise _Moved(f"the trained prompt of {identity} is not there")


def _card(folder: Path) -> dict[str, object]:
    return dict(json.loads((folder / CARD).read_text()))


def _snapshot(source: Path, target: Path) -> None:
    """One moment of a database that is written to; a single file, with no log beside it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    address = f"{source.absolute().as_uri()}?mode=rw"
    with closing(sqlite3.connect(address, uri=True, timeout=30)) as live, closing(sqlite3.connect(target)) as copy:
        live.backup(copy)
        copy.execute("PRAGMA journal_mode = DELETE")
        found = copy.execute("PRAGMA quick_check").fetchone()[0]
    if found != "ok":
        raise LedgerError(f"{source} is damaged: {found}; restore a backup, or `mqmk-daemon doctor --rebuild`")


def _copy_tree(source: Path, target: Path) -> None:
    """A file or a folder, if it is there; what is hidden is half written."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns(".*"), copy_function=shutil.copyfile)
    elif source.exists():
        shutil.copyfile(source, target)


def _seal(folder: Path) -> int:
    """Bring everything to disk, with the hash of every file as `sha256sum -c` reads it; says how much it is."""
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
