"""What happened to every task, for ever: one row for each task, one append-only event for each change (SQLite, WAL).

The ledger is the daemon's memory. Every method is one transaction and is on disk when it returns; killed in the
middle, it has happened or it has not. The command line reads it while the daemon writes, and adds commands to it.

DISCOVERED -> VALIDATED -> TRAINING -> TRAINED -> PUBLISHED -> SERVING,
and to the side QUARANTINED, CONFLICT, HELD, FORGOTTEN.
"""

import json
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, Final, Literal

from mqmk.daemon.errors import LedgerError
from mqmk.daemon.ledger_rows import IN_POOL, Command, Event, Health, State, TaskRow, VersionRow
from mqmk.daemon.ledger_schema import migrate

__all__ = ["IN_POOL", "Command", "Event", "Health", "Ledger", "State", "TaskRow", "VersionRow"]

PATIENCE_SECONDS: Final = 30.0
"""How long another process may have the file to itself."""
_JSON = frozenset({"report", "metrics", "evaluation", "detail"})
_BOOL = frozenset({"approved", "tidied", "recorded", "up"})


class Ledger:
    """The file; one writer (the daemon) and the commands that operators add."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self._clock, self._data_version = clock, 0
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._db = sqlite3.connect(path, timeout=PATIENCE_SECONDS, isolation_level=None, check_same_thread=False)
            _make_private(path)
            self._db.row_factory = sqlite3.Row
            _use_wal(self._db)
            self._db.execute("PRAGMA synchronous = FULL")
            migrate(self._db)
        except (sqlite3.DatabaseError, OSError) as error:
            raise LedgerError(
                f"{path}: {error}; nothing was reset. Restore a backup, or `mqmk-daemon doctor --rebuild`"
            ) from error

    def close(self) -> None:
        """Let go of the file."""
        self._db.close()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield self._db
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    def _rows(self, sql: str, *values: Any) -> list[dict[str, Any]]:
        with closing(self._db.execute(sql, values)) as found:
            return [{key: _read(key, row[key]) for key in row.keys()} for row in found.fetchall()]  # noqa: SIM118

    # Tasks

    def tasks(self, *states: State) -> list[TaskRow]:
        """All tasks, or those in one of the states, in order of arrival."""
        marks = ", ".join("?" * len(states))
        where = f"WHERE state IN ({marks})" if states else ""
        return [_task(row) for row in self._rows(f"SELECT * FROM tasks {where} ORDER BY id", *states)]

    def task(self, number: int) -> TaskRow:
        """The task with this number."""
        return _task(self._rows("SELECT * FROM tasks WHERE id = ?", number)[0])

    def named(self, name: str) -> list[TaskRow]:
        """Every task that was ever called so; more than one after a conflict."""
        return [_task(row) for row in self._rows("SELECT * FROM tasks WHERE name = ? ORDER BY id", name)]

    def with_identity(self, identity: str) -> TaskRow | None:
        """The task with this content."""
        found = self._rows("SELECT * FROM tasks WHERE identity = ?", identity)
        return _task(found[0]) if found else None

    def counts(self) -> dict[State, int]:
        """How many tasks are in each state."""
        found = {row["state"]: row["n"] for row in self._rows("SELECT state, count(*) AS n FROM tasks GROUP BY state")}
        return {state: found.get(state, 0) for state in State}

    def sightings(self) -> dict[str, str]:
        """Folder and fingerprint of everything seen in the bucket that was acted on."""
        return {row["folder"]: row["fingerprint"] for row in self._rows("SELECT folder, fingerprint FROM sightings")}

    def sighted(self, folder: str) -> TaskRow | None:
        """The task that a folder of the bucket stands for."""
        found = self._rows("SELECT t.* FROM tasks t JOIN sightings s ON s.task = t.id WHERE s.folder = ?", folder)
        return _task(found[0]) if found else None

    def add_task(self, name: str, folder: str, fingerprint: str, state: State, **values: Any) -> TaskRow:
        """A task that was not known; together with the sighting of its folder."""
        now = self._clock()
        found = {"name": name, "folder": folder, "fingerprint": fingerprint, "state": state}
        values = found | {"discovered_at": now, "updated_at": now} | values
        with self._transaction() as db:
            number = _insert(db, "tasks", values)
            _see(db, folder, fingerprint, number)
            self._append(db, number, "task.discovered", state, {"folder": folder, "reason": values.get("reason")})
        return self.task(number)

    def see(self, folder: str, fingerprint: str, task: TaskRow, event: str = "task.seen-again") -> None:
        """A folder that stands for a task that is known."""
        with self._transaction() as db:
            _see(db, folder, fingerprint, task.id)
            self._append(db, task.id, event, task.state, {"folder": folder})

    def untidied(self) -> list[TaskRow]:
        """Tasks in the pool whose shards are still as they came."""
        sql = f"SELECT * FROM tasks WHERE NOT tidied AND state IN ({', '.join('?' * len(IN_POOL))}) ORDER BY id"
        return [_task(row) for row in self._rows(sql, *IN_POOL)]

    def overlook(self, task: TaskRow) -> None:
        """Look at the task's folder as if it had never been seen."""
        with self._transaction() as db:
            db.execute("UPDATE sightings SET fingerprint = '' WHERE task = ?", (task.id,))

    def move(self, task: TaskRow, to: State, event: str, detail: Mapping[str, Any] | None = None,
             **changes: Any) -> TaskRow:  # fmt: skip
        """Another state for a task. A move to another state clears what belonged to the old one unless it is given."""
        fresh = {"reason": None, "code": None, "attempts": 0, "not_before": 0.0} if to != task.state else {}
        with self._transaction() as db:
            self._update(db, task, {"state": to} | fresh | changes)
            self._append(db, task.id, event, to, {"reason": changes.get("reason")} | dict(detail or {}))
            if to is not State.TRAINING:
                db.execute("DELETE FROM progress WHERE task = ?", (task.id,))
        return self.task(task.id)

    def _update(self, db: sqlite3.Connection, task: TaskRow, changes: Mapping[str, Any]) -> None:
        changes = {**changes, "updated_at": self._clock()}
        assignments = ", ".join(f"{name} = ?" for name in changes)
        values = [_write(value) for value in changes.values()]
        db.execute(f"UPDATE tasks SET {assignments} WHERE id = ?", (*values, task.id))

    def mark(self, task: TaskRow, **changes: Any) -> TaskRow:
        """Change what is known about a task without moving it."""
        with self._transaction() as db:
            self._update(db, task, changes)
        return self.task(task.id)

    # Versions

    def plan_version(self, version: int, digest: str, parent: int | None, kind: str, task: int | None,
                     evaluation: Mapping[str, Any]) -> VersionRow:  # fmt: skip
        """Announce a version before anything of it is in the store: whatever happens now, it will be finished."""
        with self._transaction() as db:
            row = {
                "version": version,
                "digest": digest,
                "parent": parent,
                "kind": kind,
                "task": task,
                "step": "PLANNED",
            }
            _insert(db, "versions", row | {"step": "PLANNED", "evaluation": evaluation, "created_at": self._clock()})
            self._append(db, task, "version.planned", None, {"version": version, "digest": digest, "kind": kind})
        return self.version(version)

    def finish_version(self, version: VersionRow, to: State, metrics: Mapping[int, Mapping[str, Any]]) -> None:
        """Its files are in the store and CURRENT names it: the version and its task are published, in one step."""
        with self._transaction() as db:
            db.execute("UPDATE versions SET step = 'PUBLISHED' WHERE version = ?", (version.version,))
            if version.task is not None:
                task = self.task(version.task)
                changes: dict[str, Any] = {"state": to, "reason": None, "code": None, "attempts": 0, "approved": False}
                self._update(db, task, changes | ({"version": version.version} if version.kind == "learn" else {}))
                event = "task.published" if version.kind == "learn" else "task.forgotten"
                self._append(db, task.id, event, to, {"version": version.version})
            for number, values in metrics.items():
                db.execute("UPDATE tasks SET metrics = ? WHERE id = ?", (_write(values), number))

    def cancel_version(self, version: VersionRow) -> None:
        """Take an announcement back whose files were lost before they were stored; the number is free again."""
        with self._transaction() as db:
            db.execute("DELETE FROM versions WHERE version = ? AND step = 'PLANNED'", (version.version,))
            self._append(db, version.task, "version.cancelled", None, {"version": version.version})

    def next_version(self) -> int:
        """The number after the highest."""
        return int(self._rows("SELECT coalesce(max(version), 0) + 1 AS n FROM versions")[0]["n"])

    def mark_recorded(self, version: VersionRow) -> None:
        """The registry holds this version."""
        with self._transaction() as db:
            db.execute("UPDATE versions SET recorded = 1 WHERE version = ?", (version.version,))

    def versions(self) -> list[VersionRow]:
        """Every version, in order."""
        return [_version(row) for row in self._rows("SELECT * FROM versions ORDER BY version")]

    def unfinished_versions(self) -> list[VersionRow]:
        """Announced but not published."""
        return [_version(row) for row in self._rows("SELECT * FROM versions WHERE step = 'PLANNED' ORDER BY version")]

    def unrecorded_versions(self) -> list[VersionRow]:
        """Published, but the registry does not know them yet."""
        sql = "SELECT * FROM versions WHERE step = 'PUBLISHED' AND NOT recorded ORDER BY version"
        return [_version(row) for row in self._rows(sql)]

    def lineage(self, version: int | None) -> list[tuple[str, int | None]]:
        """What made a version, first things first: kind and task of each version from the first one to it."""
        sql = """WITH RECURSIVE line(version, parent, kind, task) AS (
            SELECT version, parent, kind, task FROM versions WHERE version = ?
            UNION ALL SELECT v.version, v.parent, v.kind, v.task FROM versions v JOIN line ON v.version = line.parent
        ) SELECT kind, task FROM line ORDER BY version"""
        return [(row["kind"], row["task"]) for row in self._rows(sql, version)]

    def first_tasks(self) -> set[int]:
        """Tasks that were learned when the pool was empty: their data made the g-prompt."""
        sql = "SELECT task FROM versions WHERE kind = 'learn' AND parent IS NULL"
        return {row["task"] for row in self._rows(sql)}

    def version(self, number: int) -> VersionRow:
        """One version."""
        found = self._rows("SELECT * FROM versions WHERE version = ?", number)
        if not found:
            raise LedgerError(f"there is no version {number}; `mqmk-daemon versions` lists them")
        return _version(found[0])

    # Commands of operators

    def ask(self, kind: str, subject: str) -> Command:
        """What an operator wants; the daemon acts on it."""
        with self._transaction() as db:
            number = _insert(db, "commands", {"at": self._clock(), "kind": kind, "subject": subject,
                                              "state": "PENDING"})  # fmt: skip
        return self.command(number)

    def command(self, number: int) -> Command:
        """One command."""
        return Command(**self._rows("SELECT * FROM commands WHERE id = ?", number)[0])

    def pending(self) -> list[Command]:
        """What is to be done, oldest first."""
        return [Command(**row) for row in self._rows("SELECT * FROM commands WHERE state = 'PENDING' ORDER BY id")]

    def answer(self, command: Command, state: Literal["DONE", "REFUSED"], text: str) -> None:
        """Say what came of a command."""
        with self._transaction() as db:
            db.execute("UPDATE commands SET state = ?, answer = ? WHERE id = ?", (state, text, command.id))
            detail = {"subject": command.subject, "answer": text, "state": state}
            self._append(db, None, f"command.{command.kind}", None, detail)

    # Events, progress, health, facts

    def note(self, event: str, task: TaskRow | None = None, detail: Mapping[str, Any] | None = None) -> None:
        """Add an event that moves nothing."""
        with self._transaction() as db:
            self._append(db, task.id if task else None, event, task.state if task else None, detail or {})

    def events(self, task: TaskRow | None = None, last: int = 100) -> list[Event]:
        """The latest events, oldest first."""
        where, values = ("WHERE task = ?", (task.id,)) if task else ("", ())
        found = self._rows(f"SELECT * FROM events {where} ORDER BY number DESC LIMIT ?", *values, last)
        return [Event(**row) for row in reversed(found)]

    def last_event(self) -> int:
        """The number of the latest event."""
        return int(self._rows("SELECT coalesce(max(number), 0) AS n FROM events")[0]["n"])

    def _append(self, db: sqlite3.Connection, task: int | None, event: str, state: str | None,
                detail: Mapping[str, Any]) -> None:  # fmt: skip
        kept = {key: value for key, value in detail.items() if value is not None}
        _insert(db, "events", {"at": self._clock(), "task": task, "event": event, "state": state, "detail": kept})

    def set_progress(self, task: TaskRow, detail: Mapping[str, Any]) -> None:
        """How far a task's training is."""
        with self._transaction() as db:
            db.execute("INSERT OR REPLACE INTO progress VALUES (?, ?, ?)", (task.id, _write(detail), self._clock()))

    def progress(self) -> dict[int, Mapping[str, Any]]:
        """How far each running task is."""
        return {row["task"]: row["detail"] for row in self._rows("SELECT * FROM progress")}

    def set_health(self, part: str, up: bool, says: str = "") -> bool:
        """Whether something works; says whether that is news."""
        known = {row.part: row for row in self.health()}.get(part)
        if known and (known.up, known.says) == (up, says):
            return False
        since = known.since if known and known.up == up else self._clock()
        with self._transaction() as db:
            db.execute("INSERT OR REPLACE INTO health VALUES (?, ?, ?, ?)", (part, up, says, since))
        return known is None or known.up != up

    def health(self) -> list[Health]:
        """Everything the daemon depends on."""
        return [Health(**row) for row in self._rows("SELECT * FROM health ORDER BY part")]

    def changed_by_others(self) -> bool:
        """Whether another process has written since this was last asked; costs next to nothing."""
        now = int(self._db.execute("PRAGMA data_version").fetchone()[0])
        before, self._data_version = self._data_version, now
        return now != before

    def remember(self, name: str, value: str) -> None:
        """Keep a fact."""
        with self._transaction() as db:
            db.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (name, value))

    def recall(self, name: str) -> str | None:
        """A fact that was kept."""
        found = self._rows("SELECT value FROM facts WHERE name = ?", name)
        return found[0]["value"] if found else None


