"""What is new in the bucket becomes a task within seconds, and costs nothing while it does not change."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest
from support.daemons.daemon import Parts, daemon, drop, small_config
from support.servers.monitored import move

from mqmk.daemon.bucket.scan_clock import ScanClock
from mqmk.daemon.jobs import Job, JobUpdate
from mqmk.daemon.ledger.ledger import Ledger, State


class NeverDone:
    """Workers that take every job and are busy for ever."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []

    def has_capacity(self, _kind: type) -> bool:
        return not self.jobs

    def start(self, job: Job) -> None:
        self.jobs.append(job)

    def running(self) -> list[Job]:
        return self.jobs

    def poll(self) -> list[JobUpdate]:
        return []

    def stop(self) -> None: ...


@pytest.fixture
def parts(tmp_path: Path) -> Parts:
    return daemon(small_config(tmp_path), workers=lambda _: NeverDone())


def scan(parts: Parts) -> None:
    parts.orchestrator.bucket.wake()
    parts.orchestrator.discovery.discover_tasks()


def quarantine(parts: Parts, count: int) -> None:
    """Folders that were found to be bad."""
    folder = Path(parts.config.bucket_url) / "tasks"
    for number in range(count):
        (folder / f"bad{number}").mkdir()
        (folder / f"bad{number}" / "TASK.json").write_text("{}")
    with parts.ledger._transaction() as db:
        bucket = parts.orchestrator.bucket
        bucket._settling._seconds = 0.0
        for seen in bucket.scan({}, everything=True):
            found = (seen.folder, seen.folder, seen.fingerprint, "QUARANTINED", "bad-manifest", 0, 0)
            names = "name, folder, fingerprint, state, code, discovered_at, updated_at"
            task = db.execute(f"INSERT INTO tasks ({names}) VALUES (?, ?, ?, ?, ?, ?, ?)", found).lastrowid
            db.execute("INSERT INTO folders VALUES (?, ?, ?)", (seen.folder, seen.fingerprint, task))


def test_six_hundred_quarantined_folders_hide_no_new_task(parts: Parts, tmp_path: Path, monkeypatch):
    quarantine(parts, 600)
    scan(parts)
    assert parts.ledger.counts()[State.QUARANTINED] == 600
    drop(tmp_path / "bucket", "sea", "zzz-new", per_class=4)
    opened: list[str] = []
    store = parts.orchestrator.bucket._store
    opens = store.open_file
    monkeypatch.setattr(store, "open_file", lambda place, name: (opened.append(place), opens(place, name))[1])
    scan(parts)
    assert [task.state for task in parts.ledger.tasks_named("zzz-new")] == [State.DISCOVERED]
    assert set(opened) == {"tasks/zzz-new"}
    assert not parts.orchestrator.bucket.has_changed(), "the loop may sleep"


def test_a_quarantined_folder_is_read_again_when_it_was_replaced_or_when_asked(parts: Parts, tmp_path: Path):
    quarantine(parts, 2)
    parts.ledger.enqueue_command("retry", "bad1")
    parts.orchestrator.discovery.scans = ScanClock(60, 60, 600)
    parts.orchestrator.discovery.discover_tasks()
    parts.orchestrator.commands.apply_pending()
    events = len(parts.ledger.events())
    for _ in range(3):
        parts.orchestrator.discovery.discover_tasks()  # without waiting for the next scan, and once
    assert [event.event for event in parts.ledger.events()[events:]] == ["task.replaced", "task.discovered"]
    (tmp_path / "bucket" / "tasks" / "bad0" / "TASK.json").unlink()
    (tmp_path / "bucket" / "tasks" / "bad0").rmdir()
    drop(tmp_path / "bucket", "sea", "bad0", per_class=4)
    scan(parts)
    assert parts.states == {"bad0": "DISCOVERED", "bad1": "QUARANTINED"}


def test_a_busy_daemon_scans_as_often_as_an_idle_one(parts: Parts, tmp_path: Path, monkeypatch):
    drop(tmp_path / "bucket", "sea", per_class=4)
    now = [0.0]
    parts.orchestrator.discovery.scans = ScanClock(2.0, 2.0, 600.0, lambda: now[0])
    scans: list[float] = []
    real = parts.orchestrator.bucket.scan
    monkeypatch.setattr(parts.orchestrator.bucket, "scan", lambda *a, **k: (scans.append(now[0]), real(*a, **k))[1])
    while now[0] < 60:
        parts.orchestrator.run_pass()
        now[0] += 0.25
    assert parts.orchestrator.workers.running()
    assert len(scans) == 60 / 2.0


