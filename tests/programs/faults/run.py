"""Process tasks and commands while dependencies fail: `python -m programs.faults.run 8` (tasks, default 20).

Bucket, MLflow, ledger and disk each fail in 5 % of the calls; in half of these the call takes effect and only the
response is lost. The same stream runs once without faults and once with them, through the daemon's own loop. Both must
reach the same published state with byte-identical prompts, and the invariants must hold.
"""

import logging
import shutil
import sqlite3
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import torch
from PIL import Image
from support.daemons.daemon import Parts, daemon, small_config
from support.daemons.invariants import pools, problems
from support.fault_injection import Faults, FaultyDisk, FaultyFileSystem, ledger_error, mlflow_error, with_faults

from mqmk.daemon.app import outbound_for
from mqmk.daemon.config.sections import Config, Evaluate, Gate
from mqmk.daemon.ledger.ledger import Ledger
from mqmk.daemon.loop import DaemonLoop
from mqmk.daemon.metrics.server import serve_metrics
from mqmk.daemon.pipeline.outbound import OutboundThread
from mqmk.daemon.registry.mlflow_registry import MlflowRegistry
from mqmk.learner.data.pack import pack
from mqmk.learner.settings import TrainSettings

RATE = 0.05


def make_config(folder: Path) -> Config:
    """Small and fast, with a remote bucket and shards that are moved after learning."""
    config = small_config(
        folder,
        train=TrainSettings(epochs=2, batch=16, e_length=4, g_length=2),
        # by chance, some tasks have no held-out images
        gate=Gate(accuracy_floor=0.0, fresh_process=False, without_held_out="promote"),
        evaluate=Evaluate(matchers=("mqmk", "mqmk-ei")),
    )
    bucket = replace(config.bucket, url=f"faulty://{folder / 'bucket'}", after_learning="move", poll_seconds=0.05,
                     max_poll_seconds=0.2, reconcile_seconds=5.0)  # fmt: skip
    return replace(config, bucket=bucket, metrics=replace(config.metrics, port=0))


class NoRuntime:
    """No Ray: jobs run in the daemon's own process and nothing is served."""

    metrics_target = None

    def reconcile(self) -> None:
        """Nothing to do."""


