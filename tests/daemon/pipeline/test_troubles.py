"""What the daemon depends on fails for a while: it says so, goes on, and catches up by itself."""

import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.daemons.daemon import daemon, drop, small_config

from mqmk.daemon.bucket.scanner import Bucket
from mqmk.daemon.config.sections import Config, Gate
from mqmk.daemon.errors import RegistryError
from mqmk.daemon.ledger.ledger import Ledger
from mqmk.daemon.loop import DaemonLoop
from mqmk.daemon.metrics.server import serve_metrics
from mqmk.daemon.registry.in_memory import MemoryRegistry
from mqmk.daemon.registry.records import TrainingRecord, VersionRecord


def config_of(folder: Path) -> Config:
    return small_config(folder, gate=Gate(accuracy_floor=0.0, fresh_process=False))


def health(ledger: Ledger) -> dict[str, bool]:
    return {each.dependency: each.up for each in ledger.health()}


class SometimesDown(MemoryRegistry):
    """A registry that can be switched off."""

    down = False

    def record_training(self, record: TrainingRecord) -> str:
        self._answer()
        return super().record_training(record)

    def record_version(self, record: VersionRecord) -> None:
        self._answer()
        super().record_version(record)

    def _answer(self) -> None:
        if self.down:
            raise RegistryError("nobody answers", transient=True)


def test_while_mlflow_is_down_tasks_are_published_and_recorded_later_in_order(tmp_path: Path) -> None:
    registry = SometimesDown()
    registry.down = True
    parts = daemon(config_of(tmp_path), registry=registry)
    for task in ("sea", "birds"):
        drop(tmp_path / "bucket", task, per_class=6)
    parts.run()
    assert set(parts.states.values()) == {"PUBLISHED"} and not registry.versions()
    assert health(parts.ledger)["mlflow"] is False
    registry.down = False
    parts.run()
    assert [each.version for each in registry.versions()] == [1, 2] and registry.serving() == 2
    assert len(registry.trainings) == 2 and health(parts.ledger)["mlflow"] is True
    parts.close()


def test_a_bucket_that_goes_away_is_reported_and_its_tasks_are_learned_when_it_is_back(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    parts = daemon(replace(config, bucket=replace(config.bucket, poll_seconds=0.0)))
    shutil.rmtree(tmp_path / "bucket")
    parts.run()
    assert health(parts.ledger)["bucket"] is False
    drop(tmp_path / "bucket", "sea", per_class=6)
    parts.run()
    assert health(parts.ledger)["bucket"] is True and parts.states == {"sea": "PUBLISHED"}
    parts.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own with little room."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", place], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("only root may mount a small file system")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def test_on_a_full_disk_the_daemon_lives_and_goes_on_when_there_is_room_again(
    tmp_path: Path, small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(tmp_path)
    config = replace(config, state=replace(config.state, dir=small_disk / "state"))
    parts = daemon(config)
    filler = small_disk / "filler"
    room = shutil.disk_usage(small_disk).free
    filler.write_bytes(b"x" * (room - 100_000))
    drop(tmp_path / "bucket", "sea", per_class=6)
    metrics = serve_metrics(replace(config, metrics=replace(config.metrics, port=0)), config.ledger_file)
    ground = _Ground()
    service = DaemonLoop(config, parts.ledger, _bucket(config), ground, parts.orchestrator, metrics)
    thread = threading.Thread(target=service.run)
    thread.start()
    try:
        _wait(lambda: "pass failed" in caplog.text or not all(health(parts.ledger).values()), 60)
        assert thread.is_alive() and parts.states.get("sea") not in ("PUBLISHED", "QUARANTINED")
        filler.unlink()
        _wait(lambda: parts.states.get("sea") == "PUBLISHED", 60)
    finally:
        service.stopping = True
        thread.join(30)
        metrics.close()
        parts.close()


class _Ground:
    """Nothing under the daemon's feet."""

    metrics_target = None

    def reconcile(self) -> None:
        """Nothing to do."""


def _bucket(config: Config) -> Bucket:
    return Bucket(config.bucket_url, settle_seconds=0.2)


def _wait(what: "object", seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not what():  # type: ignore[operator]
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.1)
