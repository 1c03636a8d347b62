"""A daemon put together from real parts, with one worker in this process; and tasks of sketches to feed it."""

import atexit
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from mqmk.daemon.bucket import Bucket
from mqmk.daemon.config import Bucket as BucketSettings
from mqmk.daemon.config import Config, Ray, Retry, State
from mqmk.daemon.ledger import Ledger
from mqmk.daemon.orchestrator import Orchestrator, Replica
from mqmk.daemon.records import Records
from mqmk.daemon.registry_memory import MemoryRegistry
from mqmk.daemon.registry_records import Registry
from mqmk.daemon.service import mirror_for
from mqmk.daemon.state_files import StateFiles
from mqmk.daemon.workers import InlineWorkers, Workers
from mqmk.daemon.workshop import Workshop
from mqmk.learner import sketches
from mqmk.learner.manifest import Manifest
from mqmk.learner.pack import pack
from mqmk.learner.settings import TrainSettings

RELEASED = Path(__file__).parent / "daemon" / "releases" / "0.1.0"
"""A state directory whose current version knows birds and the sea; barely trained, but real."""


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
        bucket=BucketSettings(url=str(folder / "bucket"), settle_seconds=0.2),
        train=TrainSettings(epochs=2, batch=16),
        ray=Ray(address="none"),
        retry=Retry(attempts=3, first_seconds=0.0, max_seconds=0.0),
    )
    return replace(config, **sections)  # type: ignore[arg-type]


class Replicas:
    """Replicas that hold what they are told to hold."""

    def __init__(self) -> None:
        self.holding: list[Replica] = []

    def replicas(self) -> list[Replica]:
        return self.holding


@dataclass
class Parts:
    """Everything of one daemon, to look at."""

    config: Config
    ledger: Ledger
    files: StateFiles
    registry: Registry
    serving: Replicas
    orchestrator: Orchestrator

    def run(self, passes: int = 30) -> None:
        """Until nothing happens any more."""
        for _ in range(passes):
            if not self.orchestrator.run_pass() and self.orchestrator.idle:
                return

    def close(self) -> None:
        """End what was started."""
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
    """A daemon on the configured state directory; made again, it is the same daemon after a restart."""
    files, ledger = StateFiles(config.state.dir), ledger(config.ledger_file)
    bucket = Bucket(config.bucket_url, settle_seconds=config.bucket.settle_seconds)
    bucket.prepare()
    registry, serving = registry or MemoryRegistry(), Replicas()
    made = workers(config) if workers else InlineWorkers(Workshop(config))
    records = Records(config, ledger, files, registry)
    mirror = mirror_for(config, ledger, files)
    orchestrator = Orchestrator(config, ledger, bucket, files, made, records, serving, mirror=mirror)
    return Parts(config, ledger, files, registry, serving, orchestrator)
