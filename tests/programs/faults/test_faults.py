"""Dependencies fail in one call of twenty, or the connection to them does: the daemon reaches the same published state.

A full disk, a bucket that goes away and an MLflow outage are in tests/daemon/test_troubles.py.
`FAULT_TEST=full` (make fault-test) adds longer streams, silent connections and a real MLflow server.
"""

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from support.daemons.daemon import Parts, daemon, drop, small_config
from support.daemons.invariants import problems
from support.fault_injection import Faults, disk_error, with_faults
from support.flaky_proxy import FlakyProxy
from support.servers.mlflow_servers import mlflow_server
from support.servers.s3 import S3

from mqmk.daemon.config.sections import Config, Gate
from mqmk.daemon.pipeline.retry import Quarantine, RetryLater, decide
from mqmk.daemon.registry.mlflow_registry import MlflowRegistry
from mqmk.matcher.errors import PoolError
from mqmk.matcher.pool_store import Pointer, PoolStore

TESTS = Path(__file__).resolve().parents[2]
FULL = os.environ.get("FAULT_TEST") == "full"
TASKS = ("sea", "birds", "fruit", "music", "tools", "travel")
pytestmark = pytest.mark.timeout(1800 if FULL else 300)


@pytest.mark.timeout(1800 if FULL else 900)  # longer than the program waits for one step, which it then names
def test_with_five_percent_of_errors_and_lost_answers_the_end_is_the_same() -> None:
    command = [sys.executable, "-m", "programs.faults.run", "20" if FULL else "3"]
    done = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, timeout=1700, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    print(done.stdout)
    assert done.stdout.splitlines()[-1].endswith("nothing lost, duplicated or inconsistent, identical prompts")


def test_faults_come_before_the_call_or_after_it_as_often_as_asked() -> None:
    faults, done = Faults(0.1, seed=1), []
    raised = 0
    for number in range(2000):
        try:
            with_faults(done, faults, "list", disk_error).append(number)
        except OSError:
            raised += 1
    assert raised == faults.failed["list"] + faults.lost["list"]
    assert len(done) == 2000 - faults.failed["list"]
    assert 60 < faults.failed["list"] < 140 and 60 < faults.lost["list"] < 140


def test_one_call_fails_at_most_once_however_many_calls_it_makes_inside() -> None:
    faults, raised = Faults(0.5, seed=3), 0
    for _ in range(200):
        try:
            faults.call("ledger", disk_error, lambda: [faults.call("disk", disk_error, int) for _ in range(20)])
        except OSError:
            raised += 1
    assert raised == faults.failed["ledger"] + faults.lost["ledger"]
    assert faults.calls["disk"] == 0


def test_a_disk_that_failed_may_have_done_it_all_the_same(tmp_path: Path) -> None:
    script = f"""
import os, threading
from pathlib import Path
from support.fault_injection import Faults, FaultyDisk
folder, faults = Path({str(tmp_path)!r}), Faults(0.5, seed=2)
disk = FaultyDisk(folder, faults)
disk.install()
disk.enable_in(threading.get_ident())
for number in range(200):
    try:
        (folder / str(number)).mkdir()
    except OSError as error:
        assert error.errno == 5, error
disk.enable_in(None)
assert len(os.listdir(folder)) == 200 - faults.failed["disk"], (len(os.listdir(folder)), faults.summary)
assert faults.lost["disk"] > 20
"""
    subprocess.run([sys.executable, "-c", script], cwd=TESTS, check=True, timeout=60)


def test_a_disk_that_cannot_be_read_says_nothing_against_a_task(tmp_path: Path) -> None:
    retry = small_config(tmp_path).retry
    store = PoolStore(tmp_path / "pools")
    store.folder.mkdir()
    store.versions.write_text("where a folder was expected")
    with pytest.raises(PoolError) as unreadable:
        store.read(Pointer(1, "0" * 64))
    io_error = PoolError("pools/1-…: Input/output error")
    io_error.__cause__ = disk_error()
    assert isinstance(decide(io_error, retry.attempts, 1, retry), RetryLater)
    assert isinstance(decide(disk_error(), retry.attempts, 1, retry), RetryLater)
    assert isinstance(decide(unreadable.value, 0, 1, retry), Quarantine), "a damaged pool stays damaged"


def make_config(folder: Path, bucket: str) -> Config:
    config = small_config(folder, gate=Gate(accuracy_floor=0.0, fresh_process=False))
    return replace(config, bucket=replace(config.bucket, url=bucket))


def upload(s3: S3, folder: Path, url: str) -> None:
    """Upload as a user would, over a good connection, manifests last."""
    files = [path for path in folder.glob("tasks/*/*") if path.is_file()]
    for path in sorted(files, key=lambda path: path.name == "TASK.json"):
        s3.files.put(str(path), f"{url.removeprefix('s3://')}/{path.relative_to(folder)}")


def turn_until_published(parts: Parts, tasks: tuple[str, ...], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while parts.states != dict.fromkeys(tasks, "PUBLISHED"):
        assert time.monotonic() < deadline, parts.states
        parts.run_pass()


def test_tasks_are_learned_over_a_line_that_is_slow_and_cut(s3: S3, tmp_path: Path, monkeypatch) -> None:
    fault_rates = {"slow": 0.3, "reset": 0.2, "truncate": 0.2} | ({"blackhole": 0.05} if FULL else {})
    tasks, url = TASKS if FULL else TASKS[:2], s3.url()
    for task in tasks:
        drop(tmp_path / "packed", task, per_class=6)
    upload(s3, tmp_path / "packed", url)
    with FlakyProxy(s3.port, fault_rates, seed=3) as proxy:
        for name, value in s3.environment(proxy.endpoint).items():
            monkeypatch.setenv(name, value)
        parts = daemon(make_config(tmp_path, url))
        turn_until_published(parts, tasks, 900 if FULL else 120)
        parts.close()
        print(f"{len(tasks)} tasks over a flaky connection to S3: {dict(proxy.counts)} connections")
        assert all(proxy.counts[outcome] for outcome in fault_rates)
    (tmp_path / "bucket").mkdir()
    assert not problems(tmp_path / "state", tmp_path / "bucket")


@pytest.mark.skipif(not FULL, reason="a server of MLflow takes half a minute to start: `make fault-test`")
def test_records_reach_an_mlflow_server_over_a_bad_line_in_order_and_once(tmp_path: Path) -> None:
    fault_rates = {"slow": 0.2, "reset": 0.1, "truncate": 0.1, "blackhole": 0.02}
    with (
        mlflow_server(tmp_path, f"sqlite:///{tmp_path / 'mlflow.db'}") as url,
        FlakyProxy(int(url.rpartition(":")[2]), fault_rates, seed=4) as proxy,
    ):
        for task in TASKS[:4]:
            drop(tmp_path / "bucket", task, per_class=6)
        parts = daemon(make_config(tmp_path, str(tmp_path / "bucket")), registry=MlflowRegistry(proxy.endpoint))
        turn_until_published(parts, TASKS[:4], 600)
        deadline = time.monotonic() + 900
        while found := problems(tmp_path / "state", tmp_path / "bucket", tmp_path / "mlflow.db"):
            assert time.monotonic() < deadline, found
            parts.run_pass()
        parts.close()
        print(f"4 tasks over a flaky connection to MLflow: {dict(proxy.counts)} connections")
        assert all(proxy.counts[outcome] for outcome in fault_rates)
