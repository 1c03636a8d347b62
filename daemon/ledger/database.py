"""The SQLite file behind the ledger: opening, transactions, rows as values, append-only events, key-value pairs."""

import json
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from mqmk.daemon.errors import LedgerError
from mqmk.daemon.ledger.event_names import current_name
from mqmk.daemon.ledger.rows import Event, TaskRow
from mqmk.daemon.ledger.schema import migrate

BUSY_TIMEOUT_SECONDS: Final = 30.0
"""How long another process may lock the file."""
_JSON: Final = frozenset({"report", "samples", "metrics", "evaluation", "detail", "base"})
_BOOL: Final = frozenset({"approved", "cleaned_up", "recorded", "up", "exact"})


class Database:
    """The file, migrated to the current schema."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self._clock, self._data_version = clock, 0
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._db = sqlite3.connect(
                path, timeout=BUSY_TIMEOUT_SECONDS, isolation_level=None, check_same_thread=False
            )
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
        """Close the file."""
        self._db.close()

    def changed_by_others(self) -> bool:
        """Whether another process has written since the last call; costs next to nothing."""
        now = int(self._db.execute("PRAGMA data_version").fetchone()[0])
        before, self._data_version = self._data_version, now
        return now != before

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield self._db
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:  # on a full disk, SQLite has rolled back already
                self._db.execute("ROLLBACK")
            raise

    def _rows(self, sql: str, *values: Any) -> list[dict[str, Any]]:
        with closing(self._db.execute(sql, values)) as cursor:
            return [{name: _read(name, row[name]) for name in row.keys()} for row in cursor.fetchall()]  # noqa: SIM118

    # Events

    def append_event(self, event: str, task: TaskRow | None = None, detail: Mapping[str, Any] | None = None) -> None:
        """Append an event that changes no state."""
        with self._transaction() as db:
            self._append(db, task.id if task else None, event, task.state if task else None, detail or {})

    def events(self, task: TaskRow | None = None, last: int = 100) -> list[Event]:
        """The latest events, oldest first, under their current names."""
        where, values = ("WHERE task = ?", (task.id,)) if task else ("", ())
        found = self._rows(f"SELECT * FROM events {where} ORDER BY number DESC LIMIT ?", *values, last)
        return [Event(**{**row, "event": current_name(row["event"])}) for row in reversed(found)]

    def last_event(self) -> int:
        """The number of the latest event."""
        return int(self._rows("SELECT coalesce(max(number), 0) AS n FROM events")[0]["n"])

    def _append(self, db: sqlite3.Connection, task: int | None, event: str, state: str | None,
                detail: Mapping[str, Any]) -> None:  # fmt: skip
        given = {name: value for name, value in detail.items() if value is not None}
        insert(db, "events", {"at": self._clock(), "task": task, "event": event, "state": state, "detail": given})

    # Key-value pairs

    def set_value(self, name: str, value: str) -> None:
        """Store a value under a name."""
        with self._transaction() as db:
            db.execute("INSERT OR REPLACE INTO key_values VALUES (?, ?)", (name, value))

    def get_value(self, name: str) -> str | None:
        """The value stored under a name."""
        found = self._rows("SELECT value FROM key_values WHERE name = ?", name)
        return found[0]["value"] if found else None


def insert(db: sqlite3.Connection, table: str, values: Mapping[str, Any]) -> int:
    """Add a row; returns its number."""
    names, marks = ", ".join(values), ", ".join("?" * len(values))
    cursor = db.execute(f"INSERT INTO {table} ({names}) VALUES ({marks})", tuple(map(to_sql, values.values())))
    assert cursor.lastrowid is not None
    return cursor.lastrowid


def to_sql(value: Any) -> Any:
    """A value as a column holds it: containers as JSON."""
    return json.dumps(value, sort_keys=True) if isinstance(value, Mapping | list | tuple) else value


def _read(name: str, value: Any) -> Any:
    if name in _JSON and value is not None:
        return json.loads(value)
    return bool(value) if name in _BOOL and value is not None else value


def _use_wal(db: sqlite3.Connection) -> None:
    """Retries by hand: SQLite ignores its busy timeout when two processes switch a new file to WAL at once."""
    deadline = time.monotonic() + BUSY_TIMEOUT_SECONDS
    while True:
        try:
            db.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _make_private(path: Path) -> None:
    """SQLite creates the file world-readable, and its companions with the same mode. Not opened here: closing the
    descriptor would release the locks this process has on the file."""
    with suppress(PermissionError):  # owned by another user, but still usable
        path.chmod(0o600)
