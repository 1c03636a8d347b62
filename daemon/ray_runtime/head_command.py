"""How the local Ray head is started: command line, environment, ports.

Each choice has its reason beside it; the names are from the source of Ray 2.60.
"""

import hashlib
import os
import stat
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from mqmk.daemon.errors import RayError
from mqmk.daemon.ports import LOOPBACK, free_port, is_free

PORTS: Final = range(20_000, 32_000)
"""Above the worker ports of other Ray heads, below the kernel's ephemeral ports."""
LONGEST_TEMP_FOLDER: Final = 40
"""The path of a Unix socket has at most 107 characters, and Ray adds up to 65."""


@dataclass(frozen=True)
class RayHeadSettings:
    """Settings of the local Ray head."""

    folder: Path
    """Private to one daemon: token, record, log. One head per folder."""
    num_cpus: int | None = None
    """None: all."""
    num_gpus: int | None = None
    """None: all."""
    object_store_memory: int = 200_000_000
    """Bytes of shared memory."""
    metrics_port: int = 0
    """Port of Ray's metrics; 0 takes a free port and keeps it across restarts."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Additional variables for every process of the head, such as those of Serve."""
    start_seconds: float = 120.0
    """How long a start may take."""


@dataclass(frozen=True)
class Ports:
    """The ports that others must know; Ray chooses the rest."""

    gcs: int
    raylet: int
    metrics: int


def choose_ports(settings: RayHeadSettings, before: Ports | None) -> Ports:
    """The ports of the last start where they are still free, so that addresses survive a restart."""
    gcs = _reuse_or_choose_port(before.gcs if before else 0)
    raylet = _reuse_or_choose_port(before.raylet if before else 0, taken=(gcs,))
    if settings.metrics_port:
        return Ports(gcs, raylet, settings.metrics_port)
    return Ports(gcs, raylet, _reuse_or_choose_port(before.metrics if before else 0, taken=(gcs, raylet)))


def command(settings: RayHeadSettings, ports: Ports, temp_folder: Path) -> list[str]:
    """`ray start --block`: it exits with all its children when one of them dies, and they die with it."""
    flags = {
        "node-ip-address": LOOPBACK,
        "port": ports.gcs,
        "node-manager-port": ports.raylet,
        "metrics-export-port": ports.metrics,
        "min-worker-port": 0,  # the kernel chooses; else 10002 to 19999, which two heads would share
        "max-worker-port": 0,
        "dashboard-agent-listen-port": 0,  # else 52365, which two heads would share
        "dashboard-host": LOOPBACK,
        "include-dashboard": "false",
        "include-log-monitor": "false",  # only copies the workers' output to drivers
        "num-cpus": settings.num_cpus,
        "num-gpus": settings.num_gpus,
        "object-store-memory": settings.object_store_memory,
        "temp-dir": temp_folder,
    }
    given = [f"--{name}={value}" for name, value in flags.items() if value is not None]
    start = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"]
    return [*start, "--disable-usage-stats", "--no-monitor", *given]  # the monitor would only scale a cloud


def environment(settings: RayHeadSettings, token_file: Path) -> dict[str, str]:
    """The variables of every process of the head; a user's own RAY_ variables for another cluster do not leak in."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    ours = {
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # the switch that binds a single node to loopback, on Linux too
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token_file),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_START_HOOK": f"{__name__}.{without_client_server.__name__}",
        "DASHBOARD_METRIC_PORT": "0",  # else 44227, which two heads would share
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",  # else 30 seconds of waiting after SIGTERM
        "RAY_enable_worker_prestart": "0",  # no idle worker of 126 MiB for each CPU
        "RAY_prestart_worker_first_driver": "0",
        "RAY_worker_niceness": "0",  # else 15 for replicas, too; ours is for trainers only (workers/ray_pool.py)
        "RAY_raylet_report_resources_period_milliseconds": "500",  # from here on: an idle head costs half of 3.5 % CPU
        "RAY_memory_monitor_refresh_ms": "500",
        "RAY_event_stats": "0",
        "REPORTER_UPDATE_INTERVAL_MS": "10000",
        "METRICS_RECORD_INTERVAL_S": "30",
        "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",  # a dead proxy is replaced in 5 seconds instead of 26
        "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "2",
        "RAY_ROTATION_MAX_BYTES": "8000000",  # else 512 MB for each process
        "RAY_ROTATION_BACKUP_COUNT": "1",
    }
    return inherited | ours | dict(settings.environment)


def without_client_server(ray_params: Any, _head: bool) -> None:
    """Called by `ray start`: no server for `ray://` clients, which costs 50 MiB and has no flag to disable it."""
    ray_params.ray_client_server_port = None


def make_temp_folder(settings: RayHeadSettings) -> Path:
    """Create the folder for Ray's temporary files inside a private one: Ray makes its own accessible to all."""
    temp = temp_folder(settings.folder)
    temp.parent.mkdir(mode=0o700, exist_ok=True)
    found = temp.parent.lstat()
    if found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode) or found.st_mode & 0o077:
        raise RayError(f"{temp.parent} must be a folder that only you can enter; remove it")
    temp.mkdir(mode=0o700, exist_ok=True)
    return temp


def temp_folder(folder: Path) -> Path:
    """Where Ray keeps sockets and logs: in our folder if its path is short enough, else in /tmp."""
    inside = folder.resolve() / "private" / "ray"
    if len(str(inside)) <= LONGEST_TEMP_FOLDER:
        return inside
    name = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:12]
    return Path("/tmp") / f"mqmk-{os.getuid()}-{name}" / "ray"


def _reuse_or_choose_port(before: int, taken: tuple[int, ...] = ()) -> int:
    """The port of the last start (0: there was none) if it is still free, else another one."""
    return before if before and before not in taken and is_free(before) else free_port(PORTS, taken)
