"""The local Ray head: its own process group, which outlives the daemon.

    head = ensure_head(RayHeadSettings(folder))    # starts one, or finds the live one
    attach(head)                                   # ray.init with a deadline
    stop_head(folder)                              # stops every process of it

<folder>/head.json      where the head is: `{"address", "pid", ...}`; written when it answers
<folder>/head.lock      taken while a head is started, repaired or stopped: two starters get one head
<folder>/token          Ray's token, readable by the owner only
<folder>/head.log       output of `ray start`; Ray's other logs are in its temporary folder
"""

import fcntl
import json
import logging
import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from mqmk.daemon.errors import RayError
from mqmk.daemon.logs import event
from mqmk.daemon.ports import LOOPBACK
from mqmk.daemon.ray_runtime.head_command import (
    Ports,
    RayHeadSettings,
    choose_ports,
    command,
    environment,
    make_temp_folder,
    temp_folder,
)
from mqmk.daemon.ray_runtime.probe import speaks_grpc
from mqmk.daemon.ray_runtime.processes import Process, arguments, is_alive, process, processes, stop_all, working_folder
from mqmk.matcher.durable import replace_file

SCHEMA: Final = 1
STOP_SECONDS: Final = 2.0
"""How long Ray's processes may take to exit before they are killed."""
LAUNCH: Final = 'exec 9<"$1"; flock -s 9; log=$2; shift 2; setsid "$@" </dev/null >"$log" 2>&1 & echo $!'
"""In its own session and not our child: nobody has to reap it, and none of our signals reach it. While alive it keeps a
lock on the folder of its temporary files: systemd-tmpfiles removes what was not touched for ten days from /tmp, but
nothing below a locked folder."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Head:
    """A local Ray head that answered."""

    address: str
    """For ray.init."""
    leader: Process
    """`ray start`, whose id is that of the session of all other processes."""
    gcs: Process
    raylet: Process
    ports: Ports
    token_file: Path
    temp_folder: Path
    started_at: datetime
    ray_version: str

    @property
    def pid(self) -> int:
        """The process to look for in a list of processes."""
        return self.leader.pid

    @property
    def metrics_port(self) -> int:
        """Where Ray's metrics can be scraped, on loopback."""
        return self.ports.metrics


def ensure_head(settings: RayHeadSettings) -> Head:
    """The live head of this folder, else a new one."""
    with _lock(settings.folder):
        head = find_head(settings.folder)
        if head is None or not _is_healthy(head):
            return _start(settings)
        if head.ray_version != version("ray"):
            raise RayError(
                f"the running Ray head is version {head.ray_version}, installed is {version('ray')}: "
                "`mqmk-daemon stop`, then `mqmk-daemon start`"
            )
        log.info("attached to the running Ray head", extra=event("ray.head_found", address=head.address, pid=head.pid))
        return head


def restart_head(settings: RayHeadSettings) -> Head:
    """Stop what is left of the head and start it again, empty: Serve and all actors are gone.

    Ray could keep them in a file. But a head that is shut down (a reboot) records that its node is gone and not that
    the actors must be restarted; the next head then waits for a controller that never comes.
    """
    with _lock(settings.folder):
        return _start(settings)


def stop_head(folder: Path) -> bool:
    """Stop every process of this folder's head; False if there was none."""
    if not folder.is_dir():
        return False
    with _lock(folder):
        stopped = _stop(folder, STOP_SECONDS)
        shutil.rmtree(temp_folder(folder).parent, ignore_errors=True)
        (folder / "head.json").unlink(missing_ok=True)
    if stopped:
        log.info("stopped the Ray head", extra=event("ray.stopped", processes=stopped))
    return stopped > 0


def find_head(folder: Path) -> Head | None:
    """The head in this folder's record, alive or dead; None without a readable record."""
    try:
        return _from_record(json.loads((folder / "head.json").read_text()))
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        log.warning("cannot parse head.json: %r", error, extra=event("ray.head_record_rejected", folder=folder))
        return None


def head_processes(folder: Path) -> list[Process]:
    """Every live process of this folder's head, also if it is half dead or was never recorded."""
    everyone, leader = list(processes()), getattr(find_head(folder), "leader", None)
    sessions = {each.session for each in everyone if _is_of_temp_folder(each, temp_folder(folder))}
    if leader is not None and is_alive(leader):
        sessions.add(leader.pid)
    orphans = leader.pid if leader is not None and process(leader.pid) is None else None
    here = (folder.resolve(), None)  # a process that is being killed has no working folder any more
    return [
        each
        for each in everyone
        if each.session in sessions or (each.session == orphans and working_folder(each.pid) in here)
    ]


