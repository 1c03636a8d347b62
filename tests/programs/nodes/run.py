"""The real daemon on four machines without a shared folder: `python -m programs.nodes.run [--unplug]`.

One machine runs the daemon, the Ray head and an S3 server; the others run replicas and trainers and see neither its
files nor its processes (support/netns.py). Tasks and versions travel over S3 while clients send requests. Then a
machine is lost with its replica and a new one joins. Prints the results as one JSON line.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from programs.chaos.clients import Clients, RequestRecord, sample_images
from support.daemons.daemon import drop
from support.daemons.running_daemon import RunningDaemon
from support.netns import HERE, Machine, run_in_network, unavailable_reason
from support.servers import s3

from mqmk.deploy.serving.telemetry.heartbeat import ReplicaStatus, live_replicas

GCS: Final = 6379
PORT: Final = 8000
RAY: Final = {
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": "several-machines-of-a-test" * 2,
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_worker_prestart": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
}
TIMEOUT_SECONDS: Final = 240.0
DETECTION_SECONDS: Final = 20.0
"""Seconds until Ray declares an unresponsive machine dead."""


def ray_start(*arguments: str) -> list[str]:
    small = ["--block", "--disable-usage-stats", "--include-log-monitor=false"]
    small += ["--object-store-memory=80000000", "--min-worker-port=0", "--max-worker-port=0"]
    return [sys.executable, "-m", "ray.scripts.scripts", "start", *small, *arguments]


@dataclass
class NodesTest:
    """One run of the scenario."""

    folder: Path
    lost: str
    """`kill` or `unplug`."""
    started: float = field(default_factory=time.monotonic)
    results: dict[str, Any] = field(default_factory=dict)
    machines: dict[str, Machine] = field(default_factory=dict)

    def run(self, stack: ExitStack) -> None:
        store = stack.enter_context(s3.server(self._make_folder("s3"), HERE))
        self.bucket = store.url()
        self._upload_task(store, "sea")
        head = self._start_head()
        stack.callback(lambda: head.terminate())
        for number in (2, 3):
            self._start_machine(number, stack)
        self.daemon = self._make_daemon(store)
        stack.callback(self.daemon.end)
        self.daemon.start()
        self._wait_until(lambda: self._all_replicas_serve(1), "version 1 on two machines")
        self._record_seconds("first version")
        with Clients(f"http://{HERE}:{PORT}", sample_images(["crab", "whale"]), count=4) as self.clients:
            time.sleep(2)
            self._publish_under_load(store)
            self._lose_a_machine(stack)
            self._add_a_machine(stack)
            time.sleep(2)
        self._summarize()

    # The scenario

    def _publish_under_load(self, store: s3.S3) -> None:
        self._upload_task(store, "birds")
        self._wait_until(lambda: self._all_replicas_serve(2), "version 2 on two machines")
        time.sleep(1)
        self._record_seconds("second version")
        self.results["failed while published"] = len(self._failed_requests())
        self.results["nodes"] = sorted(self._nodes())
        self.results["every machine receives"] = [self._predict_status(node) for node in self._nodes()]

    def _lose_a_machine(self, stack: ExitStack) -> None:
        victim = self.machines[min(self._nodes())]
        self.lost_at = time.time()
        if self.lost == "unplug":
            victim.unplug()
        else:
            victim.kill()
        self._wait_until(lambda: victim.address not in self._nodes(), "the loss of its replica is detected")
        self._record_seconds("loss detected")
        time.sleep(5)

    def _add_a_machine(self, stack: ExitStack) -> None:
        self.back_at = time.time()
        self._start_machine(4, stack)  # gets the new replica, unless the lost machine also ran the trainer
        self._wait_until(lambda: self._all_replicas_serve(2), "a new replica serves CURRENT")
        self._record_seconds("second replica is back")
        self.daemon.run("rollback", "1")
        self._wait_until(lambda: self._all_replicas_serve(1), "both replicas rolled back")
        self._record_seconds("rolled back")

    def _summarize(self) -> None:
        failed = self._failed_requests()
        self.results |= {
            "requests": len(self.clients.records),
            "failed": len(failed),
            "failures": sorted({str(record.error)[:120] for record in failed}),
            "in flight when it was lost": sum(
                record.began <= self.lost_at <= record.ended for record in self.clients.records
            ),
            "failed in flight": sum(record.began <= self.lost_at <= record.ended for record in failed),
            "failed later": [round(record.began - self.lost_at, 2) for record in failed if record.began > self.lost_at],
            "longest seconds after the loss": round(max(self._seconds_after_loss(), default=0.0), 2),
            "answered after the loss": sum(
                record.began > self.lost_at and not record.error for record in self.clients.records
            ),
            "hidden": not any(self._can_read_state(each) for each in self.machines.values()),
        }

    def problems(self) -> list[str]:
        """Describe violated expectations. The loss of an unplugged machine is detected late: until then, requests
        routed to it time out."""
        last_failure = max(self.results["failed later"], default=0.0)
        expectations = {
            "a request failed while a version was published": not self.results["failed while published"],
            "replicas were not on two machines": len(self.results["nodes"]) == 2,
            "a machine did not take requests": set(self.results["every machine receives"]) == {200},
            "a machine could read the daemon's files": self.results["hidden"],
            "requests failed long after the loss": last_failure
            <= (DETECTION_SECONDS if self.lost == "unplug" else 1.0),
            "hardly anything was answered after the loss": self.results["answered after the loss"] > 100,
        }
        return [sentence for sentence, is_kept in expectations.items() if not is_kept]

    # Observations

    def _reports(self) -> list[ReplicaStatus]:
        return [each for each in live_replicas(self.daemon.state / "replicas") if each.ready]

    def _nodes(self) -> set[str]:
        return {each.node for each in self._reports()}

    def _all_replicas_serve(self, version: int) -> bool:
        reports = self._reports()
        return len(reports) == 2 and {each.pool_version for each in reports} == {version}

    def _failed_requests(self) -> list[RequestRecord]:
        return [record for record in self.clients.records if record.error]

    def _seconds_after_loss(self) -> list[float]:
        then = (
            record for record in self.clients.records if record.ended > self.lost_at and record.began < self.back_at
        )
        return [record.ended - record.began for record in then]

    def _predict_status(self, node: str) -> int:
        import urllib.request

        image = next(iter(sample_images(["crab"]).values()))
        with urllib.request.urlopen(f"http://{node}:{PORT}/predict", image, timeout=30) as answer:
            return int(answer.status)

    def _can_read_state(self, machine: Machine) -> bool:
        """Whether its processes can read the daemon's files."""
        return Path(f"/proc/{machine.process.pid}/root{self.daemon.state}").exists()

    # Processes

    def _make_folder(self, name: str) -> Path:
        (self.folder / name).mkdir()
        return self.folder / name

    def _upload_task(self, store: s3.S3, task: str) -> None:
        """Upload a packed task, TASK.json last."""
        drop(self.folder / "packed", task, per_class=12)
        source = self.folder / "packed" / "tasks" / task
        for file in sorted(source.iterdir(), key=lambda each: each.name == "TASK.json"):
            store.files.put_file(str(file), f"{self.bucket.removeprefix('s3://')}/tasks/{task}/{file.name}")

    def _start_head(self) -> Any:
        import subprocess

        arguments = ["--head", f"--node-ip-address={HERE}", f"--port={GCS}", "--num-cpus=0"]
        with (self.folder / "head.log").open("wb") as log:
            command = ray_start(
                *arguments, f"--temp-dir={self.folder / 'r'}", "--no-monitor", "--include-dashboard=false"
            )
            return subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **RAY})

    def _start_machine(self, number: int, stack: ExitStack) -> None:
        machine = Machine(number, [], self.folder / f"machine{number}.log", RAY)
        machine.command = ray_start(f"--address={HERE}:{GCS}", f"--node-ip-address={machine.address}", "--num-cpus=2")
        machine.start()
        stack.callback(machine.kill)
        self.machines[machine.address] = machine

    def _make_daemon(self, store: s3.S3) -> RunningDaemon:
        settings = {
            "bucket.url": self.bucket,
            "pools.url": self.bucket,
            "ray.address": f"{HERE}:{GCS}",
            "serve.host": "0.0.0.0",
            "serve.open": "true",
            "serve.port": str(PORT),
            "serve.proxies": "every",
            "serve.replicas": "2",
            "train.epochs": "2",
            "gate.accuracy_floor": "0",
            "gate.fresh_process": "false",
            "mlflow.enabled": "false",
        }
        return RunningDaemon(self.folder, settings, {**store.environment(), **RAY})

    def _wait_until(self, what: Callable[[], bool], why: str) -> None:
        self.daemon.wait_for(what, TIMEOUT_SECONDS, why)

    def _record_seconds(self, what: str) -> None:
        self.results.setdefault("seconds", {})[what] = round(time.monotonic() - self.started, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--unplug", action="store_true", help="cut the network of the lost machine instead of killing it"
    )
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        with ExitStack() as stack:
            test = NodesTest(Path(options.inside), "unplug" if options.unplug else "kill")
            test.run(stack)
            print(json.dumps(test.results | {"problems": test.problems()}), flush=True)
            sys.exit(int(bool(test.problems())))
    if reason := unavailable_reason():
        sys.exit(reason)
    if Path(__file__).is_relative_to("/tmp"):
        sys.exit("every machine has its own /tmp and would not see this checkout: move it elsewhere")
    folder = Path(tempfile.mkdtemp(prefix="mqm-"))  # short: Ray's sockets are in it
    arguments = ["-m", "programs.nodes.run", "--inside", str(folder), *(["--unplug"] if options.unplug else [])]
    code = run_in_network(arguments).wait()
    if code == 0:
        shutil.rmtree(folder)
    else:
        print(f"logs are in {folder}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
