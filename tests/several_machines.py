"""The real daemon on four machines that share no folder: `python tests/several_machines.py [--unplug]`.

One machine has the daemon, Ray's head and a real S3 server; the others have replicas and trainers and see neither its
files nor its processes (machines.py). Tasks come from S3 and versions go out over S3 while clients ask. Then a machine
is lost with its replica, and a new one takes its place. Prints one JSON line of what happened.
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

import machines
import s3
from chaos_clients import Clients, Sample, pictures
from daemon_parts import drop
from machines import HERE, Machine
from running_daemon import RunningDaemon

from mqmk.deploy.reports import ReplicaReport, live_reports

GCS: Final = 6379
PORT: Final = 8000
RAY: Final = {
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": "several-machines-of-a-test" * 2,
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_worker_prestart": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
}
PATIENCE: Final = 240.0
UNNOTICED: Final = 20.0
"""Seconds until Ray calls a machine dead that does not answer."""


def ray_start(*words: str) -> list[str]:
    small = ["--block", "--disable-usage-stats", "--include-log-monitor=false"]
    small += ["--object-store-memory=80000000", "--min-worker-port=0", "--max-worker-port=0"]
    return [sys.executable, "-m", "ray.scripts.scripts", "start", *small, *words]


@dataclass
class Proof:
    """One run."""

    folder: Path
    lost: str
    """`kill` or `unplug`."""
    begun: float = field(default_factory=time.monotonic)
    found: dict[str, Any] = field(default_factory=dict)
    machines: dict[str, Machine] = field(default_factory=dict)

    def run(self, stack: ExitStack) -> None:
        store = stack.enter_context(s3.server(self._made("s3"), HERE))
        self.bucket = store.url()
        self._send(store, "sea")
        head = self._head()
        stack.callback(lambda: head.terminate())
        for number in (2, 3):
            self._join(number, stack)
        self.daemon = self._daemon(store)
        stack.callback(self.daemon.end)
        self.daemon.start()
        self._until(lambda: self._everybody_holds(1), "version 1 on two machines")
        self._note("first version")
        with Clients(f"http://{HERE}:{PORT}", pictures(["crab", "whale"]), count=4) as self.clients:
            time.sleep(2)
            self._published_under_load(store)
            self._lose_a_machine(stack)
            self._a_new_machine(stack)
            time.sleep(2)
        self._account()

    # What happens

    def _published_under_load(self, store: s3.S3) -> None:
        self._send(store, "birds")
        self._until(lambda: self._everybody_holds(2), "version 2 on two machines")
        time.sleep(1)
        self._note("second version")
        self.found["failed while published"] = len(self._failed())
        self.found["nodes"] = sorted(self._nodes())
        self.found["every machine receives"] = [self._asked(node) for node in self._nodes()]

    def _lose_a_machine(self, stack: ExitStack) -> None:
        victim = self.machines[min(self._nodes())]
        self.lost_at = time.time()
        if self.lost == "unplug":
            victim.unplug()
        else:
            victim.kill()
        self._until(lambda: victim.address not in self._nodes(), "its replica is known to be gone")
        self._note("known to be lost")
        time.sleep(5)

    def _a_new_machine(self, stack: ExitStack) -> None:
        self.back_at = time.time()
        self._join(4, stack)  # the new replica goes there unless the lost machine also had the trainer
        self._until(lambda: self._everybody_holds(2), "a new replica holds CURRENT")
        self._note("second replica is back")
        self.daemon.run("rollback", "1")
        self._until(lambda: self._everybody_holds(1), "both replicas rolled back")
        self._note("rolled back")

    def _account(self) -> None:
        failed = self._failed()
        self.found |= {
            "requests": len(self.clients.samples),
            "failed": len(failed),
            "failures": sorted({str(one.error)[:120] for one in failed}),
            "in flight when it was lost": sum(one.began <= self.lost_at <= one.ended for one in self.clients.samples),
            "failed in flight": sum(one.began <= self.lost_at <= one.ended for one in failed),
            "failed later": [round(one.began - self.lost_at, 2) for one in failed if one.began > self.lost_at],
            "longest seconds after the loss": round(max(self._after_the_loss(), default=0.0), 2),
            "answered after the loss": sum(one.began > self.lost_at and not one.error for one in self.clients.samples),
            "hidden": not any(self._sees_the_state(each) for each in self.machines.values()),
        }

    def problems(self) -> list[str]:
        """Sentences about what is wrong. Nobody is told of an unplugged machine: what is sent to it until that is
        noticed waits for its time-out."""
        unnoticed = max(self.found["failed later"], default=0.0)
        promises = {
            "a request failed while a version was published": not self.found["failed while published"],
            "replicas were not on two machines": len(self.found["nodes"]) == 2,
            "a machine did not take requests": set(self.found["every machine receives"]) == {200},
            "a machine could read the daemon's files": self.found["hidden"],
            "requests failed long after the loss": unnoticed <= (UNNOTICED if self.lost == "unplug" else 1.0),
            "hardly anything was answered after the loss": self.found["answered after the loss"] > 100,
        }
        return [sentence for sentence, kept in promises.items() if not kept]

    # What is looked at

    def _reports(self) -> list[ReplicaReport]:
        return [each for each in live_reports(self.daemon.state / "replicas") if each.ready]

    def _nodes(self) -> set[str]:
        return {each.node for each in self._reports()}

    def _everybody_holds(self, version: int) -> bool:
        reports = self._reports()
        return len(reports) == 2 and {each.pool_version for each in reports} == {version}

    def _failed(self) -> list[Sample]:
        return [sample for sample in self.clients.samples if sample.error]

    def _after_the_loss(self) -> list[float]:
        then = (one for one in self.clients.samples if one.ended > self.lost_at and one.began < self.back_at)
        return [one.ended - one.began for one in then]

    def _asked(self, node: str) -> int:
        import urllib.request

        picture = next(iter(pictures(["crab"]).values()))
        with urllib.request.urlopen(f"http://{node}:{PORT}/predict", picture, timeout=30) as answer:
            return int(answer.status)

    def _sees_the_state(self, machine: Machine) -> bool:
        """Whether its processes could read the daemon's files."""
        return Path(f"/proc/{machine.process.pid}/root{self.daemon.state}").exists()

    # What is started

    def _made(self, name: str) -> Path:
        (self.folder / name).mkdir()
        return self.folder / name

    def _send(self, store: s3.S3, task: str) -> None:
        """A packed task, TASK.json last."""
        drop(self.folder / "packed", task, per_class=12)
        source = self.folder / "packed" / "tasks" / task
        for file in sorted(source.iterdir(), key=lambda each: each.name == "TASK.json"):
            store.files.put_file(str(file), f"{self.bucket.removeprefix('s3://')}/tasks/{task}/{file.name}")

    def _head(self) -> Any:
        import subprocess

        words = ["--head", f"--node-ip-address={HERE}", f"--port={GCS}", "--num-cpus=0"]
        with (self.folder / "head.log").open("wb") as log:
            command = ray_start(*words, f"--temp-dir={self.folder / 'r'}", "--no-monitor", "--include-dashboard=false")
            return subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **RAY})

    def _join(self, number: int, stack: ExitStack) -> None:
        machine = Machine(number, [], self.folder / f"machine{number}.log", RAY)
        machine.command = ray_start(f"--address={HERE}:{GCS}", f"--node-ip-address={machine.address}", "--num-cpus=2")
        machine.start()
        stack.callback(machine.kill)
        self.machines[machine.address] = machine

    def _daemon(self, store: s3.S3) -> RunningDaemon:
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

    def _until(self, what: Callable[[], bool], why: str) -> None:
        self.daemon.wait_for(what, PATIENCE, why)

    def _note(self, what: str) -> None:
        self.found.setdefault("seconds", {})[what] = round(time.monotonic() - self.begun, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--unplug", action="store_true", help="lose the machine without a word")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside:
        with ExitStack() as stack:
            proof = Proof(Path(given.inside), "unplug" if given.unplug else "kill")
            proof.run(stack)
            print(json.dumps(proof.found | {"problems": proof.problems()}), flush=True)
            sys.exit(int(bool(proof.problems())))
    if reason := machines.refusal():
        sys.exit(reason)
    if Path(__file__).is_relative_to("/tmp"):
        sys.exit("every machine has a /tmp of its own, so they would not see this checkout: put it elsewhere")
    folder = Path(tempfile.mkdtemp(prefix="mqm-"))  # short: Ray's sockets are in it
    words = [__file__, "--inside", str(folder), *(["--unplug"] if given.unplug else [])]
    code = machines.in_a_network(words).wait()
    if code == 0:
        shutil.rmtree(folder)
    else:
        print(f"logs are in {folder}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
