"""Is the local Ray head well, and what is to be done if not? The daemon's loop asks every couple of seconds.

    health = check(head, proxy_port=8000)
    watch, verdict = judge(watch, health, time.monotonic())
    if verdict is Verdict.RESTART:
        head = repair(settings, health)

Who does what: Serve replaces replicas, its controller and its proxies by itself; `ray start --block` ends the head
when the GCS, the raylet or an agent of it dies; the restart is ours, and attaching and deploying after it.
"""

import enum
import logging
import time
from dataclasses import dataclass
from typing import Final

from mqmk.daemon.logs import event
from mqmk.daemon.processes import is_alive
from mqmk.daemon.ray_command import RayHeadSettings
from mqmk.daemon.ray_head import Head, restart_head
from mqmk.daemon.ray_probe import speaks_grpc, speaks_http

SILENCE_SECONDS: Final = 15.0
"""How long a living GCS or raylet may be silent: a busy machine is no reason to restart."""
PROXY_SECONDS: Final = 60.0
"""How long Serve may take to replace its proxy, which needs about 5 s, or 30 s on a busy machine."""

log = logging.getLogger(__name__)


class Part(enum.StrEnum):
    """What can be found dead or silent."""

    HEAD = "ray start"
    GCS = "GCS"
    RAYLET = "raylet"
    PROXY = "Serve proxy"


@dataclass(frozen=True)
class HeadHealth:
    """What one look found."""

    dead: tuple[Part, ...] = ()
    """Their processes are gone; nothing but a restart brings them back."""
    silent: tuple[Part, ...] = ()
    """They live but did not answer in time; the Serve proxy, whose process Ray may replace, is always only silent."""

    @property
    def is_well(self) -> bool:
        """Everything lives and answers."""
        return not self.dead and not self.silent

    @property
    def answers(self) -> bool:
        """One can attach to it; the proxy is replaced by Serve."""
        return not self.dead and not {Part.GCS, Part.RAYLET} & {*self.silent}

    def __str__(self) -> str:
        found = [f"{part} is dead" for part in self.dead] + [f"{part} does not answer" for part in self.silent]
        return ", ".join(found) or "Ray is well"


class Verdict(enum.Enum):
    """What to do after a look."""

    WELL = enum.auto()
    WAIT = enum.auto()
    """Something is silent; it may come back by itself."""
    RESTART = enum.auto()


@dataclass(frozen=True)
class Watch:
    """Since when (monotonic seconds) each silent part has been silent."""

    silent_since: tuple[tuple[Part, float], ...] = ()


def check(head: Head, proxy_port: int | None = None, timeout: float = 0.5) -> HeadHealth:
    """One cheap look: three files of /proc, two or three questions over loopback."""
    parts = {Part.HEAD: head.leader, Part.GCS: head.gcs, Part.RAYLET: head.raylet}
    dead = tuple(part for part, process in parts.items() if not is_alive(process))
    if dead:
        return HeadHealth(dead)
    answers = {
        Part.GCS: speaks_grpc(head.ports.gcs, timeout),
        Part.RAYLET: speaks_grpc(head.ports.raylet, timeout),
        Part.PROXY: proxy_port is None or speaks_http(proxy_port, timeout),
    }
    return HeadHealth(silent=tuple(part for part, answered in answers.items() if not answered))


def judge(watch: Watch, health: HeadHealth, now: float) -> tuple[Watch, Verdict]:
    """Restart at once for a dead part, and for one that was silent too long; what to remember until the next look."""
    before = dict(watch.silent_since)
    since = {part: before.get(part, now) for part in health.silent}
    patience = {part: PROXY_SECONDS if part is Part.PROXY else SILENCE_SECONDS for part in since}
    if health.dead or any(now - begun >= patience[part] for part, begun in since.items()):
        return Watch(), Verdict.RESTART
    return Watch(tuple(since.items())), Verdict.WAIT if since else Verdict.WELL


def repair(settings: RayHeadSettings, health: HeadHealth) -> Head:
    """Start the head again, empty: whoever was attached must attach and deploy again."""
    log.error("%s: restarting the Ray head", health, extra=event("ray.restarting", why=str(health)))
    begun = time.monotonic()
    head = restart_head(settings)
    seconds = round(time.monotonic() - begun, 1)
    log.warning(
        "the Ray head is back after %.1f s; the service follows",
        seconds,
        extra=event("ray.restarted", address=head.address, pid=head.pid, seconds=seconds),
    )
    return head
