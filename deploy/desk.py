"""How replicas on other machines reach the daemon's: an actor beside the state directory, the desk.

It takes their reports, which become the files that replicas on this machine write themselves, and tells them the
credentials of the pool store: those travel in calls only, for what an actor is made with Ray writes to disk and logs.
It outlives the daemon, as the service does. Absent: reports wait, and replicas use their machine's own credentials.
"""

import hashlib
import json
import logging
import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mqmk.deploy.reports import HEARTBEAT_SECONDS, ReplicaReport, Reporter

log = logging.getLogger(__name__)
NAME: Final = "mqmk-desk"
NAMESPACE: Final = "mqmk"
CREDENTIALS: Final = ("AWS_",)
"""How the variables begin that S3 reads."""
_SECONDS: Final = 10.0


class Desk:
    """The actor."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._credentials: dict[str, str] = {}
        self._reporters: dict[str, Reporter] = {}

    def place(self) -> tuple[str, str]:
        """The node and the folder that it stands at."""
        return ray.get_runtime_context().get_node_id(), self._folder

    def pid(self) -> int:
        """Its process."""
        return os.getpid()

    def learn(self, credentials: Mapping[str, str]) -> None:
        """The daemon says what replicas are to be told."""
        self._credentials = dict(credentials)

    def credentials(self) -> dict[str, str]:
        """What S3 is to be asked with."""
        return self._credentials

    def take(self, report: ReplicaReport) -> None:
        """A report or a heartbeat."""
        known = self._reporters.get(report.replica_id)
        if known is None:
            known = self._reporters[report.replica_id] = Reporter(Path(self._folder), report.replica_id)
        known.write(report)

    def remove(self, replica_id: str) -> None:
        """The replica ends in order."""
        reporter = self._reporters.pop(replica_id, None)
        if reporter:
            reporter.remove()


def own_credentials() -> dict[str, str]:
    """Those of this process."""
    return {name: value for name, value in os.environ.items() if name.startswith(CREDENTIALS)}


def fingerprint() -> str:
    """Changes with the credentials of this process, and does not tell them."""
    return hashlib.sha256(json.dumps(own_credentials(), sort_keys=True).encode()).hexdigest()


def remind() -> None:
    """Tell the desk our credentials again, for one that Ray had to start anew; nothing waits for it."""
    with suppress(RayError, ValueError):
        ray.get_actor(NAME, namespace=NAMESPACE).learn.remote(own_credentials())


def ensure_desk(folder: Path) -> None:
    """See to it that a desk stands here and knows our credentials; RayError if Ray cannot do that in time."""
    place = (ray.get_runtime_context().get_node_id(), str(folder))
    desk = _find()
    if desk is not None and _place_of(desk) != place:  # of another daemon's node, or of one that was
        ray.kill(desk)
        desk = None
    if desk is None:
        here = NodeAffinitySchedulingStrategy(place[0], soft=False)
        desk = ray.remote(Desk).options(
            name=NAME, namespace=NAMESPACE, lifetime="detached", max_restarts=-1, num_cpus=0, scheduling_strategy=here
        ).remote(str(folder))  # fmt: skip
    ray.get(desk.learn.remote(own_credentials()), timeout=6 * _SECONDS)


def take_up_credentials() -> None:
    """Make the daemon's credentials those of this process, as far as the desk knows them."""
    desk = _find()
    if desk is not None:
        with suppress(RayError):
            os.environ.update(ray.get(desk.credentials.remote(), timeout=_SECONDS))


class DistantReporter:
    """Sends one replica's reports to the desk, with a thread that goes on while others wait for S3."""

    def __init__(self, replica_id: str) -> None:
        self._id = replica_id
        self._report: ReplicaReport | None = None
        self._desk: Any = None
        self._news, self._end = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="reports", daemon=True)
        self._thread.start()

    def write(self, report: ReplicaReport) -> None:
        """Never raises and never waits."""
        if report != self._report:
            self._report = report
            self._news.set()

    def remove(self) -> None:
        """The replica ends in order."""
        self._end.set()
        self._news.set()
        self._thread.join(timeout=1.0)
        if self._desk is not None:
            self._desk.remove.remote(self._id)

    def _run(self) -> None:
        while not self._end.is_set():
            if self._report is not None:
                self._send(self._report)
            self._news.wait(HEARTBEAT_SECONDS)
            self._news.clear()

    def _send(self, report: ReplicaReport) -> None:
        """A desk that does not answer is looked up again next time."""
        self._desk = self._desk or _find()
        if self._desk is None:
            return
        try:
            ray.get(self._desk.take.remote(report), timeout=_SECONDS)
        except RayError as error:
            log.info("a report did not arrive: %s", str(error).splitlines()[0], extra={"event": "report_lost"})
            self._desk = None


def _find() -> Any:
    """None where there is none."""
    try:
        return ray.get_actor(NAME, namespace=NAMESPACE)
    except ValueError:
        return None


def _place_of(desk: Any) -> tuple[str, str] | None:
    with suppress(RayError):
        found: tuple[str, str] = ray.get(desk.place.remote(), timeout=_SECONDS)
        return found
    return None
