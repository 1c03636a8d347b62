"""A state directory with history, a fake of the replicas' exporter, and real Prometheus servers."""

import json
import os
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from mqmk.daemon.config.sections import Config, Metrics, State
from mqmk.daemon.ledger.ledger import Ledger, TaskRow
from mqmk.daemon.ledger.ledger import State as TaskState
from mqmk.deploy.serving.telemetry.declared import RAY_OWN_METRICS, RAY_PREFIX, REPLICA_METRICS, Metric
from mqmk.deploy.serving.telemetry.heartbeat import ReplicaStatus

LABELS = {
    "route": ("predict", "infer"),
    "code": ("200", "503"),
    "matcher": ("cascade",),
    "stage": ("decode", "queue", "match", "total"),
    "task": ("sea", "birds"),
    "result": ("matched", "mismatched", "same", "different"),
    "verdict": ("right", "id_unknown"),
    "value": ("score", "margin"),
}
MATCHERS = ("cascade", "mqmk")
VARIABLES = {"$__rate_interval": "1m", "$task": ".*"}  # of the dashboards
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Clock:
    """A manual clock."""

    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def move(ledger: Ledger, task: TaskRow, to: TaskState, event: str, detail: Any = None, **changes: Any) -> TaskRow:
    """Move a task from its current state."""
    now = ledger.task(task.id)
    return ledger.transition(now.id, now.state, to, now.attempt, event, detail, **changes)


def learn(ledger: Ledger, clock: Clock, name: str, version: int, known: list[str]) -> TaskRow:
    """One task from the bucket to every replica, in 100 seconds."""
    task = ledger.add_task(name, name, f"print of {name}", TaskState.DISCOVERED)
    for seconds, state, event in ((5, TaskState.VALIDATED, "validated"), (10, TaskState.TRAINING, "training"),
                                  (60, TaskState.TRAINED, "trained")):  # fmt: skip
        clock.now += seconds
        task = move(ledger, task, state, f"task.{event}")
        if state is TaskState.TRAINING:
            ledger.append_event("task.epoch_finished", task, {"epoch": 1})
    clock.now += 20
    parent = version - 1 or None
    row = ledger.plan_version(version, f"{version:064d}", parent, "learn", [task], evaluation([*known, name], version))
    ledger.finish_version(row, {})
    clock.now += 5
    return move(ledger, task, TaskState.SERVING, "task.rolled_out", {"seconds": 100.0, "version": version})


def evaluation(tasks: list[str], version: int) -> dict[str, Any]:
    """An evaluation in which each version costs every older task two points of accuracy."""
    rates = {name: {"matching_rate": 0.9, "accuracy": 0.82 - 0.02 * (version - place), "accuracy_given_task": 0.95}
             for place, name in enumerate(tasks, start=1)}  # fmt: skip
    return {
        "held_out": 100 * len(tasks), "images": 100 * len(tasks), "matcher": "cascade", "matching_rate": 0.9,
        "calibration_error": 0.034,
        "accuracy": 0.8, "tasks": rates,
        "matchers": {each: {"rate": 0.9, "agreement": 0.97, "cost": 3.0, "accuracy": 0.8} for each in MATCHERS},
        "confusion": {name: {other: 90 if other == name else 5 for other in tasks} for name in tasks},
    }  # fmt: skip


def write_pool_card(config: Config, version: int, tasks: list[str]) -> None:
    """The files of a version as far as metrics read them."""
    folder = config.pools_folder / "versions"
    folder.mkdir(parents=True, exist_ok=True)
    matching = {
        "calibration": {"cascade": {"error": 0.03, "rate_error": 0.02}},
        "unknown": {"cascade": {"threshold": 0.4, "false_alarm": 0.01}},
    }
    rows = [{"name": name, "classes": ["a", "b"], "bytes": 1000} for name in tasks]
    card = {"pages": [], "tasks": rows, "matching": matching}
    (folder / f"{version}-{version:012d}.json").write_text(json.dumps(card))
    pointer = {"version": version, "digest": f"{version:012d}{version:052d}"}
    (config.pools_folder / "CURRENT").write_text(json.dumps(pointer))


def report(config: Config, replica: str, version: int, **values: Any) -> None:
    """A replica's status file, fresh until 2100."""
    folder = config.state.dir / "replicas"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{replica}.json"
    path.write_text(json.dumps(asdict(ReplicaStatus(replica, 1, True, version, **values))))
    os.utime(path, (4102444800, 4102444800))


