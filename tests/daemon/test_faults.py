"""The outside fails in one call of twenty, or the line to it does: the daemon ends in the same published state.

A full disk, a bucket that goes away and an MLflow that is down for a while are in test_troubles.py.
`MQMK_FAULT_TEST=full` (make fault-test) takes longer streams, silent lines and a real MLflow server, too.
"""

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from bad_line import BadLine
from daemon_parts import Parts, daemon, drop, small_config
from faults import Faults, disk_error, faulty
from mlflow_servers import mlflow_server
from outside_checker import problems
from s3 import S3

from mqmk.daemon.config import Config, Gate
from mqmk.daemon.registry import MlflowRegistry
from mqmk.daemon.verdicts import GiveUp, TryAgain, judge
from mqmk.matcher.errors import PoolError
from mqmk.matcher.pool_files import read_pool

TESTS = Path(__file__).parent.parent
FULL = os.environ.get("MQMK_FAULT_TEST") == "full"
TASKS = ("sea", "birds", "fruit", "music", "tools", "travel")
pytestmark = pytest.mark.timeout(1800 if FULL else 300)


def test_with_five_percent_of_errors_and_lost_answers_the_end_is_the_same() -> None:
    command = [sys.executable, str(TESTS / "fault_stream.py"), "20" if FULL else "3"]
    done = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, timeout=1700, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    print(done.stdout)
    assert done.stdout.splitlines()[-1].endswith("nothing lost, doubled or out of step, the same prompts")


def test_faults_come_before_the_call_or_after_it_as_often_as_asked() -> None:
    faults, done = Faults(0.1, seed=1), []
    raised = 0
    for number in range(2000):
        try:
            faulty(done, faults, "list", disk_error).append(number)
        except OSError:
            raised += 1
    assert raised == faults.failed["list"] + faults.lost["list"]
    assert len(done) == 2000 - faults.failed["list"]
    assert 60 < faults.failed["list"] < 140 and 60 < faults.lost["list"] < 140


def test_a_disk_that_failed_may_have_done_it_all_the_same(tmp_path: Path) -> None:
    script = f"""
import os, threading
from pathlib import Path
from faults import Faults, FaultyDisk
folder, faults = Path({str(tmp_path)!r}), Faults(0.5, seed=2)
disk = FaultyDisk(folder, faults)
disk.install()
disk.hit(threading.get_ident())
for number in range(200):
    try:
        (folder / str(number)).mkdir()
    except OSError as error:
        assert error.errno == 5, error
disk.hit(None)
assert len(os.listdir(folder)) == 200 - faults.failed["disk"], (len(os.listdir(folder)), faults.table)
assert faults.lost["disk"] > 20
"""
    subprocess.run([sys.executable, "-c", script], cwd=TESTS, check=True, timeout=60)


def test_a_disk_that_cannot_be_read_says_nothing_against_a_task(tmp_path: Path) -> None:
    retry = small_config(tmp_path).retry
    folder = tmp_path / "a-file"
    folder.write_text("where a folder was expected")
    with pytest.raises(PoolError) as unreadable:
        read_pool(folder)
    io_error = PoolError("pools/1-…: Input/output error")
    io_error.__cause__ = disk_error()
    assert isinstance(judge(io_error, retry.attempts, 1, retry), TryAgain)
    assert isinstance(judge(disk_error(), retry.attempts, 1, retry), TryAgain)
    assert isinstance(judge(unreadable.value, 0, 1, retry), GiveUp), "a pool that is damaged stays so"


def config_of(folder: Path, bucket: str) -> Config:
    config = small_config(folder, gate=Gate(accuracy_floor=0.0, fresh_process=False))
    return replace(config, bucket=replace(config.bucket, url=bucket))


def upload(s3: S3, folder: Path, url: str) -> None:
    """What a user would do, over a good line; the manifests last."""
    files = [path for path in folder.glob("tasks/*/*") if path.is_file()]
    for path in sorted(files, key=lambda path: path.name == "TASK.json"):
        s3.files.put(str(path), f"{url.removeprefix('s3://')}/{path.relative_to(folder)}")


def turn_until_published(parts: Parts, tasks: tuple[str, ...], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while parts.states != dict.fromkeys(tasks, "PUBLISHED"):
        assert time.monotonic() < deadline, parts.states
        parts.orchestrator.run_pass()


def test_tasks_are_learned_over_a_line_that_is_slow_and_cut(s3: S3, tmp_path: Path, monkeypatch) -> None:
    fates = {"slow": 0.3, "reset": 0.2, "truncate": 0.2} | ({"blackhole": 0.05} if FULL else {})
    tasks, url = TASKS if FULL else TASKS[:2], s3.url()
    for task in tasks:
        drop(tmp_path / "packed", task, per_class=6)
    upload(s3, tmp_path / "packed", url)
    with BadLine(s3.port, fates, seed=3) as line:
        for name, value in s3.environment(line.endpoint).items():
            monkeypatch.setenv(name, value)
        parts = daemon(config_of(tmp_path, url))
        turn_until_published(parts, tasks, 900 if FULL else 120)
        parts.close()
        print(f"{len(tasks)} tasks over a bad line to S3: {dict(line.met)} connections")
        assert all(line.met[fate] for fate in fates)
    (tmp_path / "bucket").mkdir()
    assert not problems(tmp_path / "state", tmp_path / "bucket")


@pytest.mark.skipif(not FULL, reason="a server of MLflow takes half a minute to start: `make fault-test`")
def test_records_reach_an_mlflow_server_over_a_bad_line_in_order_and_once(tmp_path: Path) -> None:
    fates = {"slow": 0.2, "reset": 0.1, "truncate": 0.1, "blackhole": 0.02}
    with (
        mlflow_server(tmp_path, f"sqlite:///{tmp_path / 'mlflow.db'}") as url,
        BadLine(int(url.rpartition(":")[2]), fates, seed=4) as line,
    ):
        for task in TASKS[:4]:
            drop(tmp_path / "bucket", task, per_class=6)
        parts = daemon(config_of(tmp_path, str(tmp_path / "bucket")), registry=MlflowRegistry(line.endpoint))
        turn_until_published(parts, TASKS[:4], 600)
        deadline = time.monotonic() + 900
        while found := problems(tmp_path / "state", tmp_path / "bucket", tmp_path / "mlflow.db"):
            assert time.monotonic() < deadline, found
            parts.orchestrator.run_pass()
        parts.close()
        print(f"4 tasks over a bad line to MLflow: {dict(line.met)} connections")
        assert all(line.met[fate] for fate in fates)
