"""What the ledger promises: durable rows, events that stay, and no reset whatever it finds."""

import sqlite3
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from threading import Barrier

import pytest

from mqmk.daemon.errors import LedgerError
from mqmk.daemon.ledger import Ledger, State
from mqmk.daemon.ledger_schema import MIGRATIONS


def make(folder: Path) -> Ledger:
    return Ledger(folder / "ledger.sqlite", clock=lambda: 7.0)


def test_a_task_and_its_history_are_there_when_the_ledger_is_opened_again(tmp_path: Path) -> None:
    ledger = make(tmp_path)
    task = ledger.add_task("sea", "sea", "f1", State.DISCOVERED, identity="ab")
    ledger.move(task, State.QUARANTINED, "task.quarantined", reason="torn", code="truncated")
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
    task = ledger.move(task, State.DISCOVERED, "task.will-retry", reason="gone", attempts=2, not_before=9.0)
    assert (task.reason, task.attempts, task.not_before) == ("gone", 2, 9.0)
    task = ledger.move(task, State.VALIDATED, "task.validated")
    assert (task.reason, task.attempts, task.not_before) == (None, 0, 0.0)
    ledger.close()


def test_events_can_be_neither_changed_nor_removed(tmp_path: Path) -> None:
    ledger = make(tmp_path)
    ledger.note("something")
    ledger.close()
    with closing(sqlite3.connect(tmp_path / "ledger.sqlite")) as db:
        for sql in ("UPDATE events SET event = 'x'", "DELETE FROM events"):
            with pytest.raises(sqlite3.IntegrityError, match="append-only"):
                db.execute(sql)


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
    asked = operator.ask("forget", "sea")
    assert daemon.changed_by_others() and [each.subject for each in daemon.pending()] == ["sea"]
    daemon.answer(asked, "REFUSED", "there is no task sea")
    assert operator.command(asked.id).answer == "there is no task sea" and not daemon.pending()
    daemon.close()
    operator.close()


def test_health_says_since_when_and_whether_it_is_news(tmp_path: Path) -> None:
    now = [1.0]
    ledger = Ledger(tmp_path / "ledger.sqlite", clock=lambda: now[0])
    assert ledger.set_health("bucket", False, "gone") and not ledger.set_health("bucket", False, "gone")
    now[0] = 5.0
    assert not ledger.set_health("bucket", False, "still gone"), "the same trouble in other words is no news"
    (found,) = ledger.health()
    assert (found.up, found.says, found.since) == (False, "still gone", 1.0)
    assert ledger.set_health("bucket", True)
    ledger.close()


def test_the_lineage_of_a_version_says_what_it_holds(tmp_path: Path) -> None:
    ledger = make(tmp_path)
    tasks = [ledger.add_task(name, name, "f", State.TRAINED) for name in ("sea", "birds", "fruit")]
    for version, (parent, kind, task) in enumerate(
        [(None, "learn", 0), (1, "learn", 1), (1, "learn", 2), (3, "forget", 2)]
    ):
        ledger.plan_version(version + 1, "d", parent, kind, tasks[task].id, {})
    assert ledger.lineage(4) == [("learn", 1), ("learn", 3), ("forget", 3)]
    assert ledger.lineage(2) == [("learn", 1), ("learn", 2)] and ledger.next_version() == 5
    assert len(ledger.unfinished_versions()) == 4
    ledger.close()
