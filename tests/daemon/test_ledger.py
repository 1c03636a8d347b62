"""What the ledger promises: durable rows, events that stay, and no reset whatever it finds."""

import sqlite3
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from threading import Barrier

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.daemons.state_model import FAST

from mqmk.daemon.errors import LedgerError, OutdatedError
from mqmk.daemon.ledger.event_names import RENAMED
from mqmk.daemon.ledger.ledger import Ledger, State
from mqmk.daemon.ledger.schema import MIGRATIONS
from mqmk.daemon.metrics.event_totals import EventTotals


def make(folder: Path) -> Ledger:
    return Ledger(folder / "ledger.sqlite", clock=lambda: 7.0)


def test_a_task_and_its_history_are_there_when_the_ledger_is_opened_again(tmp_path: Path) -> None:
    ledger = make(tmp_path)
    task = ledger.add_task("sea", "sea", "f1", State.DISCOVERED, identity="ab")
    ledger.transition(task.id, task.state, State.QUARANTINED, 1, "task.quarantined", reason="torn", code="truncated")
    ledger.close()
    again = make(tmp_path)
    (found,) = again.tasks()
    assert (found.state, found.reason, found.code, found.fingerprint) == ("QUARANTINED", "torn", "truncated", "f1")
    assert [event.event for event in again.events(found)] == ["task.discovered", "task.quarantined"]
    again.close()


def test_all_who_open_a_new_ledger_at_the_same_moment_get_it(tmp_path: Path) -> None:
    """Such as `mqmk-daemon start &` and `mqmk-daemon status` typed after it."""
    for attempt in range(20):
        together = Barrier(6)

        def opened(folder: Path = tmp_path / str(attempt), together: Barrier = together) -> int:
            together.wait()
            ledger = make(folder)
            found = len(ledger.tasks())
            ledger.close()
            return found

        with ThreadPoolExecutor(6) as threads:
            assert [each.result() for each in [threads.submit(opened) for _ in range(6)]] == [0] * 6


def test_moving_on_clears_the_reason_and_the_tries_of_the_state_before(tmp_path: Path) -> None:
    ledger = make(tmp_path)
    task = ledger.add_task("sea", "sea", "f1", State.DISCOVERED)
    task = ledger.transition(task.id, State.DISCOVERED, State.DISCOVERED, 1, "task.retry_scheduled", reason="gone",
                             failures=2, not_before=9.0)  # fmt: skip
    assert (task.reason, task.failures, task.not_before, task.attempt) == ("gone", 2, 9.0, 2)
    task = ledger.transition(task.id, State.DISCOVERED, State.VALIDATED, 2, "task.validated")
    assert (task.reason, task.failures, task.not_before, task.attempt) == (None, 0, 0.0, 3)
    ledger.close()


def test_events_can_be_neither_changed_nor_removed(tmp_path: Path) -> None:
    ledger = make(tmp_path)
    ledger.append_event("something")
    ledger.close()
    with closing(sqlite3.connect(tmp_path / "ledger.sqlite")) as db:
        for sql in ("UPDATE events SET event = 'x'", "DELETE FROM events"):
            with pytest.raises(sqlite3.IntegrityError, match="append-only"):
                db.execute(sql)


def test_events_of_an_older_release_are_read_under_their_current_names(tmp_path: Path) -> None:
    ledger = make(tmp_path)
    task = ledger.add_task("sea", "sea", "f1", State.DISCOVERED)
    for name in RENAMED:
        ledger.append_event(name, task)
    ledger.append_event("task.validated", task)
    assert [event.event for event in ledger.events(task)] == ["task.discovered", *RENAMED.values(), "task.validated"]
    ledger.close()
    totals = EventTotals()
    with closing(sqlite3.connect(tmp_path / "ledger.sqlite")) as db:
        totals.update(db)
        assert db.execute("SELECT count(*) FROM events WHERE event = 'task.will-retry'").fetchone() == (1,)
    assert (totals.retries, totals.epochs) == (1, 1)


def test_a_ledger_of_a_later_release_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    make(tmp_path).close()
    path = tmp_path / "ledger.sqlite"
    with closing(sqlite3.connect(path)) as db:
        db.execute(f"PRAGMA user_version = {len(MIGRATIONS) + 1}")
    before = path.read_bytes()
    with pytest.raises(LedgerError, match="upgrade mqmk-daemon"):
        make(tmp_path)
    assert path.read_bytes() == before


