"""Is Ray healthy, and if not, what is to be done? The daemon's loop checks every two seconds.

    health = check(head, proxy=("127.0.0.1", 8000))
    watch, action = decide(watch, health, time.monotonic())
    if action is Action.RESTART:
        head = repair(settings, health)

Division of labour: Serve replaces replicas, its controller and its proxies; `ray start --block` exits when the GCS, the
raylet or an agent dies; restarting the head, attaching and redeploying are ours. A head whose GCS and raylet answer is
never restarted: slow HTTP means high load, and if a proxy does not come back, Serve alone is restarted.
"""

import enum
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from mqmk.daemon.logs import event
from mqmk.daemon.ray_runtime.attach import Call, split_address
from mqmk.daemon.ray_runtime.head import Head, restart_head
from mqmk.daemon.ray_runtime.head_command import RayHeadSettings
from mqmk.daemon.ray_runtime.probe import refuses_connections, speaks_grpc, speaks_http
from mqmk.daemon.ray_runtime.processes import is_alive

SILENCE_SECONDS: Final = 15.0
"""How long a live GCS or raylet may be silent: a busy machine is no reason to restart."""
CLUSTER_SECONDS: Final = 30.0
"""How long an external cluster may be silent: its GCS may be restarting, and Ray ends our process after 60 s."""
API_SECONDS: Final = 10.0
"""How long a cluster may take to answer an API call."""
PROXY_SECONDS: Final = 60.0
"""How long Serve may take to replace its proxy, which needs about 5 s, or 30 s on a busy machine."""

log = logging.getLogger(__name__)


class Part(enum.StrEnum):
    """What may be dead or silent."""

    HEAD = "ray start"
    GCS = "GCS"
    RAYLET = "raylet"
    PROXY = "Serve proxy"
    """Silent: nothing listens at its address."""
    HTTP = "HTTP"
    """Silent: its proxy listens but does not answer in time."""
    CLUSTER = "Ray cluster"
    """An external one."""


@dataclass(frozen=True)
class HeadHealth:
    """The result of one check."""

    dead: tuple[Part, ...] = ()
    """Their processes are gone; only a restart brings them back."""
    silent: tuple[Part, ...] = ()
    """They are alive but did not answer in time; the Serve proxy, whose process Ray may replace, is never dead."""

    @property
    def is_healthy(self) -> bool:
        """Everything is alive and answers."""
        return not self.dead and not self.silent

    @property
    def answers(self) -> bool:
        """We can attach to it; Serve replaces its proxy."""
        return not self.dead and not {*self.silent} - {Part.PROXY, Part.HTTP}

    def __str__(self) -> str:
        found = [f"{part} is dead" for part in self.dead] + [f"{part} does not answer" for part in self.silent]
        return ", ".join(found) or "Ray is healthy"


class Action(enum.Enum):
    """What to do after a check."""

    NONE = enum.auto()
    WAIT = enum.auto()
    """Something is silent but may recover."""
    RESTART_SERVE = enum.auto()
    """Serve does not replace its proxy."""
    RESTART = enum.auto()
    """The head; or, on an external cluster, our connection to it."""


_MAX_SILENCE: Final = {
    Part.GCS: SILENCE_SECONDS,
    Part.RAYLET: SILENCE_SECONDS,
    Part.CLUSTER: CLUSTER_SECONDS,
    Part.PROXY: PROXY_SECONDS,
    Part.HTTP: PROXY_SECONDS,
}


@dataclass(frozen=True)
class Watch:
    """Since when (monotonic seconds) each silent part has been silent."""

    silent_since: tuple[tuple[Part, float], ...] = ()


def check(head: Head, proxy: tuple[str, int] | None = None, timeout: float = 0.5) -> HeadHealth:
    """One cheap check: three files of /proc, two or three local requests."""
    parts = {Part.HEAD: head.leader, Part.GCS: head.gcs, Part.RAYLET: head.raylet}
    dead = tuple(part for part, process in parts.items() if not is_alive(process))
    if dead:
        return HeadHealth(dead)
    ports = {Part.GCS: head.ports.gcs, Part.RAYLET: head.ports.raylet}
    silent = [part for part, port in ports.items() if not speaks_grpc(port, timeout)]
    if proxy and not speaks_http(*proxy, timeout):
        silent.append(Part.PROXY if refuses_connections(*proxy, timeout) else Part.HTTP)
    return HeadHealth(silent=tuple(silent))


def check_cluster(address: str, timeout: float = 0.5) -> HeadHealth:
    """Whether an external cluster answers."""
    host, port = split_address(address)
    return HeadHealth() if speaks_grpc(port, timeout, host) else HeadHealth(silent=(Part.CLUSTER,))


class ClusterCheck:
    """Checks an external cluster that we are attached to: its GCS and Ray's API must answer.

    The API is called in a thread, and its answer is collected by a later check, so that a hanging cluster blocks
    nothing.
    """

    def __init__(self, address: str, call_api: Callable[[], object]) -> None:
        self._address, self._call_api = address, call_api
        self._call: Call[object] | None = None
        self._called_at = 0.0
        self._answers = True

    def check(self, now: float, timeout: float = 0.5) -> HeadHealth:
        """The health as far as it is known now."""
        if self._call is None:
            self._call, self._called_at = Call(lambda _: self._call_api()), now
        elif self._call.is_done():
            self._answers, self._call = self._call.succeeded, None
        elif now - self._called_at > API_SECONDS:
            self._answers = False
        return check_cluster(self._address, timeout) if self._answers else HeadHealth(silent=(Part.CLUSTER,))


def decide(watch: Watch, health: HeadHealth, now: float) -> tuple[Watch, Action]:
    """Restart at once for a dead part, later for a silent one; with what to remember until the next check."""
    before = dict(watch.silent_since)
    since = {part: before.get(part, now) for part in health.silent}
    overdue = {part for part, begun in since.items() if now - begun >= _MAX_SILENCE[part]}
    if health.dead or overdue - {Part.PROXY, Part.HTTP}:
        return Watch(), Action.RESTART
    if Part.PROXY in overdue:
        return Watch(), Action.RESTART_SERVE
    slow_only = not {*since} - {Part.HTTP}
    return Watch(tuple(since.items())), Action.NONE if slow_only and not overdue else Action.WAIT


def repair(settings: RayHeadSettings, health: HeadHealth) -> Head:
    """Restart the head, empty: afterwards, attach and deploy again."""
    log.error("%s: restarting the Ray head", health, extra=event("ray.restart_started", why=str(health)))
    begun = time.monotonic()
    head = restart_head(settings)
    seconds = round(time.monotonic() - begun, 1)
    log.warning(
        "the Ray head is back after %.1f s; the service will follow",
        seconds,
        extra=event("ray.restarted", address=head.address, pid=head.pid, seconds=seconds),
    )
    return head
