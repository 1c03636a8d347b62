"""A stream of tasks and commands while the outside fails: `python tests/fault_stream.py 8` (tasks), default 20.

Bucket, MLflow, ledger and disk each fail in 5 % of the calls; in half of these the call had its effect and only the
answer is lost. The same stream runs once without faults and once with them, through the daemon's own loop; both must
end in the same published state, with the same prompts to the byte, and an outside checker must find nothing wrong.
"""

import logging
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import torch
from daemon_parts import Parts, daemon, small_config
from faults import Faults, FaultyDisk, FaultyFiles, faulty, ledger_error, mlflow_error
from outside_checker import pools, problems
from PIL import Image

from mqmk.daemon.config import Config, Evaluate, Gate
from mqmk.daemon.ledger import Ledger
from mqmk.daemon.metrics import serve_metrics
from mqmk.daemon.registry import MlflowRegistry
from mqmk.daemon.service import Service
from mqmk.learner.pack import pack
from mqmk.learner.settings import TrainSettings

SHARE = 0.05


def config_of(folder: Path) -> Config:
    """Small and quick, with a bucket far away and shards that are moved when they were learned."""
    config = small_config(
        folder,
        train=TrainSettings(epochs=2, batch=16, e_length=4, g_length=2),
        gate=Gate(accuracy_floor=0.0, fresh_process=False, without_held_out="promote"),  # some have one by chance only
        evaluate=Evaluate(matchers=("mqmk", "mqmk-ei")),
    )
    bucket = replace(config.bucket, url=f"faulty://{folder / 'bucket'}", after_learning="move", poll_seconds=0.05,
                     max_poll_seconds=0.2, reconcile_seconds=5.0)  # fmt: skip
    return replace(config, bucket=bucket, metrics=replace(config.metrics, port=0))


class NoGround:
    """Nothing under the daemon's feet: its own process does the work and nobody serves."""

    metrics_target = None

    def tend(self) -> None:
        """Nothing to do."""


