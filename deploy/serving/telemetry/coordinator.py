"""How replicas on other machines reach the daemon's: the coordinator, an actor on the node of the state directory.

It receives their status, which becomes the files that replicas on this machine write themselves, and hands out the
credentials of the pool store. Those travel in calls only: Ray writes an actor's arguments to disk and to logs. It
outlives the daemon, as the service does; restarted by Ray, it gets them from the daemon or from a replica that knows.
Absent: statuses wait, and replicas use their machine's own credentials.
"""

import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mqmk.deploy.serving.telemetry.heartbeat import HEARTBEAT_SECONDS, ReplicaStatus, StatusFile
from mqmk.matcher.errors import first_line

log = logging.getLogger(__name__)
NAME: Final = "mqmk-coordinator"
NAMESPACE: Final = "mqmk"
CREDENTIALS: Final = ("AWS_",)
"""Prefixes of the variables that S3 clients read."""
_SECONDS: Final = 10.0
_adopted: dict[str, str] = {}
"""Credentials that this process got from the coordinator."""


class Coordinator:
    """The actor."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._credentials: dict[str, str] | None = None
        self._files: dict[str, StatusFile] = {}

    def location(self) -> tuple[str, str]:
        """Its node, and the folder that it writes to."""
        return ray.get_runtime_context().get_node_id(), self._folder

    def pid(self) -> int:
        """Its process id."""
        return os.getpid()

    def set_credentials(self, credentials: Mapping[str, str]) -> None:
        """What replicas will get."""
        self._credentials = dict(credentials)

    def credentials(self) -> dict[str, str]:
        """Credentials of the pool store; empty until they are set."""
        return self._credentials or {}

    def receive(self, status: ReplicaStatus) -> bool:
        """A changed status or a heartbeat; returns whether credentials are set, which a restart loses."""
        known = self._files.get(status.replica_id)
        if known is None:
            known = self._files[status.replica_id] = StatusFile(Path(self._folder), status.replica_id)
        known.write(status)
        return self._credentials is not None

    def remove(self, replica_id: str) -> None:
        """The replica shuts down."""
        file = self._files.pop(replica_id, None)
        if file:
            file.remove()


def local_credentials() -> dict[str, str]:
    """Those of this process."""
    return {name: value for name, value in os.environ.items() if name.startswith(CREDENTIALS)}


def credentials_fingerprint() -> str:
    """Changes with the credentials of this process, without revealing them."""
    return hashlib.sha256(json.dumps(local_credentials(), sort_keys=True).encode()).hexdigest()


def refresh_credentials() -> None:
    """Send our credentials again, in case Ray restarted the coordinator; does not wait."""
    with suppress(RayError, ValueError):
        ray.get_actor(NAME, namespace=NAMESPACE).set_credentials.remote(local_credentials())


def ensure_coordinator(folder: Path) -> None:
    """Run a coordinator on this node and give it our credentials; RayError if Ray cannot do that in time."""
    location = (ray.get_runtime_context().get_node_id(), str(folder))
    coordinator = _find()
    if coordinator is not None and _location_of(coordinator) != location:  # of another node or state directory
        ray.kill(coordinator)
        coordinator = None
    if coordinator is None:
        here = NodeAffinitySchedulingStrategy(location[0], soft=False)
        coordinator = ray.remote(Coordinator).options(
            name=NAME, namespace=NAMESPACE, lifetime="detached", max_restarts=-1, num_cpus=0, scheduling_strategy=here
        ).remote(str(folder))  # fmt: skip
    ray.get(coordinator.set_credentials.remote(local_credentials()), timeout=6 * _SECONDS)


def stop_coordinator() -> None:
    """Stop the coordinator; harmless if there is none."""
    if (coordinator := _find()) is not None:
        ray.kill(coordinator)


def adopt_credentials() -> bool:
    """Use the credentials that the coordinator has in this process; returns whether any is new."""
    with suppress(RayError):
        coordinator = _find()
        if coordinator is None:
            return False
        found: dict[str, str] = ray.get(coordinator.credentials.remote(), timeout=_SECONDS)
        new = any(os.environ.get(name) != value for name, value in found.items())
        os.environ.update(found)
        _adopted.update(found)
        return new
    return False


class CredentialRenewal:
    """Fetches credentials again while the store refuses ours: the coordinator may have got new ones since."""

    def __init__(
        self,
        reconnect: Callable[[], None],
        seconds: float,
        adopt: Callable[[], bool] = adopt_credentials,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._reconnect, self._seconds, self._adopt, self._clock = reconnect, seconds, adopt, clock
        self._next, self._unused = 0.0, False

    def renew(self) -> None:
        """Fetch, at most every `seconds`, and reconnect with new credentials; PoolError if that fails."""
        if self._clock() < self._next:
            return
        self._next = self._clock() + self._seconds
        self._unused = self._adopt() or self._unused
        if self._unused:
            self._reconnect()
            self._unused = False


class RemoteStatus:
    """Sends one replica's status to the coordinator, from its own thread: others may wait for S3."""

    def __init__(self, replica_id: str) -> None:
        self._id = replica_id
        self._status: ReplicaStatus | None = None
        self._coordinator: Any = None
        self._wake, self._end = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="status", daemon=True)
        self._thread.start()

    def write(self, status: ReplicaStatus) -> None:
        """Never raises and never waits."""
        if status != self._status:
            self._status = status
            self._wake.set()

    def remove(self) -> None:
        """The replica shuts down."""
        self._end.set()
        self._wake.set()
        self._thread.join(timeout=1.0)
        if self._coordinator is not None:
            self._coordinator.remove.remote(self._id)

    def _run(self) -> None:
        while not self._end.is_set():
            if self._status is not None:
                self._send(self._status)
            self._wake.wait(HEARTBEAT_SECONDS)
            self._wake.clear()

    def _send(self, status: ReplicaStatus) -> None:
        """A coordinator that does not answer is looked up again next time."""
        try:
            self._coordinator = self._coordinator or _find()
            if self._coordinator is None:
                return
            if not ray.get(self._coordinator.receive.remote(status), timeout=_SECONDS) and _adopted:
                self._coordinator.set_credentials.remote(_adopted)  # for replicas that start while no daemon runs
        except RayError as error:
            log.info("a heartbeat did not arrive: %s", first_line(error), extra={"event": "replica.heartbeat_lost"})
            self._coordinator = None


def _find() -> Any:
    """None if there is none; RayError if Ray does not answer."""
    try:
        return ray.get_actor(NAME, namespace=NAMESPACE)
    except ValueError:
        return None


def _location_of(coordinator: Any) -> tuple[str, str] | None:
    with suppress(RayError):
        found: tuple[str, str] = ray.get(coordinator.location.remote(), timeout=_SECONDS)
        return found
    return None