def test_a_file_that_is_no_ledger_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    path.write_bytes(b"no database" * 100)
    with pytest.raises(LedgerError, match="nothing was reset"):
        make(tmp_path)
    assert path.read_bytes() == b"no database" * 100


def test_a_command_written_by_another_process_is_noticed_and_answered(tmp_path: Path) -> None:
    daemon, operator = make(tmp_path), make(tmp_path)
    daemon.changed_by_others()
    assert not daemon.changed_by_others()
    asked = operator.enqueue_command("forget", "sea")
    assert daemon.changed_by_others() and [each.subject for each in daemon.pending_commands()] == ["sea"]
    daemon.resolve_command(asked, "REFUSED", "there is no task sea")
    assert operator.command(asked.id).answer == "there is no task sea" and not daemon.pending_commands()
    daemon.close()
    operator.close()


def test_health_says_since_when_and_whether_it_is_news(tmp_path: Path) -> None:
    now = [1.0]
    ledger = Ledger(tmp_path / "ledger.sqlite", clock=lambda: now[0])
    assert ledger.set_health("bucket", False, "gone") and not ledger.set_health("bucket", False, "gone")
    now[0] = 5.0
    assert not ledger.set_health("bucket", False, "still gone"), "the same trouble in other words is no news"
    (found,) = ledger.health()
    assert (found.up, found.message, found.since) == (False, "still gone", 1.0)
    assert ledger.set_health("bucket", True)
    ledger.close()


def test_the_line_of_a_version_says_what_it_contains(tmp_path: Path) -> None:
    ledger = make(tmp_path)
    tasks = [ledger.add_task(name, name, "f", State.TRAINED) for name in ("sea", "birds", "fruit")]
    for version, (parent, kind, task) in enumerate(
        [(None, "learn", 0), (1, "learn", 1), (1, "learn", 2), (3, "forget", 2)]
    ):
        ledger.plan_version(version + 1, "d", parent, kind, [tasks[task]], {})
    assert [*ledger.tasks_in_version(4)] == [1]
    assert ledger.tasks_in_version(3) == {1: 1, 3: 3}
    assert [*ledger.tasks_in_version(2)] == [1, 2] and ledger.next_version() == 5
    assert len(ledger.unfinished_versions()) == 4
    ledger.close()


def test_the_evaluation_of_a_version_that_is_gone_keeps_its_figures_and_those_of_the_task_it_added(
    tmp_path: Path,
) -> None:
    ledger = make(tmp_path)
    sea, birds = (ledger.add_task(name, name, "f", State.TRAINED) for name in ("sea", 'the "birds"'))
    rows = {"sea": {"accuracy": 0.5, "images": 2}, 'the "birds"': {"accuracy": 1.0, "images": 4}}
    whole = {"accuracy": 0.8, "matching_rate": 0.9, "images": 6, "matcher": "cascade", "matchers": {},
             "tasks": rows, "confusion": {"sea": {"sea": 2}, 'the "birds"': {"sea": 1}},
             "classes": {"gull": {"images": 2, "right": 1}}, "mistaken_classes": [["gull", "tern", 1]]}  # fmt: skip
    older = {name: value for name, value in whole.items() if name != "images"}
    for version, (task, document) in enumerate([(sea, whole), (birds, whole), (sea, older)], start=1):
        ledger.plan_version(version, "d", version - 1 or None, "learn", [task], document)
    before = ledger.summarized_versions()
    assert [{*row.evaluation} & {"tasks", "confusion"} for row in before] == [set(), set(), {"tasks", "confusion"}]
    ledger.finish_version(ledger.version(2), {})
    assert ledger.figures_when_learned() == {birds.id: rows['the "birds"']}
    ledger.summarize_evaluations([1, 2, 3, 4])
    assert [row.evaluation.get("tasks") for row in ledger.versions()] == [
        {"sea": rows["sea"]}, {'the "birds"': rows['the "birds"']}, rows,
    ]  # fmt: skip
    assert [row.evaluation for row in ledger.summarized_versions()] == [row.evaluation for row in before]
    assert ledger.version(3).evaluation == older, "its figures follow from its tasks"
    assert ledger.figures_when_learned() == {birds.id: rows['the "birds"']}
    ledger.close()


