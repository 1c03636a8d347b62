"""Rows of tasks: one for each task, changed by compare-and-set, and the folders of the bucket they came from."""

import sqlite3
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, Final

from mqmk.daemon.errors import LedgerError, OutdatedError
from mqmk.daemon.ledger.database import Database, insert, to_sql
from mqmk.daemon.ledger.rows import IN_POOL, LIVE, State, TaskRow, is_allowed
from mqmk.learner.data.manifest import Manifest, parse_manifest

_COLUMNS: Final = ", ".join(field.name for field in fields(TaskRow))
_SELECT: Final = f"SELECT {_COLUMNS} FROM tasks"
_PAGE: Final = 32  # tasks read at once, of many that wait


class TaskLedger(Database):
    """The tables `tasks` and `folders`."""

    def tasks(self, *states: State) -> list[TaskRow]:
        """All tasks, or those in one of the states, in order of arrival."""
        where = f"WHERE state IN ({_placeholders(states)})" if states else ""
        return self._tasks(f"{where} ORDER BY id", *states)

    def has_tasks(self, *states: State) -> bool:
        """Whether a task is in one of the states."""
        return bool(self._rows(f"SELECT 1 FROM tasks WHERE state IN ({_placeholders(states)}) LIMIT 1", *states))

    def due_tasks(self, state: State, now: float) -> Iterator[TaskRow]:
        """Tasks in a state that may be worked on now, in order of arrival; read as they are asked for."""
        last = 0
        where = "WHERE state = ? AND id > ? AND not_before <= ? ORDER BY id LIMIT ?"
        while page := self._tasks(where, state, last, now, _PAGE):
            yield from page
            last = page[-1].id

    def task(self, number: int) -> TaskRow:
        """The task with this number."""
        return self._tasks("WHERE id = ?", number)[0]

    def _tasks(self, where: str, *values: Any) -> list[TaskRow]:
        return [_task(row) for row in self._rows(f"{_SELECT} {where}", *values)]

    def manifest_bytes(self, task: TaskRow) -> bytes | None:
        """The stored manifest as it was read; None until it is known."""
        found: bytes | None = self._rows("SELECT manifest FROM tasks WHERE id = ?", task.id)[0]["manifest"]
        return found

    def manifest(self, task: TaskRow) -> Manifest | None:
        """The stored manifest; None until it is known."""
        stored = self.manifest_bytes(task)
        return parse_manifest(stored) if stored is not None else None

    def report(self, task: TaskRow) -> Mapping[str, Any] | None:
        """What validation found; None until it is done."""
        found: Mapping[str, Any] | None = self._rows("SELECT report FROM tasks WHERE id = ?", task.id)[0]["report"]
        return found

    def samples(self) -> dict[int, Mapping[str, int]]:
        """Task number -> samples of each class, of every task that was validated."""
        sql = "SELECT id, json_extract(report, '$.samples') AS samples FROM tasks WHERE report IS NOT NULL"
        return {row["id"]: row["samples"] for row in self._rows(sql)}

    def owners(self, classes: Collection[str], but: TaskRow) -> dict[str, str]:
        """Class -> task, for those of the classes that another task has."""
        sql = f"""SELECT class, name FROM classes JOIN tasks ON id = task
            WHERE class IN (SELECT value FROM json_each(?)) AND state IN ({_placeholders(LIVE)}) AND id != ?
            ORDER BY id"""
        return {row["class"]: row["name"] for row in self._rows(sql, to_sql([*classes]), *LIVE, but.id)}

    def tasks_named(self, name: str) -> list[TaskRow]:
        """Every task that ever had this name; more than one after a conflict."""
        return self._tasks("WHERE name = ? ORDER BY id", name)

    def task_with_identity(self, identity: str) -> TaskRow | None:
        """The task with this content."""
        return next(iter(self._tasks("WHERE identity = ?", identity)), None)

    def names(self, tasks: Collection[int] | None = None) -> dict[int, str]:
        """Number -> name of these tasks, or of all."""
        where = "WHERE id IN (SELECT value FROM json_each(?))" if tasks is not None else ""
        given = [to_sql([*tasks])] if tasks is not None else []
        return {row["id"]: row["name"] for row in self._rows(f"SELECT id, name FROM tasks {where}", *given)}

    def counts(self) -> dict[State, int]:
        """The number of tasks in each state."""
        found = {row["state"]: row["n"] for row in self._rows("SELECT state, count(*) AS n FROM tasks GROUP BY state")}
        return {state: found.get(state, 0) for state in State}

    def tasks_to_erase(self, place: str) -> list[TaskRow]:
        """Forgotten tasks whose layers a place other than the state directory may still have."""
        where = """WHERE state = 'FORGOTTEN' AND identity IS NOT NULL
            AND NOT EXISTS (SELECT 1 FROM json_each(erased) WHERE value = ?) ORDER BY id"""
        return self._tasks(where, place)

    def mark_erased(self, task: TaskRow, place: str, deleted: Sequence[str]) -> None:
        """Record what was deleted there: the deletion record of the task."""
        with self._transaction() as db:
            sql = "UPDATE tasks SET erased = json_insert(erased, '$[#]', ?) WHERE id = ? AND state = 'FORGOTTEN'"
            db.execute(sql, (place, task.id))
            self._append(db, task.id, "task.erased", task.state, {"place": place, "deleted": list(deleted)})

    def tasks_to_clean_up(self) -> list[TaskRow]:
        """Tasks in the pool whose shards `bucket.after_learning` has not been applied to."""
        return self._tasks(f"WHERE NOT cleaned_up AND state IN ({_placeholders(IN_POOL)}) ORDER BY id", *IN_POOL)

    def has_task_to_retry(self, code: str) -> bool:
        """Whether the current step of a task failed for this reason and will be retried."""
        return bool(self._rows("SELECT 1 FROM tasks WHERE failures > 0 AND code = ? LIMIT 1", code))

    def add_task(self, name: str, folder: str, fingerprint: str, state: State, **values: Any) -> TaskRow:
        """Add a new task, and its folder to the scanned ones."""
        now = self._clock()
        found = {"name": name, "folder": folder, "fingerprint": fingerprint, "state": state}
        values = found | {"discovered_at": now, "updated_at": now} | values
        with self._transaction() as db:
            number = insert(db, "tasks", values)
            _record_folder(db, folder, fingerprint, number)
            self._append(db, number, "task.discovered", state, {"folder": folder, "reason": values.get("reason")})
        return self.task(number)

    def transition(self, task: int, expected: State, to: State, attempt: int, event: str,
                   detail: Mapping[str, Any] | None = None, **changes: Any) -> TaskRow:  # fmt: skip
        """Move a task that is still in `expected` and in this attempt; OutdatedError if it has moved on.

        A move to another state clears what belonged to the old one unless it is given.
        """
        with self._transaction() as db:
            self._change(db, task, expected, to, attempt, event, detail or {}, changes)
        return self.task(task)

    def update_task(self, task: TaskRow, **changes: Any) -> TaskRow:
        """Change columns of a task without moving it."""
        with self._transaction() as db:
            self._update(db, task.id, changes)
        return self.task(task.id)

    def _change(self, db: sqlite3.Connection, task: int, expected: State, to: State, attempt: int, event: str,
                detail: Mapping[str, Any], changes: Mapping[str, Any]) -> None:  # fmt: skip
        if not is_allowed(expected, to):
            raise LedgerError(f"task {task} cannot go from {expected} to {to}")
        cleared = {"reason": None, "code": None, "failures": 0, "not_before": 0.0} if to != expected else {}
        step = 0 if expected in IN_POOL and to in IN_POOL else 1  # a swap in the replicas outdates no job
        values = {"state": to, "attempt": attempt + step} | cleared | dict(changes)
        if self._update(db, task, values, "AND state = ? AND attempt = ?", expected, attempt) != 1:
            raise OutdatedError(f"task {task} is no longer {expected} in attempt {attempt}")
        self._append(db, task, event, to, {"reason": changes.get("reason")} | dict(detail))
        if to is not State.TRAINING:
            db.execute("DELETE FROM progress WHERE task = ?", (task,))
        if to is State.FORGOTTEN:
            withdraw_versions(db, task)

    def _update(self, db: sqlite3.Connection, task: int, changes: Mapping[str, Any], where: str = "",
                *conditions: Any) -> int:  # fmt: skip
        changes = {**changes, "updated_at": self._clock()}
        assignments = ", ".join(f"{name} = ?" for name in changes)
        values = [to_sql(value) for value in changes.values()]
        return db.execute(f"UPDATE tasks SET {assignments} WHERE id = ? {where}", (*values, task, *conditions)).rowcount

    # Folders of the bucket

    def scanned_folders(self) -> dict[str, str]:
        """Folder -> fingerprint of every folder that has been acted on; the fingerprint is "" for one to rescan."""
        return {row["folder"]: row["fingerprint"] for row in self._rows("SELECT folder, fingerprint FROM folders")}

    def folders_to_rescan(self) -> frozenset[str]:
        """Folders that the next scan treats as new."""
        return frozenset(row["folder"] for row in self._rows("SELECT folder FROM folders WHERE fingerprint = ''"))

    def task_of_folder(self, folder: str) -> TaskRow | None:
        """The task that a folder of the bucket stands for."""
        return next(iter(self._tasks("WHERE id = (SELECT task FROM folders WHERE folder = ?)", folder)), None)

    def record_scan(self, folder: str, fingerprint: str, task: TaskRow, event: str = "task.duplicate_found") -> None:
        """Record that a folder stands for an existing task."""
        with self._transaction() as db:
            _record_folder(db, folder, fingerprint, task.id)
            self._append(db, task.id, event, task.state, {"folder": folder})

    def forget_fingerprint(self, task: TaskRow) -> None:
        """Make the next scan treat the task's folder as new."""
        with self._transaction() as db:
            db.execute("UPDATE folders SET fingerprint = '' WHERE task = ?", (task.id,))


def withdraw_versions(db: sqlite3.Connection, task: int) -> None:
    """Mark every version that contains the task: none of them is ever served again, even if the task is relearned."""
    sql = """WITH RECURSIVE containing(version) AS (
            SELECT version FROM version_tasks JOIN versions USING (version) WHERE kind = 'learn' AND task = ?1
            UNION SELECT v.version FROM containing c JOIN versions v ON v.parent = c.version
                WHERE NOT EXISTS (SELECT 1 FROM version_tasks t WHERE t.version = v.version AND task = ?1))
        UPDATE versions SET withdrawn = ?1 WHERE withdrawn IS NULL AND version IN (SELECT version FROM containing)"""
    db.execute(sql, (task,))


def _record_folder(db: sqlite3.Connection, folder: str, fingerprint: str, task: int) -> None:
    db.execute("INSERT OR REPLACE INTO folders VALUES (?, ?, ?)", (folder, fingerprint, task))


def _task(row: Mapping[str, Any]) -> TaskRow:
    return TaskRow(**{**row, "state": State(row["state"])})


def _placeholders(values: Collection[Any]) -> str:
    return ", ".join("?" * len(values))