def test_tasks_that_wait_for_a_worker_cost_a_pass_nothing(parts: Parts, tmp_path: Path, monkeypatch):
    for task in ("sea", "birds", "fruit"):
        drop(tmp_path / "bucket", task, per_class=4)
    parsed: list[str] = []
    real = Ledger.manifest
    monkeypatch.setattr(Ledger, "manifest", lambda ledger, task: (parsed.append(task.name), real(ledger, task))[1])
    for _ in range(3):
        parts.orchestrator.run_pass()
    (running,) = parts.orchestrator.workers.running()
    assert len(parts.states) == 3 and parsed == [running.name]


def test_the_same_name_with_other_content_is_a_conflict_with_the_next_scan(parts: Parts, tmp_path: Path):
    tasks = tmp_path / "bucket" / "tasks"
    drop(tmp_path / "bucket", "sea", per_class=4)
    scan(parts)
    (task,) = parts.ledger.tasks_named("sea")
    for state in (State.VALIDATED, State.TRAINING, State.TRAINED, State.PUBLISHED, State.SERVING):
        move(parts.ledger, task, state, f"task.{state.lower()}")
    (tasks / "sea").rename(tmp_path / "away")
    drop(tmp_path / "bucket", "birds", "sea", per_class=4)
    scan(parts)
    assert [task.state for task in parts.ledger.tasks_named("sea")] == [State.SERVING, State.CONFLICT]
    drop(tmp_path / "bucket", "fruit", "sea-2", per_class=4)
    manifest = (tasks / "sea-2" / "TASK.json").read_text()
    (tasks / "sea-2" / "TASK.json").write_text(manifest.replace('"task": "sea-2"', '"task": "sea"'))
    scan(parts)
    states = [(task.folder, task.state) for task in parts.ledger.tasks_named("sea")]
    assert states[1:] == [("sea", State.CONFLICT), ("sea-2", State.CONFLICT)]
    events = parts.ledger.last_event()
    for _ in range(3):
        scan(parts)
    assert parts.ledger.last_event() == events


def test_a_repeated_task_is_answered_by_its_folder(parts: Parts, tmp_path: Path, caplog):
    from mqmk.daemon.status.snapshot import Snapshot

    drop(tmp_path / "bucket", "sea", per_class=4)
    scan(parts)
    drop(tmp_path / "bucket", "sea", "zoo", per_class=4)
    with caplog.at_level(logging.INFO):
        scan(parts)
    assert "zoo has the same content as sea (DISCOVERED): nothing to do" in caplog.text
    (shown,) = Snapshot(parts.config, parts.ledger).task_details("zoo")
    assert (shown["name"], shown["same_as"]) == ("sea", "zoo has the same content as sea (DISCOVERED): nothing to do")
    (shown,) = Snapshot(parts.config, parts.ledger).task_details("sea")
    assert shown["same_as"] is None


def test_a_folder_without_a_manifest_that_is_retried_is_no_conflict_with_itself(parts: Parts, tmp_path: Path):
    drop(tmp_path / "bucket", "sea", per_class=4)
    (tmp_path / "bucket" / "tasks" / "sea" / "TASK.json").unlink()
    (tmp_path / "bucket" / "tasks" / "sea" / "_SUCCESS").touch()
    scan(parts)
    (task,) = parts.ledger.tasks_named("sea")
    move(parts.ledger, task, State.QUARANTINED, "task.quarantined", code="failed")
    parts.ledger.enqueue_command("retry", "sea")
    parts.orchestrator.commands.apply_pending()
    scan(parts)
    assert parts.states == {"sea": "DISCOVERED"} and len(parts.ledger.tasks()) == 1


def test_a_bucket_that_fails_is_not_asked_at_every_pass(tmp_path: Path):
    config = small_config(tmp_path)
    config = replace(config, bucket=replace(config.bucket, poll_seconds=2.0, max_poll_seconds=2.0))
    parts = daemon(config, workers=lambda _: NeverDone())
    (tmp_path / "bucket" / "tasks").rmdir()
    (tmp_path / "bucket").rmdir()
    scan(parts)
    assert not parts.ledger.health()[0].up
    (tmp_path / "bucket" / "tasks").mkdir(parents=True)
    scan(parts)
    assert not parts.ledger.health()[0].up, "not before the pause is over"
