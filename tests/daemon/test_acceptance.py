"""The whole product by its own command: bucket, ledger, Ray, Serve over HTTP, MLflow; killed, restarted, stopped."""

import json
import shutil
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from daemon_parts import class_folders, drop
from outside_checker import problems
from running_daemon import RunningDaemon, free_port
from s3 import S3

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def product(tmp_path: Path) -> Iterator[RunningDaemon]:
    settings = {"serve.port": str(free_port()), "metrics.port": str(free_port()), "train.epochs": "2",
                "gate.accuracy_floor": "0.0"}  # fmt: skip
    running = RunningDaemon(tmp_path, settings)
    yield running
    running.end()


def ask(product: RunningDaemon, task: str, label: str, number: int = 20) -> dict[str, Any]:
    picture = class_folders(task, 30) / label / f"{number:03}.png"
    url = f"http://127.0.0.1:{product.settings['serve.port']}/predict"
    request = urllib.request.Request(url, data=picture.read_bytes(), headers={"Content-Type": "image/png"})
    with urllib.request.urlopen(request, timeout=30) as response:
        found: dict[str, Any] = json.loads(response.read())
        return found


def test_three_tasks_are_learned_served_killed_rolled_back_forgotten_and_stopped(product: RunningDaemon) -> None:
    bucket = product.state / "bucket"
    product.start()
    packed = product.folder / "packed"
    for task in ("sea", "birds", "fruit"):
        drop(packed, task, per_class=16)
    fruit = bucket / "tasks" / "fruit"
    fruit.mkdir(parents=True)
    (fruit / "TASK.json").write_bytes((packed / "tasks" / "fruit" / "TASK.json").read_bytes())  # the odd order
    for task in ("sea", "birds"):
        shutil.copytree(packed / "tasks" / task, bucket / "tasks" / task)
    for shard in (packed / "tasks" / "fruit").glob("*.tar"):
        shutil.copy(shard, fruit)
    product.wait_for(lambda: "SERVING" in product.states().values(), 120, "the first task is served")
    answer = ask(product, "sea", "shark")
    assert answer["pool_version"] >= 1 and answer["label"] and answer["queries"] >= 1

    product.kill()
    assert ask(product, "sea", "shark")["label"], "serving outlives the daemon"
    assert product.status()["state"] == "stopped"
    product.start()
    served = {"sea": "SERVING", "birds": "SERVING", "fruit": "SERVING"}
    product.wait_for(lambda: product.states() == served, 150, "all tasks are served")
    assert ask(product, "birds", "owl")["pool_version"] == 3
    versions = json.loads(product.run("versions", "--json").stdout)
    assert [row["version"] for row in versions] == [1, 2, 3]

    second = product.run("start", check=False)
    assert second.returncode == 1 and "already" in second.stderr

    product.run("rollback", "2")
    gone = versions[2]["task"]
    product.wait_for(lambda: product.states()[gone] == "HELD", 20, "the later task is held")
    product.wait_for(lambda: ask(product, "sea", "crab")["pool_version"] == 2, 20, "replicas roll back")
    product.run("promote", gone)
    product.wait_for(lambda: product.states() == served, 60, "the held task is served again")
    product.run("forget", gone)
    product.wait_for(lambda: ask(product, "sea", "crab")["pool_version"] == 5, 30, "a version without it is served")
    shown = json.loads(product.run("show", gone, "--json").stdout)
    assert shown[0]["state"] == "FORGOTTEN"

    mlflow = product.state / "mlflow" / "mlflow.db"
    product.wait_for(
        lambda: all(row["recorded"] for row in json.loads(product.run("versions", "--json").stdout)), 60, "recorded"
    )
    time.sleep(1)
    assert product.terminate() == 0
    assert not problems(product.state, bucket, mlflow)
    product.run("stop")
    with pytest.raises(OSError, match="refused"):
        ask(product, "sea", "crab")


def test_the_same_on_a_real_s3_server(product: RunningDaemon, s3: S3, tmp_path: Path) -> None:
    url = s3.url()
    product.settings = {**product.settings, "bucket.url": url, "bucket.after_learning": "tag"}
    product.environment = s3.environment()
    store, root = s3.files, url.removeprefix("s3://")
    for task in ("sea", "birds"):
        drop(tmp_path / "packed", task, per_class=16)
    product.start()
    names = [*(tmp_path / "packed" / "tasks" / "sea").iterdir(), *(tmp_path / "packed" / "tasks" / "birds").iterdir()]
    for path in sorted(names, key=lambda path: (path.name == "TASK.json", path.name), reverse=False):
        store.put(str(path), f"{root}/tasks/{path.parent.name}/{path.name}")
    served = {"sea": "SERVING", "birds": "SERVING"}
    product.wait_for(lambda: "SERVING" in product.states().values(), 150, "the first task is served")
    product.kill()
    product.start()
    product.wait_for(lambda: product.states() == served, 150, "both tasks are served")
    assert ask(product, "birds", "owl")["pool_version"] == 2
    store.invalidate_cache()
    product.wait_for(lambda: store.exists(f"{root}/tasks/sea/_LEARNED"), 20, "the shards are tagged")
    assert product.terminate() == 0
