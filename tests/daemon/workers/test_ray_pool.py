"""Training on Ray workers: side by side, the same as one after the other, and going on after a worker was killed."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.daemons.daemon import Parts, daemon, drop, small_config

from mqmk.daemon.config.sections import Config, Gate
from mqmk.daemon.config.sections import Ray as RaySettings
from mqmk.daemon.jobs import Learn
from mqmk.daemon.ledger.ledger import State
from mqmk.daemon.workers.ray_pool import RayWorkers
from mqmk.learner.settings import TrainSettings

pytestmark = [pytest.mark.usefixtures("ray_head"), pytest.mark.timeout(600)]


def config_of(folder: Path, epochs: int = 3) -> Config:
    return small_config(
        folder,
        train=TrainSettings(epochs=epochs, batch=16),
        gate=Gate(accuracy_floor=0.0, fresh_process=False),
        ray=RaySettings(trainer_cpus=0.5),
    )


@pytest.fixture
def on_ray(tmp_path: Path) -> Iterator[Parts]:
    parts = daemon(config_of(tmp_path), workers=lambda config: RayWorkers(config, trainers=2))
    yield parts
    parts.close()


def run_until(parts: Parts, states: dict[str, str], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while parts.states != states:
        parts.run_pass()
        assert time.monotonic() < deadline, parts.states
        time.sleep(0.05)


def spans(parts: Parts) -> dict[str, tuple[float, float]]:
    """When each task's training began and ended."""
    found = {}
    for task in parts.ledger.tasks():
        events = {event.event: event.at for event in parts.ledger.events(task)}
        found[task.name] = (events["task.training_started"], events["task.trained"])
    return found


def prompts(parts: Parts) -> dict[str, bytes]:
    current = parts.files.store.current()
    assert current
    return {task.name: task.e_prompt.numpy().tobytes() for task in parts.files.store.read(current).tasks}


def test_two_tasks_overlap_in_time_and_give_the_prompts_of_one_after_the_other(on_ray: Parts, tmp_path: Path) -> None:
    bucket = tmp_path / "bucket"
    drop(bucket, "sea", per_class=10)
    run_until(on_ray, {"sea": "PUBLISHED"})
    drop(bucket, "birds", per_class=30)
    drop(bucket, "fruit", per_class=30)
    run_until(on_ray, {"sea": "PUBLISHED", "birds": "PUBLISHED", "fruit": "PUBLISHED"})
    (birds_from, birds_to), (fruit_from, fruit_to) = (spans(on_ray)[name] for name in ("birds", "fruit"))
    assert birds_from < fruit_to and fruit_from < birds_to, "they overlap"

    alone = daemon(replace(config_of(tmp_path), state=replace(on_ray.config.state, dir=tmp_path / "alone")))
    (bucket / "tasks" / "birds").rename(tmp_path / "birds")
    (bucket / "tasks" / "fruit").rename(tmp_path / "fruit")
    alone.run()
    (tmp_path / "fruit").rename(bucket / "tasks" / "fruit")
    alone.run()
    (tmp_path / "birds").rename(bucket / "tasks" / "birds")
    alone.run()
    assert prompts(alone) == prompts(on_ray)
    alone.close()


def test_a_worker_killed_in_mid_training_is_replaced_and_goes_on_from_its_last_epoch(tmp_path: Path) -> None:
    config = config_of(tmp_path, epochs=8)
    parts = daemon(config, workers=lambda config: RayWorkers(config, trainers=1))
    drop(tmp_path / "bucket", "sea", per_class=60)
    deadline = time.monotonic() + 120
    while not parts.ledger.progress():
        parts.run_pass()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    epoch = next(iter(parts.ledger.progress().values()))["epoch"]
    assert epoch < 8, "it is still training"
    workers = parts.orchestrator.workers
    assert isinstance(workers, RayWorkers)
    import ray

    pid = ray.get(workers._running[0].worker.pid.remote())
    os.kill(pid, signal.SIGKILL)
    run_until(parts, {"sea": "PUBLISHED"})
    (sea,) = parts.ledger.tasks(State.PUBLISHED)
    events = parts.ledger.events(sea)
    assert "task.retry_scheduled" in [event.event for event in events]
    epochs = [event.detail["epoch"] for event in events if event.event == "task.epoch_finished"]
    assert epochs == sorted(set(epochs)) and epochs[-1] == 2 * 8, "no epoch was trained twice"
    parts.close()
    undisturbed = daemon(replace(config, state=replace(config.state, dir=tmp_path / "undisturbed")))
    undisturbed.run()
    assert prompts(undisturbed) == prompts(parts)
    undisturbed.close()


def test_forgetting_a_task_ends_its_training_and_frees_the_trainer(tmp_path: Path) -> None:
    parts = daemon(config_of(tmp_path, epochs=500), workers=lambda config: RayWorkers(config, trainers=1))
    drop(tmp_path / "bucket", "sea", per_class=20)
    deadline = time.monotonic() + 120
    while not parts.ledger.progress():
        parts.run_pass()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    workers = parts.orchestrator.workers
    assert isinstance(workers, RayWorkers)
    import ray

    pid = ray.get(workers._running[0].worker.pid.remote())
    parts.ledger.enqueue_command("forget", "sea")
    parts.run_pass()
    assert parts.states == {"sea": "FORGOTTEN"} and not workers.running() and workers.has_capacity(Learn)
    while Path(f"/proc/{pid}/stat").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]:
        assert time.monotonic() < deadline, "the trainer goes on"
        time.sleep(0.1)
    parts.close()


def test_two_workers_learn_one_task_together_through_ray_train(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    config = replace(config, ray=replace(config.ray, workers_per_task=2))
    parts = daemon(config, workers=lambda config: RayWorkers(config, trainers=1))
    drop(tmp_path / "bucket", "sea", per_class=20)
    run_until(parts, {"sea": "PUBLISHED"}, 200)
    (sea,) = parts.ledger.tasks()
    assert sea.metrics["accuracy_given_task"] > 0.4, "twice chance"
    epochs = [event.detail["epoch"] for event in parts.ledger.events(sea) if event.event == "task.epoch_finished"]
    assert epochs[-1] == 2 * 3, "with the anchor, then with the task"
    parts.close()


def test_on_two_nodes_a_node_killed_during_training_costs_no_epoch_that_was_done(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "programs.nodes.two_nodes", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False,
                          cwd=Path(__file__).parents[2])  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    assert found["state"] == "PUBLISHED" and "task.retry_scheduled" in found["events"]
    assert found["killed_after"] < 5 and found["epochs"] == sorted(set(found["epochs"]))