@dataclass
class Stream:
    """One daemon, and an operator beside it who looks and asks through a ledger of their own."""

    folder: Path
    faults: Faults
    disk: FaultyDisk
    seconds: float = 600.0

    def __post_init__(self) -> None:
        (self.folder / "bucket" / "tasks").mkdir(parents=True)
        self.config = config_of(self.folder)
        self.mlflow = Path(self.config.tracking_uri.removeprefix("sqlite:///"))

    def run(self, tasks: int) -> None:
        """The whole stream; the daemon's loop turns in a thread of its own."""
        parts = self._parts()
        metrics = serve_metrics(self.config, self.config.ledger_file)
        service = Service(self.config, parts.ledger, parts.orchestrator.bucket, NoGround(), parts.orchestrator, metrics)  # type: ignore[arg-type]
        thread = threading.Thread(target=self._suffer, args=(service.run,))
        thread.start()
        self.operator = Ledger(self.config.ledger_file)
        try:
            self._live(tasks, thread)
        finally:
            service.stopping = True
            thread.join()
            metrics.close()
            parts.close()
            self.operator.close()

    def _parts(self) -> Parts:
        def connect(uri: str) -> Any:
            from mlflow import MlflowClient

            return faulty(MlflowClient(uri, registry_uri=uri), self.faults, "mlflow", mlflow_error)

        registry = MlflowRegistry(self.config.tracking_uri, self.config.artifacts_folder, connect=connect)
        return daemon(self.config, registry=registry,
                      ledger=lambda path: faulty(Ledger(path), self.faults, "ledger", ledger_error))  # fmt: skip

    def _suffer(self, work: Callable[[], None]) -> None:
        self.disk.hit(threading.get_ident())
        try:
            work()
        finally:
            self.disk.hit(None)

    def _live(self, tasks: int, thread: threading.Thread) -> None:
        """The first task alone, because it makes the g-prompt; the others together; then what operators do."""

        def until(what: Callable[[], bool], why: str) -> None:
            deadline = time.monotonic() + self.seconds
            while not what():
                assert thread.is_alive(), f"the daemon's loop ended while waiting: {why}"
                assert time.monotonic() < deadline, (
                    f"{why}: not within {self.seconds:g} s: {self.states} {self.wrong()}"
                )
                time.sleep(0.1)

        served = {}
        self.drop(0)
        until(lambda: self.states == {"task000": "PUBLISHED"}, "the first task")
        for number in range(1, tasks):
            self.drop(number)
        served = {f"task{number:03}": "PUBLISHED" for number in range(tasks)}
        self.damage("task900")
        until(lambda: self.states == served | {"task900": "QUARANTINED"}, "all tasks")
        last = self.operator.versions()[-1]
        held = self.operator.task(last.task or 0).name
        self.operator.ask("rollback", str(last.version - 1))
        until(lambda: self.states[held] == "HELD", "the roll-back")
        self.operator.ask("promote", held)
        until(lambda: self.states[held] == "PUBLISHED", "the promotion")
        self.operator.ask("forget", "task001")
        until(lambda: self.states["task001"] == "FORGOTTEN", "the deletion")
        until(lambda: not self.wrong(), "everything is at rest and recorded")

    @property
    def states(self) -> dict[str, str]:
        return {task.name: str(task.state) for task in self.operator.tasks()}

    def wrong(self) -> list[str]:
        """What the outside checker says, and which folders were not put away."""
        try:
            found = problems(self.config.state.dir, self.folder / "bucket", self.mlflow)
        except (AssertionError, OSError, ValueError, KeyError) as error:  # it looked while something was being written
            return [repr(error)]
        left = {path.parent.name for path in (self.folder / "bucket" / "tasks").glob("*/*")} - {"task900"}
        return found + [f"{name} was learned and is still in tasks/" for name in sorted(left)]

    def drop(self, number: int) -> None:
        """A task of two made-up classes, the same for the same number."""
        name, source = f"task{number:03}", Path(tempfile.mkdtemp(prefix="mqmk-made-"))
        noise = np.random.default_rng(number)
        for label in ("a", "b"):
            (source / f"{name}-{label}").mkdir()
            for place in range(8):
                pixels = noise.integers(0, 256, (28, 28), dtype=np.uint8)
                Image.fromarray(pixels).save(source / f"{name}-{label}" / f"{place}.png")
        pack(source, self.folder / "bucket" / "tasks", name, holdout=0.25)
        shutil.rmtree(source)

    def damage(self, name: str) -> None:
        """A task whose shard is not what its manifest says."""
        self.drop(900)
        shard = next((self.folder / "bucket" / "tasks" / name).glob("*.tar"))
        data = bytearray(shard.read_bytes())
        data[2000] ^= 1
        shard.write_bytes(data)

    def published(self) -> dict[str, Any]:
        """What everybody can see in the end, whatever the way to it."""
        newest = pools(self.config.state.dir / "pools")
        with_prompts = {name: prompt for card in newest.values() for name, prompt in card["prompts"].items()}
        operator = Ledger(self.config.ledger_file)
        versions, commands = operator.versions(), [operator.command(number) for number in (1, 2, 3)]
        states = {task.name: (str(task.state), task.code) for task in operator.tasks()}
        operator.close()
        return {
            "states": states,
            "prompts": with_prompts,
            "versions": Counter(row.kind for row in versions),
            "current": sorted(task["name"] for task in newest[max(newest)]["tasks"]),
            "commands": [(command.kind, command.state) for command in commands],
        }


def main(tasks: int, seed: int = 0, share: float = SHARE) -> None:
    """Once without faults, once with them, and the two compared."""
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    fsspec.register_implementation("faulty", FaultyFiles)
    home = Path(tempfile.mkdtemp(prefix="mqmk-faults-"))
    faults = Faults(0.0, seed)
    disk = FaultyDisk(home, faults)
    disk.install()
    FaultyFiles.faults = faults
    ended = {}
    for name, chance in (("well", 0.0), ("faulty", share)):
        faults.reset(chance)
        begun, stream = time.monotonic(), Stream(home / name, faults, disk)
        stream.run(tasks)
        faults.share = 0.0
        ended[name] = stream.published()
        print(f"{name}: {tasks + 1} tasks, {time.monotonic() - begun:.0f} s\n{faults.table}", flush=True)
    assert ended["well"] == ended["faulty"], f"expected the same end, got {ended}"
    shutil.rmtree(home)
    print(f"{tasks + 1} tasks, {faults.failed.total()} errors and {faults.lost.total()} lost answers: nothing lost, "
          "doubled or out of step, the same prompts")  # fmt: skip


if __name__ == "__main__":
    main(*map(int, sys.argv[1:] or ["20"]))
