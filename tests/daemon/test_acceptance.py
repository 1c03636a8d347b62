"""The whole product by its own command: bucket, ledger, Ray, Serve over HTTP, MLflow; killed, restarted, stopped."""

import json
import shutil
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.daemons.daemon import class_folders, drop
from support.daemons.invariants import problems
from support.daemons.running_daemon import RunningDaemon
from support.exposure import find_accessible_files, find_files_containing, find_open_ports
from support.servers.s3 import S3

from mqmk.daemon.ports import free_port

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def product(tmp_path: Path) -> Iterator[RunningDaemon]:
    settings = {"serve.port": str(free_port()), "metrics.port": str(free_port()), "train.epochs": "2",
                "gate.accuracy_floor": "0.0"}  # fmt: skip
    running = RunningDaemon(tmp_path, settings)
    yield running
    running.end()


def ask(product: RunningDaemon, task: str, label: str, number: int = 20) -> dict[str, Any]:
    image = class_folders(task, 30) / label / f"{number:03}.png"
    url = f"http://127.0.0.1:{product.settings['serve.port']}/predict"
    request = urllib.request.Request(url, data=image.read_bytes(), headers={"Content-Type": "image/png"})
    with urllib.request.urlopen(request, timeout=30) as response:
        found: dict[str, Any] = json.loads(response.read())
        return found


def probe(product: RunningDaemon, port: str, path: str) -> int:
    with urllib.request.urlopen(f"http://127.0.0.1:{product.settings[port]}/{path}", timeout=30) as response:
        return int(response.status)


Upload = Callable[[Path], None]


def test_three_tasks_are_learned_served_killed_rolled_back_forgotten_and_stopped(product: RunningDaemon) -> None:
    bucket = product.state / "bucket"

    def upload(path: Path) -> None:
        place = bucket / "tasks" / path.parent.name
        place.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, place)

    live(product, upload)
    mlflow = product.state / "mlflow" / "mlflow.db"
    assert not problems(product.state, bucket, mlflow)
    product.run("stop", "--keep-serving")
    assert ask(product, "sea", "crab")["label"], "told to keep serving"
    product.run("stop")
    with pytest.raises(OSError, match="refused"):
        ask(product, "sea", "crab")


def test_the_same_on_a_real_s3_server(product: RunningDaemon, s3: S3) -> None:
    url = s3.url()
    product.settings = {**product.settings, "bucket.url": url, "bucket.after_learning": "tag"}
    product.environment = s3.environment()

    def upload(path: Path) -> None:
        s3.files.put(str(path), f"{url.removeprefix('s3://')}/tasks/{path.parent.name}/{path.name}")

    live(product, upload)
    assert s3.files.exists(f"{url.removeprefix('s3://')}/tasks/sea/_LEARNED"), "the shards are tagged"
    assert find_files_containing(s3.environment()["AWS_SECRET_ACCESS_KEY"], product.folder, product.state) == []


def live(product: RunningDaemon, upload: Upload) -> None:
    """From an empty state directory to a daemon that was told to stop, through everything an operator may do."""
    product.start()
    packed = product.folder / "packed"
    for task in ("sea", "birds", "fruit"):
        drop(packed, task, per_class=16)
    files = sorted((packed / "tasks").glob("*/*"), key=lambda path: (path.name == "TASK.json", path.suffix, path.name))
    odd = [path for path in files if path.parent.name == "fruit"][::-1]  # a manifest before its shards
    for path in [*odd, *(path for path in files if path not in odd)]:
        upload(path)
    product.wait_for(lambda: "SERVING" in product.states().values(), 240, "the first task is served")
    answer = ask(product, "sea", "shark")
    assert answer["pool_version"] >= 1 and answer["label"] and answer["queries"] >= 1
    for port in ("serve.port", "metrics.port"):
        assert [probe(product, port, path) for path in ("healthz", "readyz")] == [200, 200], port

    product.kill()
    assert ask(product, "sea", "shark")["label"], "serving outlives the daemon"
    assert product.status()["state"] == "stopped"
    product.start()
    served = {"sea": "SERVING", "birds": "SERVING", "fruit": "SERVING"}
    product.wait_for(lambda: product.states() == served, 240, "all tasks are served")
    assert ask(product, "birds", "owl")["pool_version"] == 3
    versions = json.loads(product.run("versions", "--json").stdout)
    assert [row["version"] for row in versions] == [1, 2, 3]

    assert product.process
    assert find_open_ports(product.state, product.process.pid, known=[int(product.settings["serve.port"])]) == {}
    assert find_accessible_files(product.state) == {}

    second = product.run("start", check=False)
    assert second.returncode == 1 and "already" in second.stderr

    product.run("rollback", "2")
    gone = versions[2]["task"]
    product.wait_for(lambda: product.states()[gone] == "HELD", 30, "the later task is held")
    product.wait_for(lambda: ask(product, "sea", "crab")["pool_version"] == 2, 30, "replicas roll back")
    product.run("promote", gone)
    product.wait_for(lambda: product.states() == served, 90, "the held task is served again")
    product.run("forget", gone)
    product.wait_for(lambda: ask(product, "sea", "crab")["pool_version"] == 5, 60, "a version without it is served")
    shown = json.loads(product.run("show", gone, "--json").stdout)
    assert shown[0]["state"] == "FORGOTTEN"
    product.wait_for(lambda: recorded(product), 60, "MLflow has every version")
    time.sleep(1)
    assert product.terminate() == 0
    assert [line for line in product.log.splitlines() if not line.startswith("{")] == [], "every line is JSON"


def recorded(product: RunningDaemon) -> bool:
    return all(row["recorded"] for row in json.loads(product.run("versions", "--json").stdout))