@dataclass
class Stream:
    """One daemon, and an operator who reads and enqueues commands through a second ledger connection."""

    folder: Path
    faults: Faults
    disk: FaultyDisk
    seconds: float = 200.0

    def __post_init__(self) -> None:
        (self.folder / "bucket" / "tasks").mkdir(parents=True)
        self.config = make_config(self.folder)
        self.mlflow = Path(self.config.tracking_uri.removeprefix("sqlite:///"))

    def run(self, tasks: int) -> None:
        """Run the whole stream, with the daemon's loop in its own thread."""
        parts = self._parts()
        metrics = serve_metrics(self.config, self.config.ledger_file)
        runtime: Any = NoRuntime()
        service = DaemonLoop(self.config, parts.ledger, parts.orchestrator.bucket, runtime, parts.orchestrator, metrics)
        thread = threading.Thread(target=self._run_with_disk_faults, args=(service.run,))
        copied = with_faults(Ledger(self.config.ledger_file), self.faults, "ledger", ledger_error)
        outbound = OutboundThread(outbound_for(self.config, copied, parts.files, parts.registry))
        outbound.start()
        self.disk.enable_in(outbound.ident)
        thread.start()
        self.operator = Ledger(self.config.ledger_file)
        try:
            self._run_scenario(tasks, thread)
        finally:
            service.stopping = True
            thread.join()
            assert outbound.stop()
            copied.close()
            metrics.close()
            parts.close()
            self.operator.close()

    def _parts(self) -> Parts:
        def connect(uri: str) -> Any:
            from mlflow import MlflowClient

            return with_faults(MlflowClient(uri, registry_uri=uri), self.faults, "mlflow", mlflow_error)

        registry = MlflowRegistry(self.config.tracking_uri, self.config.artifacts_folder, connect=connect)
        return daemon(self.config, registry=registry,
                      ledger=lambda path: with_faults(Ledger(path), self.faults, "ledger", ledger_error))  # fmt: skip

    def _run_with_disk_faults(self, work: Callable[[], None]) -> None:
        self.disk.enable_in(threading.get_ident())
        try:
            work()
        finally:
            self.disk.enable_in(None)

    def _run_scenario(self, tasks: int, thread: threading.Thread) -> None:
        """The first task alone, because it trains the g-prompt; then the others together; then operator commands."""

        def wait_until(what: Callable[[], bool], why: str) -> None:
            deadline = time.monotonic() + self.seconds
            while not what():
                assert thread.is_alive(), f"the daemon's loop ended while waiting: {why}"
                assert time.monotonic() < deadline, (
                    f"{why}: not within {self.seconds:g} s: {self.states} {self.find_problems()}"
                )
                time.sleep(0.1)

        served = {}
        self.drop(0)
        wait_until(lambda: self.states == {"task000": "PUBLISHED"}, "the first task")
        for number in range(1, tasks):
            self.drop(number)
        served = {f"task{number:03}": "PUBLISHED" for number in range(tasks)}
        self.drop_damaged("task900")
        wait_until(lambda: self.states == served | {"task900": "QUARANTINED"}, "all tasks")
        last = self.operator.versions()[-1]
        held = [self.operator.task(each.task).name for each in last.tasks]
        self.operator.enqueue_command("rollback", str(last.version - 1))
        wait_until(lambda: {self.states[name] for name in held} == {"HELD"}, "the rollback")
        for name in held:
            self.operator.enqueue_command("promote", name)
        wait_until(lambda: {self.states[name] for name in held} == {"PUBLISHED"}, "the promotion")
        self.operator.enqueue_command("forget", "task001")
        wait_until(lambda: self.states["task001"] == "FORGOTTEN", "the deletion")
        wait_until(lambda: not self.find_problems(), "the daemon is idle and everything is recorded")

    @property
    def states(self) -> dict[str, str]:
        return {task.name: str(task.state) for task in self.operator.tasks()}

    def find_problems(self) -> list[str]:
        """Violated invariants, and learned tasks that were not moved out of tasks/."""
        try:
            found = problems(self.config.state.dir, self.folder / "bucket", self.mlflow)
        except (
            AssertionError,
            OSError,
            ValueError,
            KeyError,
            sqlite3.OperationalError,
        ) as error:  # read while something was being written
            return [repr(error)]
        left = {path.parent.name for path in (self.folder / "bucket" / "tasks").glob("*/*")} - {"task900"}
        return found + [f"{name} was learned and is still in tasks/" for name in sorted(left)]

    def drop(self, number: int) -> None:
        """Drop a task of two synthetic classes, reproducible from its number."""
        name, source = f"task{number:03}", Path(tempfile.mkdtemp(prefix="mqmk-made-"))
        noise = np.random.default_rng(number)
        for label in ("a", "b"):
            (source / f"{name}-{label}").mkdir()
            for place in range(8):
                pixels = noise.integers(0, 256, (28, 28), dtype=np.uint8)
                Image.fromarray(pixels).save(source / f"{name}-{label}" / f"{place}.png")
        pack(source, self.folder / "bucket" / "tasks", name, holdout=0.25)
        shutil.rmtree(source)

    def drop_damaged(self, name: str) -> None:
        """Drop a task whose shard does not match its manifest."""
        self.drop(900)
        shard = next((self.folder / "bucket" / "tasks" / name).glob("*.tar"))
        data = bytearray(shard.read_bytes())
        data[2000] ^= 1
        shard.write_bytes(data)

    def published_state(self) -> dict[str, Any]:
        """The externally visible final state, independent of the path to it: how many tasks became one version."""
        newest = pools(self.config.state.dir / "pools")
        with_prompts = {name: prompt for card in newest.values() for name, prompt in card["prompts"].items()}
        operator = Ledger(self.config.ledger_file)
        versions, commands = operator.versions(), operator.commands()
        states = {task.name: (str(task.state), task.code) for task in operator.tasks()}
        names = {task.id: task.name for task in operator.tasks()}
        operator.close()
        return {
            "states": states,
            "prompts": with_prompts,
            "learned": sorted({names[each.task] for row in versions if row.kind == "learn" for each in row.tasks}),
            "current": sorted(task["name"] for task in newest[max(newest)]["tasks"]),
            "commands": {(command.kind, command.state) for command in commands},
        }


def main(tasks: int, seed: int = 0, rate: float = RATE) -> None:
    """Run once without faults and once with them, and compare the final states."""
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    fsspec.register_implementation("faulty", FaultyFileSystem)
    home = Path(tempfile.mkdtemp(prefix="mqmk-faults-"))
    faults = Faults(0.0, seed)
    disk = FaultyDisk(home, faults)
    disk.install()
    FaultyFileSystem.faults = faults
    ended = {}
    for name, run_rate in (("healthy", 0.0), ("faulty", rate)):
        faults.reset(run_rate)
        started, stream = time.monotonic(), Stream(home / name, faults, disk)
        stream.run(tasks)
        faults.rate = 0.0
        ended[name] = stream.published_state()
        print(f"{name}: {tasks + 1} tasks, {time.monotonic() - started:.0f} s\n{faults.summary}", flush=True)
    assert ended["healthy"] == ended["faulty"], f"expected the same final state, got {ended}"
    shutil.rmtree(home)
    print(f"{tasks + 1} tasks, {faults.failed.total()} errors and {faults.lost.total()} lost responses: nothing lost, "
          "duplicated or inconsistent, identical prompts")  # fmt: skip


if __name__ == "__main__":
    main(*map(int, sys.argv[1:] or ["20"]))
