"""The loop around the orchestrator's passes: how often they run, what ends a pause, and what a failed pass means."""

import logging
import signal
import sqlite3
import time
from dataclasses import dataclass, field
from types import FrameType
from typing import Protocol

from mqmk.daemon.bucket.scanner import Bucket
from mqmk.daemon.config.sections import Config
from mqmk.daemon.host.systemd import ServiceManager
from mqmk.daemon.ledger.ledger import Ledger, State
from mqmk.daemon.logs import event
from mqmk.daemon.metrics.server import Server, write_targets
from mqmk.daemon.pipeline.orchestrator import Orchestrator
from mqmk.daemon.pipeline.retry import is_infrastructure_error
from mqmk.daemon.replicas import Replica
from mqmk.daemon.workers.pool import InlineWorkers, Workers
from mqmk.matcher.errors import MqmkError

log = logging.getLogger(__name__)
SLICE_SECONDS = 0.25  # how soon an operator command, a finished job or a signal is noticed


class Runtime(Protocol):
    """What the daemon runs on: Ray, or nothing."""

    @property
    def workers(self) -> Workers:
        """Run the jobs."""

    @property
    def metrics_target(self) -> str | None:
        """Where to scrape the metrics of replicas and trainers."""

    def start(self) -> None:
        """Start it, or connect to it."""

    def reconcile(self) -> None:
        """Repair what can be repaired."""

    def replicas(self) -> list[Replica]:
        """Every live replica."""

    def wanted_replicas(self) -> int:
        """How many must serve a version before its tasks are SERVING."""

    def stop(self) -> None:
        """Disconnect; serving may continue."""


class NoRuntime:
    """`ray.address: none`: jobs run in this process and nothing is served."""

    def __init__(self, config: Config) -> None:
        from mqmk.daemon.workers.runner import local_runner

        self.workers: Workers = InlineWorkers(local_runner(config))
        self.metrics_target: str | None = None

    def start(self) -> None:
        """Nothing to start."""

    def reconcile(self) -> None:
        """Nothing to repair."""

    def replicas(self) -> list[Replica]:
        return []

    def wanted_replicas(self) -> int:
        return 1

    def stop(self) -> None:
        self.workers.stop()


@dataclass
class DaemonLoop:
    """Runs passes until a signal arrives."""

    config: Config
    ledger: Ledger
    bucket: Bucket
    runtime: Runtime
    orchestrator: Orchestrator
    metrics: Server
    stopping: bool = False
    manager: ServiceManager = field(default_factory=ServiceManager)

    def run(self) -> None:
        """Run passes until a signal arrives; a failed pass is logged and repeated."""
        least, most = self.config.bucket.poll_seconds, self.config.bucket.max_poll_seconds
        pause = least
        while not self.stopping:
            self.manager.alive()
            started, happened = time.monotonic(), False
            try:
                self.runtime.reconcile()
                happened = self.orchestrator.run_pass()
                self.ledger.set_health("state", True)
                write_targets(self.config.state.dir, self.metrics.target, self.runtime.metrics_target)
            except (OSError, sqlite3.OperationalError, MqmkError) as error:
                self._record_failure(error)
                self.metrics.record_pass(time.monotonic() - started, failed=True)
            else:
                self.metrics.record_pass(time.monotonic() - started)
            pause = least if happened else min(pause * 1.5, most)
            self._wait(pause)

    def _record_failure(self, error: Exception) -> None:
        """Such as a full disk: nothing is lost, and the loop continues."""
        log.error(f"pass failed: {error}; retrying", extra=event("loop.pass_failed", error=repr(error)))
        try:
            self.ledger.set_health("disk" if is_infrastructure_error(error) else "state", False, str(error))
        except sqlite3.OperationalError:
            time.sleep(1)  # the ledger itself cannot be written

    def _wait(self, seconds: float) -> None:
        """Until something may have changed: the bucket, a job, a command, a signal."""
        deadline = time.monotonic() + seconds
        while not self.stopping and (left := deadline - time.monotonic()) > 0:
            self.manager.alive()  # a pause may be longer than the watchdog's timeout
            self._reconcile()
            if self._has_changed(min(left, SLICE_SECONDS)):
                return

    def _has_changed(self, seconds: float) -> bool:
        try:
            return self.bucket.wait(seconds) or self.ledger.changed_by_others() or self._has_work_in_progress()
        except sqlite3.OperationalError:  # the next pass will report it
            return False

    def _reconcile(self) -> None:
        """During pauses too: without Ray nothing is served."""
        try:
            self.runtime.reconcile()
        except (OSError, sqlite3.OperationalError, MqmkError) as error:
            self._record_failure(error)

    def _has_work_in_progress(self) -> bool:
        """Whether a job or a rollout may have progressed; the bucket is scanned at its own pace."""
        rolls_out = self.config.serve.enabled and self.config.ray.address != "none"
        return bool(self.orchestrator.workers.running()) or (rolls_out and self.ledger.has_tasks(State.PUBLISHED))

    def handle_signals(self) -> None:
        """Stop on SIGTERM and SIGINT."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.stop)

    def stop(self, number: int, _frame: FrameType | None) -> None:
        """Signal handler: stop after the current step."""
        log.info("stopping", extra=event("daemon.stop_requested", signal=signal.Signals(number).name))
        self.stopping = True
        self.manager.stopping()
        self.bucket.wake()
