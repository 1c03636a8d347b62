"""What the ledger says at the moment of a scrape: one look, by a read-only connection of its own."""

import json
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mqmk.daemon.ledger import State
from mqmk.daemon.metrics_events import EventTotals


@dataclass(frozen=True)
class Evaluated:
    """What held-out pictures said about one version."""

    version: int
    created_at: float
    document: Mapping[str, Any]
    when_learned: Mapping[str, float]
    """The accuracy of each task in the version that brought it."""


@dataclass(frozen=True)
class LedgerLook:
    """Everything that is read for one scrape."""

    states: Mapping[State, int]
    waiting: Mapping[tuple[str, str], int]
    names: Mapping[int, str]
    """Number and name of every task that was not forgotten, in order of arrival."""
    places: Mapping[int, str]
    """The state of each of them."""
    progress: Mapping[int, Mapping[str, Any]]
    pending_commands: int
    versions: Mapping[str, int]
    unrecorded: int
    health: Mapping[str, bool]
    evaluated: Evaluated | None


@dataclass
class LedgerReader:
    """Reads the ledger; keeps what events add up to and what never changes. For one thread at a time."""

    path: Path
    totals: EventTotals = field(default_factory=EventTotals)
    _when_learned: dict[str, float] = field(default_factory=dict)
    _counted: int = 0
    _evaluated: Evaluated | None = None

    def look(self, current: int | None) -> LedgerLook:
        """The ledger now, with the evaluation of the version that CURRENT names."""
        with closing(sqlite3.connect(f"{self.path.absolute().as_uri()}?mode=ro", uri=True, timeout=5)) as db:
            db.execute("BEGIN")  # all of it as of one moment
            self.totals.follow(db)
            return LedgerLook(
                states=_states(db),
                waiting=_waiting(db),
                names=dict(db.execute("SELECT id, name FROM tasks WHERE state != 'FORGOTTEN' ORDER BY id").fetchall()),
                places=dict(db.execute("SELECT id, state FROM tasks WHERE state != 'FORGOTTEN'").fetchall()),
                progress={task: json.loads(text) for task, text in db.execute("SELECT task, detail FROM progress")},
                pending_commands=_number(db, "SELECT count(*) FROM commands WHERE state = 'PENDING'"),
                versions=dict(db.execute("SELECT kind, count(*) FROM versions WHERE step = 'PUBLISHED' GROUP BY kind")),
                unrecorded=_number(db, "SELECT count(*) FROM versions WHERE step = 'PUBLISHED' AND NOT recorded"),
                health={part: bool(up) for part, up in db.execute("SELECT part, up FROM health")},
                evaluated=self._evaluation(db, current),
            )

    def evaluated(self, version: int | None) -> Evaluated | None:
        """What held-out pictures said about one version, and nothing else."""
        with closing(sqlite3.connect(f"{self.path.absolute().as_uri()}?mode=ro", uri=True, timeout=5)) as db:
            return self._evaluation(db, version)

    def _evaluation(self, db: sqlite3.Connection, version: int | None) -> Evaluated | None:
        if self._evaluated and self._evaluated.version == version:
            return self._evaluated
        found = db.execute("SELECT created_at, evaluation FROM versions WHERE version = ?", (version,)).fetchone()
        if version is None or found is None:
            return None
        self._learn_accuracies(db)
        self._evaluated = Evaluated(version, found[0], json.loads(found[1]), dict(self._when_learned))
        return self._evaluated

    def _learn_accuracies(self, db: sqlite3.Connection) -> None:
        """Of versions that are new; SQLite picks the one number, a thousand whole documents would be slow."""
        sql = """SELECT v.version, t.name, json_extract(v.evaluation, '$.tasks."' || t.name || '".accuracy')
            FROM versions v JOIN tasks t ON t.id = v.task
            WHERE v.kind = 'learn' AND v.version > ? AND instr(t.name, '"') = 0 ORDER BY v.version"""
        for version, name, accuracy in db.execute(sql, (self._counted,)):
            self._counted = version
            if accuracy is not None:
                self._when_learned[name] = accuracy


def _states(db: sqlite3.Connection) -> dict[State, int]:
    found = dict(db.execute("SELECT state, count(*) FROM tasks GROUP BY state").fetchall())
    return {state: found.get(state, 0) for state in State}


def _waiting(db: sqlite3.Connection) -> dict[tuple[str, str], int]:
    sql = """SELECT state, coalesce(code, 'unknown'), count(*) FROM tasks
        WHERE state IN ('QUARANTINED', 'CONFLICT', 'HELD') GROUP BY 1, 2"""
    return {(state, code): count for state, code, count in db.execute(sql)}


def _number(db: sqlite3.Connection, sql: str) -> int:
    return int(db.execute(sql).fetchone()[0])
