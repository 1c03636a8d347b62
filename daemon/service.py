"""The long-running daemon: takes the lock, puts its parts together, turns the loop, and leaves when it is told to."""

import logging
import os
import signal
import sqlite3
import time
from dataclasses import dataclass, field
from types import FrameType
from typing import Protocol

from mqmk.daemon.bucket import Bucket
from mqmk.daemon.config import Config
from mqmk.daemon.config_keys import shown
from mqmk.daemon.ledger import Ledger, State
from mqmk.daemon.lock import DaemonLock, Holder
from mqmk.daemon.logs import event
from mqmk.daemon.metrics import Server, scrape_file, serve_metrics
from mqmk.daemon.orchestrator import Orchestrator, Replica
from mqmk.daemon.pool_mirror import PoolMirror
from mqmk.daemon.records import Records
from mqmk.daemon.registry_records import Registry
from mqmk.daemon.state_files import StateFiles
from mqmk.daemon.systemd_notify import ServiceManager
from mqmk.daemon.workers import InlineWorkers, Workers
from mqmk.matcher.errors import MqmkError

log = logging.getLogger(__name__)
SLICE_SECONDS = 0.25  # how soon a command of an operator, a finished job or a signal is noticed


class Ground(Protocol):
    """What the daemon stands on: Ray, or nothing."""

    @property
    def workers(self) -> Workers:
        """Who does the jobs."""

    @property
    def metrics_target(self) -> str | None:
        """Where the metrics of replicas and trainers can be scraped."""

    def start(self) -> None:
        """Make it ready."""

    def tend(self) -> None:
        """Repair what can be repaired."""

    def replicas(self) -> list[Replica]:
        """Who serves what."""

    def stop(self) -> None:
        """Leave it."""


class NoRay:
    """`ray.address: none`: this process does the work and nobody serves."""

    def __init__(self, config: Config) -> None:
        from mqmk.daemon.workshop import local_workshop

        self.workers: Workers = InlineWorkers(local_workshop(config))
        self.metrics_target: str | None = None

    def start(self) -> None:
        """Nothing to start."""

    def tend(self) -> None:
        """Nothing to look after."""

    def replicas(self) -> list[Replica]:
        return []

    def stop(self) -> None:
        self.workers.stop()


@dataclass
class Service:
    """The loop around the orchestrator's passes."""

    config: Config
    ledger: Ledger
    bucket: Bucket
    ground: Ground
    orchestrator: Orchestrator
    metrics: Server
    stopping: bool = False
    manager: ServiceManager = field(default_factory=ServiceManager)

    def run(self) -> None:
        """Turn until a signal says stop; a pass that fails is logged and tried again, later each time."""
        least, most = self.config.bucket.poll_seconds, self.config.bucket.max_poll_seconds
        pause = least
        while not self.stopping:
            self.manager.alive()
            begun, happened = time.monotonic(), False
            try:
                self.ground.tend()
                happened = self.orchestrator.run_pass()
                for part in ("state", "disk"):
                    self.ledger.set_health(part, True)
                scrape_file(self.config.state.dir, self.metrics.target, self.ground.metrics_target)
            except (OSError, sqlite3.OperationalError, MqmkError) as error:
                self._troubled(error)
                self.metrics.passed(time.monotonic() - begun, failed=True)
            else:
                self.metrics.passed(time.monotonic() - begun)
            pause = least if happened else min(pause * 1.5, most)
            self._wait(pause)

    def _troubled(self, error: Exception) -> None:
        """Such as a full disk: nothing is lost, nothing is given up, the loop goes on."""
        log.error(f"this pass failed: {error}; the next one tries again", extra=event("pass.failed", error=repr(error)))
        try:
            self.ledger.set_health("state", False, str(error))
        except sqlite3.OperationalError:
            time.sleep(1)  # the ledger itself is the trouble

    def _wait(self, seconds: float) -> None:
        """Until something may have changed: the bucket, a job, a command, a signal."""
        deadline = time.monotonic() + seconds
        while not self.stopping and (left := deadline - time.monotonic()) > 0:
            self.manager.alive()  # a pause may be longer than the watchdog's patience
            self._tend()
            if self._stirred(min(left, SLICE_SECONDS)):
                return

    def _stirred(self, seconds: float) -> bool:
        try:
            return self.bucket.wait(seconds) or self.ledger.changed_by_others() or self._under_way()
        except sqlite3.OperationalError:  # the next pass will say so; a pause is no place to die
            return False

    def _tend(self) -> None:
        """In a pause, too: a dead Ray serves nobody."""
        try:
            self.ground.tend()
        except (OSError, sqlite3.OperationalError, MqmkError) as error:
            self._troubled(error)

    def _under_way(self) -> bool:
        return bool(self.orchestrator.workers.busy()) or bool(self.ledger.counts()[State.PUBLISHED])

    def listen(self) -> None:
        """Take the signals that mean stop."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.stop)

    def stop(self, number: int, _frame: FrameType | None) -> None:
        """A signal: end after the step that is being done."""
        log.info("stopping", extra=event("daemon.stopping", signal=signal.Signals(number).name))
        self.stopping = True
        self.manager.stopping()
        self.bucket.wake()


def run_daemon(config: Config) -> None:
    """Everything from the lock to the last line of the log."""
    manager = ServiceManager.take()  # before Ray is started, whose processes would inherit its variables
    lock = DaemonLock(config.state.dir).take()
    config.state.dir.chmod(0o700)
    ledger = Ledger(config.ledger_file)
    bucket = Bucket(config.bucket_url, settle_seconds=config.bucket.settle_seconds)
    bucket.prepare()
    ground = ground_for(config, ledger)
    files = StateFiles(config.state.dir)
    registry = registry_for(config)
    records = Records(config, ledger, files, registry)
    mirror = mirror_for(config, ledger, files)
    orchestrator = Orchestrator(config, ledger, bucket, files, ground.workers, records, ground, mirror=mirror)
    metrics = serve_metrics(config, config.ledger_file)
    lock.say(Holder(os.getpid(), time.time(), metrics.url))
    service = Service(config, ledger, bucket, ground, orchestrator, metrics, manager=manager)
    service.listen()
    log.info(f"watching {shown(config.bucket_url)}", extra=event("daemon.started", state=str(config.state.dir)))
    try:
        ground.start()
        manager.ready(f"watching {shown(config.bucket_url)}")
        service.run()
    finally:
        ground.stop()
        metrics.close()
        bucket.close()
        if registry:
            registry.close()
        ledger.close()
        lock.release()
    log.info("stopped", extra=event("daemon.stopped"))


def ground_for(config: Config, ledger: Ledger) -> Ground:
    """Ray as configured."""
    if config.ray.address == "none":
        return NoRay(config)
    if config.ray.address == "local":
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # read when ray is imported: our ports stay on loopback
    from mqmk.daemon.cluster import RayCluster

    return RayCluster(config, ledger)


def mirror_for(config: Config, ledger: Ledger, files: StateFiles) -> PoolMirror | None:
    """The pool store on S3 as configured."""
    if config.pools.url is None:
        return None
    from mqmk.deploy.remote_pools import open_remote_pools  # imports fsspec, which a folder does not need

    return PoolMirror(ledger, files.store, open_remote_pools(config.pools.url, config.pools.cache))


def registry_for(config: Config) -> Registry | None:
    """MLflow as configured."""
    if not config.mlflow.enabled:
        return None
    from mqmk.daemon.registry import MlflowRegistry

    return MlflowRegistry(config.tracking_uri, config.artifacts_folder, config.mlflow.experiment, config.mlflow.model)