def _start(settings: RayHeadSettings) -> Head:
    before = find_head(settings.folder)
    _stop(settings.folder, grace_seconds=0.0)  # a broken head gets no grace period
    (settings.folder / "head.json").unlink(missing_ok=True)
    begun = time.monotonic()
    try:
        return _launch(settings, before)
    except RayError as error:
        _stop(settings.folder, grace_seconds=0.0)
        if time.monotonic() - begun > settings.start_seconds / 2:
            raise
        # on a busy machine `ray start` itself gives up after 30 s, however long we would wait
        log.warning("retrying the start of Ray: %s", error, extra=event("ray.start_retried"))
        return _launch(settings, before)


def _launch(settings: RayHeadSettings, before: Head | None) -> Head:
    folder, begun = settings.folder.resolve(), time.monotonic()
    ports = choose_ports(settings, before.ports if before else None)
    temp, token = make_temp_folder(settings), _token(folder)
    (temp / "ray_current_cluster").unlink(missing_ok=True)  # Ray writes it when everything is up
    words = [str(temp.parent), str(folder / "head.log"), *command(settings, ports, temp)]
    launch = ["/bin/sh", "-c", LAUNCH, "sh", *words]
    done = subprocess.run(
        launch, cwd=folder, env=environment(settings, token), stdout=subprocess.PIPE, text=True, check=True
    )
    leader = _wait_until_up(int(done.stdout), temp, folder, settings.start_seconds)
    head = _inspect(leader, ports, token, temp)
    replace_file(folder / "head.json", json.dumps(_to_record(head), indent=2).encode())
    seconds = round(time.monotonic() - begun, 1)
    log.info("started a Ray head in %.1f s", seconds, extra=event("ray.started", address=head.address, pid=leader.pid))
    return head


def _wait_until_up(pid: int, temp: Path, folder: Path, seconds: float) -> Process:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        leader = process(pid)
        if leader is None:
            break
        if (temp / "ray_current_cluster").exists() and leader.session == pid:
            return leader
        time.sleep(0.05)
    output = (folder / "head.log").read_text(errors="replace").strip()[-1500:]
    why = "exited at once" if process(pid) is None else f"was not up after {seconds:.0f} s"
    raise RayError(f"the Ray head {why}; `mqmk-daemon doctor` checks this machine. output of `ray start`:\n{output}")


def _inspect(leader: Process, ports: Ports, token: Path, temp: Path) -> Head:
    members = {each.name: each for each in processes() if each.session == leader.pid}
    if "gcs_server" not in members or "raylet" not in members:
        raise RayError(f"the Ray head has no {'raylet' if 'gcs_server' in members else 'GCS'}: see the logs in {temp}")
    address = f"{LOOPBACK}:{ports.gcs}"
    now = datetime.now(UTC)
    return Head(
        address, leader, members["gcs_server"], members["raylet"], ports, token, temp, now, ray_version=version("ray")
    )


def _is_healthy(head: Head) -> bool:
    """Checked once, when a daemon starts; so it may wait a little for a busy head."""
    alive = all(map(is_alive, (head.leader, head.gcs, head.raylet)))
    return alive and all(speaks_grpc(port, timeout=5.0) for port in (head.ports.gcs, head.ports.raylet))


def _stop(folder: Path, grace_seconds: float) -> int:
    """How many processes there were."""
    count = len(head_processes(folder))
    if count and (left := stop_all(lambda: head_processes(folder), grace_seconds)):
        raise RayError(
            f"{len(left)} processes of the Ray head do not exit: `kill -9 {' '.join(str(p.pid) for p in left)}`"
        )
    return count


def _is_of_temp_folder(found: Process, temp: Path) -> bool:
    """Ray's own programs have their folder on the command line; a pager that shows a log of it does not count."""
    if found.name in ("gcs_server", "raylet"):
        return any(argument.startswith("--") and f"={temp}/" in argument for argument in arguments(found.pid))
    words = arguments(found.pid)
    return found.pid == found.session and "--head" in words and f"--temp-dir={temp}" in words


def _token(folder: Path) -> Path:
    path = folder / "token"
    if not path.exists() or not path.read_text().strip() or path.stat().st_mode & 0o077:
        path.unlink(missing_ok=True)  # Ray itself would make it world-readable
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(32))
    return path


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (folder / "head.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # the kernel releases it with the process
        yield


def _to_record(head: Head) -> dict[str, Any]:
    paths = {"token_file": str(head.token_file), "temp_folder": str(head.temp_folder)}
    started = {"started_at": head.started_at.isoformat()}
    return {"schema": SCHEMA, "pid": head.pid, "metrics_port": head.metrics_port} | asdict(head) | paths | started


def _from_record(record: dict[str, Any]) -> Head:
    if record["schema"] != SCHEMA:
        raise ValueError(f"schema {record['schema']}, this version knows {SCHEMA}")
    return Head(
        address=record["address"],
        leader=Process(**record["leader"]),
        gcs=Process(**record["gcs"]),
        raylet=Process(**record["raylet"]),
        ports=Ports(**record["ports"]),
        token_file=Path(record["token_file"]),
        temp_folder=Path(record["temp_folder"]),
        started_at=datetime.fromisoformat(record["started_at"]),
        ray_version=record["ray_version"],
    )
