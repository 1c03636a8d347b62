"""One daemon per state directory: a kernel lock, which dies with its process, on a file that names the owner."""

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
class LockOwner:
    """The daemon that is running."""

    pid: int
    since: float
    metrics_url: str | None = None


class DaemonLock:
    """Ours from `take` until `release` or the end of the process."""

    def __init__(self, state: Path) -> None:
        self._path = state / "daemon.lock"
        self._descriptor: int | None = None

    def take(self) -> Self:
        """Take the lock; DaemonError names the process that has it. A dead daemon has no lock."""
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if not _try_lock(descriptor):
            os.close(descriptor)
            raise already_running(self._path.parent, lock_owner(self._path.parent))
        self._descriptor = descriptor
        self.write_owner(LockOwner(os.getpid(), time.time()))
        return self

    def write_owner(self, owner: LockOwner) -> None:
        """Write who has the lock into its file."""
        assert self._descriptor is not None
        text = json.dumps(asdict(owner)).encode()
        os.pwrite(self._descriptor, text.ljust(os.fstat(self._descriptor).st_size), 0)  # the file is never empty
        os.ftruncate(self._descriptor, len(text))

    def release(self) -> None:
        """Release the lock, as the end of the process does."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _try_lock(descriptor: int, timeout: float = 0.5) -> bool:
    """Whether we got the lock; a command that reads the owner may have it for a moment."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        else:
            return True


def lock_owner(state: Path) -> LockOwner | None:
    """The running daemon of this state directory; None if there is none."""
    try:
        descriptor = os.open(state / "daemon.lock", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        with suppress(ValueError, TypeError):
            return LockOwner(**json.loads(os.read(descriptor, 4096)))
        return None
    else:
        return None
    finally:
        os.close(descriptor)


def already_running(state: Path, owner: LockOwner | None) -> DaemonError:
    """The state directory has a daemon already."""
    process = f"process {owner.pid}" if owner else "another process"
    return DaemonError(
        f"{process} is already the daemon of {state}; `mqmk-daemon status` shows it, `mqmk-daemon stop` stops it, "
        "--state chooses another directory"
    )
