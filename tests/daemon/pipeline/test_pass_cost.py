"""What a pass of the loop costs does not depend on how many tasks and versions there were before."""

import math
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from support.daemons.state_model import Model, manifest_of

from mqmk.daemon.bucket.scan_clock import ScanClock
from mqmk.daemon.ledger.ledger import Ledger, State

SMALL = {"key_values", "health", "progress"}
"""Tables with a row for each of few things."""


class CountingLedger(Ledger):
    """Counts statements and the rows that they return."""

    statements: list[str]
    rows = 0

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.statements = []
        self._db.set_trace_callback(self.statements.append)

    def _rows(self, sql: str, *values: Any) -> list[dict[str, Any]]:
        found = super()._rows(sql, *values)
        self.rows += len(found)
        return found


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Iterator[Model]:
    monkeypatch.setattr("support.daemons.state_model.Ledger", CountingLedger)
    made = Model()
    yield made
    made.ledger.close()
    made.close()


def fill(path: Path, tasks: int) -> None:
    """Add tasks in every state that waits for nobody, and a version for each."""
    states = (State.SERVING, State.FORGOTTEN, State.QUARANTINED, State.HELD)
    with closing(sqlite3.connect(path)) as db, db:
        for number in range(1000, 1000 + tasks):
            name, state = f"task-{number}", states[number % len(states)]
            report = f'{{"samples": {{"{name}-x": 4, "{name}-y": 4}}, "held_out": {{}}, "warnings": []}}'
            db.execute("INSERT INTO tasks (id, name, folder, fingerprint, state, identity, manifest, report, version, "
                       "erased, discovered_at, updated_at) VALUES (?, ?, ?, 'f', ?, ?, ?, ?, ?, '[\"mlflow\"]', 1, 1)",
                       (number, name, name, state, f"{number:064}", manifest_of(name, 1).to_bytes(), report,
                        number))  # fmt: skip
            db.execute("INSERT INTO folders VALUES (?, 'f', ?)", (name, number))
            db.execute("INSERT INTO events (at, task, event, state, detail) VALUES (1, ?, 'task.trained', ?, '{}')",
                       (number, state))  # fmt: skip
            withdrawn = number if state is State.FORGOTTEN else None
            db.execute("INSERT INTO versions (version, digest, parent, kind, step, evaluation, recorded, withdrawn, "
                       "created_at) VALUES (?, ?, ?, 'learn', 'PUBLISHED', '{\"accuracy\": 1}', 1, ?, 1)",
                       (number, f"{number:064}", number - 1 if number > 1000 else None, withdrawn))  # fmt: skip


def idle_pass(model: Model, tasks: int) -> tuple[list[str], int]:
    """The statements of a pass in which nothing happens, and the number of rows that they return."""
    model.drop("sea", "sea", 1)
    model.run()
    model.settle()
    fill(model.config.ledger_file, tasks)
    model.orchestrator.discovery.scans = ScanClock(math.inf, math.inf, math.inf)
    model.bucket.has_changed = lambda: False  # type: ignore[method-assign]
    for _ in range(2):  # the first scans the bucket and cleans up
        ledger = model.ledger
        assert isinstance(ledger, CountingLedger)
        ledger.statements.clear()
        ledger.rows = 0
        assert not model.orchestrator.run_pass() and model.orchestrator.is_idle
    return [*ledger.statements], ledger.rows


def test_an_idle_pass_reads_as_little_with_many_tasks_as_with_few(model: Model) -> None:
    few = idle_pass(model, 100)
    assert len(few[0]) < 30 and few[1] < 30
    model.ledger._db.execute("DELETE FROM tasks WHERE id >= 1000")
    for table, column in (("versions", "version"), ("folders", "task"), ("classes", "task")):
        model.ledger._db.execute(f"DELETE FROM {table} WHERE {column} >= 1000")
    many = idle_pass(model, 2000)
    assert len(many[0]) == len(few[0]) and many[1] == few[1]


def test_every_query_of_an_idle_pass_is_answered_by_an_index(model: Model) -> None:
    statements, _ = idle_pass(model, 100)
    scanned = [(table, sql) for sql in statements for table in scanned_tables(model.ledger, sql) - SMALL]
    assert scanned == [] and any("FROM versions" in sql for sql in statements)


def scanned_tables(ledger: Ledger, sql: str) -> set[str]:
    """The tables that a statement reads as a whole."""
    if not sql.startswith(("SELECT", "WITH", "UPDATE", "DELETE")):
        return set()
    plan = [row["detail"] for row in ledger._db.execute(f"EXPLAIN QUERY PLAN {sql}")]
    partial = {row["name"] for row in ledger._db.execute("SELECT name FROM sqlite_master WHERE sql LIKE '%) WHERE %'")}
    found = [re.fullmatch(r"SCAN (\w+)(?: USING (?:COVERING )?INDEX (\w+))?", step) for step in plan]
    return {step[1] for step in found if step and step[2] not in partial}


def test_the_folders_of_the_state_directory_are_listed_only_after_something_happened(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed: list[Path] = []
    for name in ("iterdir", "glob", "rglob"):
        real = getattr(Path, name)
        monkeypatch.setattr(Path, name, lambda path, *given, real=real: (listed.append(path), real(path, *given))[1])
    idle_pass(model, 0)
    listed.clear()
    assert not model.orchestrator.run_pass() and listed == []
    model.ledger.append_event("something")
    model.orchestrator.run_pass()
    assert model.files.store.versions in listed


def test_a_task_is_compared_with_the_owners_of_its_own_classes_only(model: Model) -> None:
    idle_pass(model, 40)
    ledger = model.ledger
    assert isinstance(ledger, CountingLedger)
    (sea,) = ledger.tasks_named("sea")
    wanted = [f"task-{number}-x" for number in range(1000, 1008)]  # two of each state
    ledger.rows = 0
    assert ledger.owners([*wanted, "sea-1-x", "new"], but=sea) == {
        f"task-{number}-x": f"task-{number}" for number in (1000, 1003, 1004, 1007)
    }, "those that are served or held, but not its own"
    assert ledger.rows == 4


def test_the_classes_of_a_task_are_those_of_its_latest_report(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    sea, other = (ledger.add_task(name, name, "f", State.DISCOVERED) for name in ("sea", "other"))
    assert ledger.owners(["cod", "eel"], but=other) == {}
    ledger.update_task(sea, report={"samples": {"cod": 1}})
    assert ledger.owners(["cod", "eel"], but=other) == {"cod": "sea"} and ledger.owners(["cod"], but=sea) == {}
    ledger.update_task(sea, report={"samples": {"eel": 1}})
    assert ledger.owners(["cod", "eel"], but=other) == {"eel": "sea"}
    ledger.update_task(sea, report=None)
    assert ledger.owners(["cod", "eel"], but=other) == {}
    ledger.close()


def test_many_waiting_tasks_are_read_as_workers_take_them(tmp_path: Path) -> None:
    ledger = CountingLedger(tmp_path / "ledger.sqlite")
    for number in range(200):
        ledger.add_task(f"task-{number}", f"{number}", "f", State.DISCOVERED, not_before=100.0 if number < 2 else 0.0)
    ledger.rows = 0
    due = ledger.due_tasks(State.DISCOVERED, now=50.0)
    assert [next(due).name, next(due).name] == ["task-2", "task-3"] and ledger.rows < 50
    assert [task.name for task in due] == [f"task-{number}" for number in range(4, 200)]
    ledger.close()
