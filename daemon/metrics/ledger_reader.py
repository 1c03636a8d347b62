"""Reads what a scrape needs from the ledger, in one transaction of its own read-only connection."""

import json
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mqmk.daemon.ledger.ledger import State
from mqmk.daemon.metrics.event_totals import EventTotals


@dataclass(frozen=True)
class VersionEvaluation:
    """The evaluation of one version on held-out images."""

    version: int
    created_at: float
    document: Mapping[str, Any]
    when_learned: Mapping[str, float]
    """The accuracy of each task in the version that added it."""


@dataclass(frozen=True)
class LedgerSnapshot:
    """The ledger at one moment."""

    states: Mapping[State, int]
    waiting: Mapping[tuple[str, str], int]
    names: Mapping[int, str]
    """Id and name of every task that was not forgotten, in order of arrival."""
    task_states: Mapping[int, str]
    """The state of each of them."""
    progress: Mapping[int, Mapping[str, Any]]
    pending_commands: int
    versions: Mapping[str, int]
    unrecorded: int
    health: Mapping[str, bool]
    evaluated: VersionEvaluation | None


@dataclass
class LedgerReader:
    """Reads the ledger; keeps event totals and what never changes. For one thread at a time."""

    path: Path
    totals: EventTotals = field(default_factory=EventTotals)
    _when_learned: dict[str, float] = field(default_factory=dict)
    _counted: int = 0
    _evaluated: VersionEvaluation | None = None

    def read(self, current: int | None) -> LedgerSnapshot:
        """The ledger now, with the evaluation of the current version."""
        with closing(sqlite3.connect(f"{self.path.absolute().as_uri()}?mode=ro", uri=True, timeout=5)) as db:
            db.execute("BEGIN")  # a consistent snapshot
            self.totals.update(db)
            return LedgerSnapshot(
                states=_count_states(db),
                waiting=_count_waiting(db),
                names=dict(db.execute("SELECT id, name FROM tasks WHERE state != 'FORGOTTEN' ORDER BY id").fetchall()),
                task_states=dict(db.execute("SELECT id, state FROM tasks WHERE state != 'FORGOTTEN'").fetchall()),
                progress={task: json.loads(text) for task, text in db.execute("SELECT task, detail FROM progress")},
                pending_commands=_number(db, "SELECT count(*) FROM commands WHERE state = 'PENDING'"),
                versions=dict(db.execute("SELECT kind, count(*) FROM versions WHERE step = 'PUBLISHED' GROUP BY kind")),
                unrecorded=_number(db, "SELECT count(*) FROM versions WHERE step = 'PUBLISHED' AND NOT recorded"),
                health={name: bool(up) for name, up in db.execute("SELECT dependency, up FROM health")},
                evaluated=self._read_evaluation(db, current),
            )

    def evaluation(self, version: int | None) -> VersionEvaluation | None:
        """Only the evaluation of one version."""
        with closing(sqlite3.connect(f"{self.path.absolute().as_uri()}?mode=ro", uri=True, timeout=5)) as db:
            return self._read_evaluation(db, version)

    def _read_evaluation(self, db: sqlite3.Connection, version: int | None) -> VersionEvaluation | None:
        if self._evaluated and self._evaluated.version == version:
            return self._evaluated
        found = db.execute("SELECT created_at, evaluation FROM versions WHERE version = ?", (version,)).fetchone()
        if version is None or found is None:
            return None
        self._read_accuracies(db)
        self._evaluated = VersionEvaluation(version, found[0], json.loads(found[1]), dict(self._when_learned))
        return self._evaluated

    def _read_accuracies(self, db: sqlite3.Connection) -> None:
        """Of new versions; SQLite extracts the one number, since parsing a thousand documents would be slow."""
        sql = """SELECT v.version, t.name, json_extract(v.evaluation, '$.tasks."' || t.name || '".accuracy')
            FROM version_tasks JOIN versions v USING (version) JOIN tasks t ON t.id = task
            WHERE v.kind = 'learn' AND v.version > ? AND instr(t.name, '"') = 0 ORDER BY v.version"""
        for version, name, accuracy in db.execute(sql, (self._counted,)):
            self._counted = version
            if accuracy is not None:
                self._when_learned[name] = accuracy


def _count_states(db: sqlite3.Connection) -> dict[State, int]:
    found = dict(db.execute("SELECT state, count(*) FROM tasks GROUP BY state").fetchall())
    return {state: found.get(state, 0) for state in State}


def _count_waiting(db: sqlite3.Connection) -> dict[tuple[str, str], int]:
    sql = """SELECT state, coalesce(code, 'unknown'), count(*) FROM tasks
        WHERE state IN ('QUARANTINED', 'CONFLICT', 'HELD') GROUP BY 1, 2"""
    return {(state, code): count for state, code, count in db.execute(sql)}


def _number(db: sqlite3.Connection, sql: str) -> int:
    return int(db.execute(sql).fetchone()[0])
