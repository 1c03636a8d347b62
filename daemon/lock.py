"""One daemon for each state directory: a kernel lock, which dies with its process, and a file that says who has it."""

import fcntl
import json
import os
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from mqmk.daemon.errors import DaemonError


@dataclass(frozen=True)
class Holder:
    """The daemon that runs."""

    pid: int
    since: float
    metrics_url: str | None = None


class DaemonLock:
    """Held from `take` until the process ends."""

    def __init__(self, state: Path) -> None:
        self._path = state / "daemon.lock"
        self._descriptor: int | None = None

    def take(self) -> Self:
        """Take the lock, or DaemonError that names who has it. A dead daemon has no lock."""
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if not _locked(descriptor):
            os.close(descriptor)
            holder = holder_of(self._path.parent)
            who = f"process {holder.pid}" if holder else "another process"
            raise DaemonError(
                f"{who} is the daemon of {self._path.parent} already; `mqmk-daemon status` shows it, "
                "`mqmk-daemon stop` ends it, --state chooses another directory"
            )
        self._descriptor = descriptor
        self.say(Holder(os.getpid(), time.time()))
        return self

    def say(self, holder: Holder) -> None:
        """Write down who holds the lock."""
        assert self._descriptor is not None
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, json.dumps(asdict(holder)).encode(), 0)

    def release(self) -> None:
        """Let go; also what the end of the process does."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _locked(descriptor: int, patience: float = 0.5) -> bool:
    """Whether we got the lock; a command that only looks whether it is held may have it for a moment."""
    deadline = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        else:
            return True


def holder_of(state: Path) -> Holder | None:
    """Who runs the daemon of this state directory; None if nobody does."""
    try:
        descriptor = os.open(state / "daemon.lock", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        with suppress(ValueError, TypeError):
            return Holder(**json.loads(os.read(descriptor, 4096)))
        return None
    else:
        return None  # nobody holds it
    finally:
        os.close(descriptor)