STEPS = st.lists(
    st.tuples(st.integers(0, 20), st.integers(0, 3), st.none() | st.sets(st.integers(0, 3), max_size=2)), max_size=12
)
"""For each version: which one it is made from, the task that it adds or leaves out, what that task was made from."""


@settings(max_examples=60, deadline=None)
@given(steps=STEPS, to_forget=st.permutations(range(4)))
def test_versions_with_a_forgotten_task_are_withdrawn_and_what_is_left_of_it_is_known(
    steps: list[tuple[int, int, set[int] | None]], to_forget: list[int]
) -> None:
    with tempfile.TemporaryDirectory(dir=FAST if Path(FAST).is_dir() else None) as folder:
        ledger = make(Path(folder))
        tasks = [ledger.add_task(f"{n}", f"{n}", "f", State.TRAINED, identity=f"id-{n}") for n in range(4)]
        made_from: dict[int, set[int] | None] = {}
        for version, (parent, number, base) in enumerate(steps, start=1):
            parents = parent % version or None
            kind = "forget" if tasks[number].id in ledger.tasks_in_version(parents) else "learn"
            if kind == "learn":
                made_from[version] = base
                origin = None if base is None else {"digest": "d", "made_from": [f"id-{n}" for n in base]}
                tasks[number] = ledger.update_task(tasks[number], base=origin)
            ledger.plan_version(version, "d", parents, kind, [tasks[number]], {})
        contents = {version: ledger.tasks_in_version(version) for version in range(1, len(steps) + 1)}
        withdrawn: set[int] = set()
        for number in to_forget:
            task = ledger.task(tasks[number].id)
            assert ledger.is_exact_without(task) == is_exact(ledger, number, contents, made_from, withdrawn)
            ledger.transition(task.id, task.state, State.FORGOTTEN, task.attempt, "task.forgotten")
            withdrawn |= {version for version, contained in contents.items() if task.id in contained}
            assert {*ledger.withdrawn_versions()} == withdrawn
        ledger._db.execute("UPDATE versions SET withdrawn = NULL")
        ledger.withdraw_forgotten()
        assert {*ledger.withdrawn_versions()} == withdrawn
        ledger.close()


def is_exact(
    ledger: Ledger,
    number: int,
    contents: Mapping[int, Mapping[int, int]],
    made_from: Mapping[int, set[int] | None],
    withdrawn: set[int],
) -> bool:
    """Whether no task and no version that can be served was made from the data of a task, one by one."""
    name = f"{number}"
    for other in ledger.tasks():
        is_left = other.name != name and other.state is not State.FORGOTTEN
        if is_left and other.base and f"id-{number}" in other.base["made_from"]:
            return False
    (task,) = ledger.tasks_named(name)
    first = min((each[task.id] for each in contents.values() if task.id in each), default=99)
    for version in contents.keys() - withdrawn:
        if task.id not in contents[version]:
            for added in contents[version].values():
                origin = made_from[added]
                if added > first if origin is None else number in origin:
                    return False
    return True


def test_the_tasks_of_a_version_are_published_in_one_step_or_the_version_is_not_planned(tmp_path: Path) -> None:
    ledger = make(tmp_path)
    tasks = [ledger.add_task(name, name, "f", State.TRAINED) for name in ("sea", "birds", "fruit")]
    moved = ledger.transition(2, State.TRAINED, State.HELD, 1, "task.held")
    with pytest.raises(OutdatedError, match="birds is no longer TRAINED"):
        ledger.plan_version(1, "d", None, "learn", tasks, {})
    assert not ledger.versions() and not ledger.tasks_in_version(1)
    ledger.transition(2, State.HELD, State.TRAINED, moved.attempt, "task.approved")
    tasks = [ledger.task(number) for number in (3, 1, 2)]
    plan = ledger.plan_version(1, "d", None, "learn", tasks, {})
    assert [each.task for each in plan.tasks] == [3, 1, 2] == [*ledger.tasks_in_version(1)], "in their order"
    ledger.cancel_version(plan)
    assert not ledger.tasks_in_version(1) and ledger.next_version() == 1
    ledger.finish_version(ledger.plan_version(1, "d", None, "learn", tasks, {}), {})
    assert [(task.state, task.version) for task in ledger.tasks()] == [(State.PUBLISHED, 1)] * 3
    (one,) = ledger.versions()
    assert {each.task: each.attempt for each in one.tasks} == {task.id: task.attempt for task in tasks}
    ledger.close()