def lived_in(folder: Path) -> tuple[Config, Ledger, Clock]:
    """Three tasks served, one being learned, one quarantined, one held, one in conflict."""
    config = replace(Config(), state=State(folder), metrics=Metrics(port=0))
    clock = Clock(time.time() - 3600)
    ledger = Ledger(config.ledger_file, clock)
    known: list[str] = []
    for version, name in enumerate(("sea", "birds", "fruit"), start=1):
        learn(ledger, clock, name, version, known)
        known.append(name)
    bad = ledger.add_task("bad", "bad", "x", TaskState.DISCOVERED)
    move(ledger, bad, TaskState.QUARANTINED, "task.quarantined", reason="cut off", code="truncated")
    weak = ledger.add_task("weak", "weak", "y", TaskState.DISCOVERED)
    for state in (TaskState.VALIDATED, TaskState.TRAINING, TaskState.TRAINED, TaskState.HELD):
        weak = move(
            ledger, weak, state, f"task.{state.lower()}", **({"code": "gate"} if state is TaskState.HELD else {})
        )
    ledger.add_task("sea", "sea-too", "z", TaskState.CONFLICT, reason="other content", code="conflict")
    now = ledger.add_task("tools", "tools", "t", TaskState.DISCOVERED)
    for state in (TaskState.VALIDATED, TaskState.TRAINING):
        now = move(ledger, now, state, f"task.{state.lower()}")
    ledger.set_progress(now, {"task": "tools", "epoch": 2, "epochs": 8, "loss": 1.5, "images_per_second": 300.0,
                              "seconds_left": 40.0})  # fmt: skip
    for part in ("bucket", "ray", "mlflow"):
        ledger.set_health(part, True)
    ledger.resolve_command(ledger.enqueue_command("rollback", "7"), "REFUSED", "there is no version 7")
    write_pool_card(config, 3, known)
    report(config, "r1", 3, swaps=2)
    return config, ledger, clock


class ReplicaTwin(Collector):
    """Exports every declared metric of replicas and Ray; counters grow with time."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def collect(self) -> Iterator[Family]:
        """What Ray's agent would export."""
        age = time.monotonic() - self._began + 1
        for each in REPLICA_METRICS:
            yield _family(each, age)
        for name in RAY_OWN_METRICS:
            node = "ip" if name.startswith(("ray_node_", "ray_component_")) else "NodeAddress"
            family = GaugeMetricFamily(name, name, labels=(node, "Component", "GpuIndex"))
            family.add_metric(("127.0.0.1", "raylet", "0"), 10.0)
            yield family


def _family(metric: Metric, age: float) -> Family:
    name = RAY_PREFIX + metric.name
    sets: list[tuple[str, ...]] = [()]
    for label in metric.labels:
        sets = [(*known, value) for known in sets for value in LABELS[label]]
    if metric.kind == "histogram":
        spread = HistogramMetricFamily(name, metric.description, labels=metric.labels)
        for labels in sets:
            grown = [(str(bound), age * place) for place, bound in enumerate([*metric.buckets, "+Inf"], start=1)]
            spread.add_metric(labels, grown, age * 3)
        return spread
    made: Any = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    family = made(name, metric.description, labels=metric.labels)
    for labels in sets:
        family.add_metric(labels, age * 10 if metric.kind == "counter" else 0.1)
    return family


@contextmanager
def replica_twin() -> Iterator[str]:
    """The address of the fake exporter."""
    registry = CollectorRegistry()
    registry.register(ReplicaTwin())
    server, thread = start_http_server(0, "127.0.0.1", registry)
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def needed(program: str) -> str:
    """The path of a program; skips the test without it."""
    found = shutil.which(program)
    if not found:
        pytest.skip(f"{program} is not installed: apt-get install prometheus prometheus-alertmanager")
    return found


@contextmanager
def running(command: list[str], ready: str) -> Iterator[None]:
    """A server process, from its first answer to its end."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for(lambda: get(ready) is not None, 20, f"{command[0]} to answer at {ready}")
        yield
    finally:
        process.kill()
        process.wait()


def get(url: str) -> bytes | None:
    """The response; None if nothing answers yet."""
    try:
        with OPENER.open(url, timeout=10) as answer:
            return bytes(answer.read())
    except OSError:
        return None


def wait_for(condition: Any, seconds: float, what: str) -> None:
    """Wait until something is true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds:g} s for {what}"
        time.sleep(0.1)


def filled(expr: str) -> str:
    """The query with its variables filled in, as Grafana would."""
    for name, value in VARIABLES.items():
        expr = expr.replace(name, value)
    return expr


def ask(server: str, expr: str, at: float | None = None) -> list[dict[str, Any]]:
    """An instant query, now or at a given time."""
    asked = {"query": expr} | ({} if at is None else {"time": str(at)})
    url = f"{server}/api/v1/query?{urllib.parse.urlencode(asked)}"
    try:
        with OPENER.open(url, timeout=10) as answer:
            found: list[dict[str, Any]] = json.loads(answer.read())["data"]["result"]
            return found
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{expr}: {error.read().decode()}") from error
