"""The local Ray head: a process group of its own that outlives whoever started it, and how to attach to it.

    head = ensure_head(RayHeadSettings(folder))    # starts one, or finds the living one
    attach(head)                                   # ray.init with a deadline
    stop_head(folder)                              # ends every process of it

<folder>/head.json      where the head is: `{"address", "pid", ...}`; written when it answers
<folder>/head.lock      held while a head is started, repaired or stopped: two starters end with one head
<folder>/token          Ray's token, readable by the owner only
<folder>/head.log       what `ray start` said; Ray's other logs are in its temporary folder
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
from mqmk.daemon.processes import Process, arguments, end_all, is_alive, process, processes, working_folder
from mqmk.daemon.ray_command import (
    LOOPBACK,
    Ports,
    RayHeadSettings,
    choose_ports,
    command,
    environment,
    make_temp_folder,
    temp_folder,
)
from mqmk.daemon.ray_probe import speaks_grpc
from mqmk.matcher.durable import replace_file

SCHEMA: Final = 1
STOP_SECONDS: Final = 2.0
"""What Ray's processes get to end by themselves."""
LAUNCH: Final = 'log=$1; shift; setsid "$@" </dev/null >"$log" 2>&1 & echo $!'
"""A session of its own, and no child of ours: nobody has to reap it, and no signal of ours reaches it."""

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
    """The living head of this folder, else a new one."""
    with _locked(settings.folder):
        head = find_head(settings.folder)
        if head is None or not _is_well(head):
            return _start(settings)
        if head.ray_version != version("ray"):
            raise RayError(
                f"the running Ray head is version {head.ray_version}, installed is {version('ray')}: "
                "`mqmk-daemon stop`, then `mqmk-daemon start`"
            )
        log.info("attached to the running Ray head", extra=event("ray.found", address=head.address, pid=head.pid))
        return head


def restart_head(settings: RayHeadSettings) -> Head:
    """End what is left of the head and start it again, empty: Serve and all actors are gone.

    Ray could keep them in a file. But a head that is told to end (a reboot) writes down that its node is gone and not
    that the actors must be started again; the next head then waits for a controller that never comes.
    """
    with _locked(settings.folder):
        return _start(settings)


def stop_head(folder: Path) -> bool:
    """End every process of this folder's head; False if there was none."""
    if not folder.is_dir():
        return False
    with _locked(folder):
        ended = _end(folder, STOP_SECONDS)
        shutil.rmtree(temp_folder(folder).parent, ignore_errors=True)
        (folder / "head.json").unlink(missing_ok=True)
    if ended:
        log.info("stopped the Ray head", extra=event("ray.stopped", processes=ended))
    return ended > 0


def find_head(folder: Path) -> Head | None:
    """The head that this folder's record names, alive or dead; None without a record that can be understood."""
    try:
        return _from_record(json.loads((folder / "head.json").read_text()))
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        log.warning("head.json cannot be understood: %r", error, extra=event("ray.record_broken", folder=folder))
        return None


def head_processes(folder: Path) -> list[Process]:
    """Every living process of this folder's head, also of one that is half dead or was never recorded."""
    everyone, leader = list(processes()), getattr(find_head(folder), "leader", None)
    sessions = {each.session for each in everyone if _is_of_temp_folder(each, temp_folder(folder))}
    if leader is not None and is_alive(leader):
        sessions.add(leader.pid)
    orphans = leader.pid if leader is not None and process(leader.pid) is None else None
    here = (folder.resolve(), None)  # what is killed and still ends has no folder any more
    return [
        each
        for each in everyone
        if each.session in sessions or (each.session == orphans and working_folder(each.pid) in here)
    ]


def _start(settings: RayHeadSettings) -> Head:
    before = find_head(settings.folder)
    _end(settings.folder, grace_seconds=0.0)  # what is broken is not asked
    (settings.folder / "head.json").unlink(missing_ok=True)
    begun = time.monotonic()
    try:
        return _launch(settings, before)
    except RayError as error:
        _end(settings.folder, grace_seconds=0.0)
        if time.monotonic() - begun > settings.start_seconds / 2:
            raise
        # on a busy machine `ray start` itself gives up after 30 s, whatever we would wait
        log.warning("starting Ray once more: %s", error, extra=event("ray.start_again"))
        return _launch(settings, before)


def _launch(settings: RayHeadSettings, before: Head | None) -> Head:
    folder, begun = settings.folder.resolve(), time.monotonic()
    ports = choose_ports(settings, before.ports if before else None)
    temp, token = make_temp_folder(settings), _token(folder)
    (temp / "ray_current_cluster").unlink(missing_ok=True)  # Ray writes it when all is up
    launch = ["/bin/sh", "-c", LAUNCH, "sh", str(folder / "head.log"), *command(settings, ports, temp)]
    done = subprocess.run(
        launch, cwd=folder, env=environment(settings, token), stdout=subprocess.PIPE, text=True, check=True
    )
    leader = _wait_until_up(int(done.stdout), temp, folder, settings.start_seconds)
    head = _look_at(leader, ports, token, temp)
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
    said = (folder / "head.log").read_text(errors="replace").strip()[-1500:]
    why = "ended at once" if process(pid) is None else f"was not up after {seconds:.0f} s"
    raise RayError(f"the Ray head {why}; `mqmk-daemon doctor` checks this machine. `ray start` said:\n{said}")


def _look_at(leader: Process, ports: Ports, token: Path, temp: Path) -> Head:
    members = {each.name: each for each in processes() if each.session == leader.pid}
    if "gcs_server" not in members or "raylet" not in members:
        raise RayError(f"the Ray head has no {'raylet' if 'gcs_server' in members else 'GCS'}: see the logs in {temp}")
    address = f"{LOOPBACK}:{ports.gcs}"
    now = datetime.now(UTC)
    return Head(
        address, leader, members["gcs_server"], members["raylet"], ports, token, temp, now, ray_version=version("ray")
    )


def _is_well(head: Head) -> bool:
    """Asked once, when a daemon starts; so it may wait a little for a head that is busy."""
    alive = all(map(is_alive, (head.leader, head.gcs, head.raylet)))
    return alive and all(speaks_grpc(port, timeout=5.0) for port in (head.ports.gcs, head.ports.raylet))


def _end(folder: Path, grace_seconds: float) -> int:
    """How many processes there were."""
    count = len(head_processes(folder))
    if count and (left := end_all(lambda: head_processes(folder), grace_seconds)):
        raise RayError(
            f"{len(left)} processes of the Ray head do not end: `kill -9 {' '.join(str(p.pid) for p in left)}`"
        )
    return count


def _is_of_temp_folder(found: Process, temp: Path) -> bool:
    """Ray's own programs name their folder; a pager or an editor that has a log of it open is not one of them."""
    if found.name in ("gcs_server", "raylet"):
        return any(argument.startswith("--") and f"={temp}/" in argument for argument in arguments(found.pid))
    said = arguments(found.pid)
    return found.pid == found.session and "--head" in said and f"--temp-dir={temp}" in said


def _token(folder: Path) -> Path:
    path = folder / "token"
    if not path.exists() or not path.read_text().strip() or path.stat().st_mode & 0o077:
        path.unlink(missing_ok=True)  # Ray itself would make it readable for everybody
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(32))
    return path


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (folder / "head.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # the kernel lets go of it with the process
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
