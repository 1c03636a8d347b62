"""A daemon built from real parts, with one worker in this process; and tasks of sketches to feed it."""

import atexit
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from mqmk.daemon.app import outbound_for
from mqmk.daemon.bucket.scanner import Bucket
from mqmk.daemon.config.sections import Bucket as BucketSettings
from mqmk.daemon.config.sections import Config, Ray, Retry, State
from mqmk.daemon.ledger.ledger import Ledger
from mqmk.daemon.pipeline.orchestrator import Orchestrator
from mqmk.daemon.pipeline.outbound import Outbound
from mqmk.daemon.pipeline.store_upgrade import upgrade_store
from mqmk.daemon.registry.in_memory import MemoryRegistry
from mqmk.daemon.registry.interface import Registry
from mqmk.daemon.replicas import Replica
from mqmk.daemon.state_dir import StateDir
from mqmk.daemon.workers.pool import InlineWorkers, Workers
from mqmk.daemon.workers.runner import JobRunner
from mqmk.learner.data import sketches
from mqmk.learner.data.manifest import Manifest
from mqmk.learner.data.pack import pack
from mqmk.learner.settings import TrainSettings

RELEASED = Path(__file__).parents[2] / "daemon" / "releases" / "0.1.0"
"""A state directory whose current version knows birds and the sea; barely trained, but real."""


@cache
def upgraded_release() -> Path:
    """The same after its first start with this release; not to be written to."""
    folder = Path(tempfile.mkdtemp(prefix="mqmk-released-")) / "state"
    atexit.register(shutil.rmtree, folder.parent, ignore_errors=True)
    shutil.copytree(RELEASED, folder)
    ledger = Ledger(folder / "ledger.sqlite")
    upgrade_store(ledger, StateDir(folder))
    ledger.close()
    return folder


@cache
def class_folders(task: str, per_class: int) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="mqmk-sketches-"))
    atexit.register(shutil.rmtree, folder)
    return sketches.write_class_folders(task, folder, per_class)


def drop(bucket: Path, task: str, name: str | None = None, *, per_class: int = 12, holdout: float = 0.3) -> Manifest:
    """Put a packed task into a folder bucket."""
    return pack(class_folders(task, per_class), bucket / "tasks", name or task, holdout=holdout)


def small_config(folder: Path, **sections: object) -> Config:
    """Defaults, but quick: two epochs, no Ray, no pauses."""
    config = Config(
        state=State(folder / "state"),
        bucket=BucketSettings(url=str(folder / "bucket"), settle_seconds=0.2, poll_seconds=0.05, max_poll_seconds=0.05),
        train=TrainSettings(epochs=2, batch=16),
        ray=Ray(address="none"),
        retry=Retry(attempts=3, first_seconds=0.0, max_seconds=0.0),
    )
    return replace(config, **sections)  # type: ignore[arg-type]


class Replicas:
    """Replicas that serve what the test says."""

    def __init__(self) -> None:
        self.live: list[Replica] = []
        self.wanted = 1

    def replicas(self) -> list[Replica]:
        return self.live

    def wanted_replicas(self) -> int:
        return self.wanted


@dataclass
class Parts:
    """All parts of one daemon."""

    config: Config
    ledger: Ledger
    files: StateDir
    registry: Registry
    serving: Replicas
    orchestrator: Orchestrator
    outbound: Outbound

    def run(self, passes: int = 30) -> None:
        """Run passes until nothing happens any more."""
        for _ in range(passes):
            self.orchestrator.bucket.wake()
            if not self.run_pass() and self.orchestrator.is_idle:
                return

    def run_pass(self) -> bool:
        """One pass and the copies beside it; True if anything happened."""
        before = self.ledger.last_event()
        self.orchestrator.run_pass()
        self.outbound.catch_up()
        return self.ledger.last_event() != before

    def close(self) -> None:
        """Stop the workers and close the ledger."""
        self.orchestrator.workers.stop()
        self.ledger.close()

    @property
    def states(self) -> dict[str, str]:
        return {task.name: str(task.state) for task in self.ledger.tasks()}


def daemon(
    config: Config,
    *,
    registry: Registry | None = None,
    workers: Callable[[Config], Workers] | None = None,
    ledger: Callable[[Path], Ledger] = Ledger,
) -> Parts:
    """A daemon on the configured state directory; calling it again is a restart."""
    files, ledger = StateDir(config.state.dir), ledger(config.ledger_file)
    upgrade_store(ledger, files)
    bucket = Bucket(config.bucket_url, settle_seconds=config.bucket.settle_seconds)
    bucket.prepare()
    registry, serving = registry or MemoryRegistry(), Replicas()
    made = workers(config) if workers else InlineWorkers(JobRunner(config))
    orchestrator = Orchestrator(config, ledger, bucket, files, made, serving)
    return Parts(config, ledger, files, registry, serving, orchestrator, outbound_for(config, ledger, files, registry))