def _use_wal(db: sqlite3.Connection) -> None:
    """Of two who do this to a new file at the same moment, SQLite makes none wait: one is told that it is locked."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            db.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _make_private(path: Path) -> None:
    """SQLite makes the file for everybody, and those beside it like it. It is not opened here to be made otherwise:
    closing it would end the locks that this process has on it."""
    with suppress(PermissionError):  # another user's, which we may use all the same
        path.chmod(0o600)


def _read(key: str, value: Any) -> Any:
    if key in _JSON and value is not None:
        return json.loads(value)
    return bool(value) if key in _BOOL else value


def _write(value: Any) -> Any:
    return json.dumps(value, sort_keys=True) if isinstance(value, Mapping | list | tuple) else value


def _insert(db: sqlite3.Connection, table: str, values: Mapping[str, Any]) -> int:
    names, marks = ", ".join(values), ", ".join("?" * len(values))
    found = db.execute(f"INSERT INTO {table} ({names}) VALUES ({marks})", tuple(map(_write, values.values())))
    assert found.lastrowid is not None
    return found.lastrowid


def _see(db: sqlite3.Connection, folder: str, fingerprint: str, task: int) -> None:
    db.execute("INSERT OR REPLACE INTO sightings VALUES (?, ?, ?)", (folder, fingerprint, task))


def _task(row: Mapping[str, Any]) -> TaskRow:
    known = {field.name for field in fields(TaskRow)}
    values: dict[str, Any] = {key: value for key, value in row.items() if key in known}
    return TaskRow(**{**values, "state": State(values["state"])})


def _version(row: Mapping[str, Any]) -> VersionRow:
    return VersionRow(**row)
