"""Inject faults into calls to dependencies: the call fails, or it takes effect and its response is lost.

faults = Faults(0.05, seed=0)
FaultyFileSystem.faults = faults                # the bucket: an fsspec file system, `bucket.url: faulty:///folder`
with_faults(ledger, faults, "ledger", ledger_error)  # an object whose every method may fail
FaultyDisk(folder, faults).install()            # the operating system, below one folder, for one thread
"""

import errno
import os
import random
import sqlite3
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial, wraps
from itertools import cycle
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar, cast

from fsspec.implementations.local import LocalFileSystem

T = TypeVar("T")
Outcome = Literal["ok", "failed", "lost"]
Error = Callable[[], Exception]


@dataclass
class Faults:
    """Decides at random which calls fail, and counts them by target."""

    rate: float
    seed: int = 0
    calls: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    lost: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)
        self._thread = threading.local()

    def reset(self, rate: float) -> None:
        """Start over with another failure rate."""
        self.rate, self._rng = rate, random.Random(self.seed)
        for each in (self.calls, self.failed, self.lost):
            each.clear()

    def draw(self, target: str) -> Outcome:
        """The outcome of the next call."""
        self.calls[target] += 1
        chance = self._rng.random()
        self.failed[target] += chance < self.rate / 2
        self.lost[target] += self.rate / 2 <= chance < self.rate
        return "failed" if chance < self.rate / 2 else "lost" if chance < self.rate else "ok"

    def call(self, target: str, error: Error, act: Callable[[], T]) -> T:
        """Make the call, or fail before it, or fail after it."""
        if self.is_in_call:
            return act()
        outcome = self.draw(target)
        if outcome == "failed":
            raise error()
        with self.in_call():
            done = act()
        if outcome == "lost":
            raise error()
        return done

    @property
    def is_in_call(self) -> bool:
        """Whether this thread is already inside a call; nested calls never fail."""
        return getattr(self._thread, "in_call", False)

    @contextmanager
    def in_call(self) -> Iterator[None]:
        """Mark this thread as inside a call."""
        self._thread.in_call = True
        try:
            yield
        finally:
            self._thread.in_call = False

    @property
    def summary(self) -> str:
        """Calls and faults by target."""
        rows = [f"{target}: {n:,} calls, {self.failed[target]} failed, {self.lost[target]} responses lost"
                for target, n in sorted(self.calls.items())]  # fmt: skip
        return "\n".join(rows)


def disk_error() -> OSError:
    """An I/O error of the disk."""
    return OSError(errno.EIO, os.strerror(errno.EIO), "injected")


def ledger_error() -> Exception:
    """An I/O error as SQLite raises it."""
    return sqlite3.OperationalError("disk I/O error (injected)")


def mlflow_error() -> Exception:
    """What an MLflow client raises while the server restarts."""
    from mlflow.exceptions import MlflowException
    from mlflow.protos.databricks_pb2 import TEMPORARILY_UNAVAILABLE

    return MlflowException("503 (injected)", error_code=TEMPORARILY_UNAVAILABLE)


def store_error() -> Exception:
    """One of the errors of a remote store or the connection to it."""
    return next(_STORE_ERRORS)()


_STORE_ERRORS = cycle((lambda: ConnectionResetError("injected"), lambda: TimeoutError("injected"), disk_error))


def with_faults(wrapped: T, faults: Faults, target: str, error: Error) -> T:
    """A proxy of the object whose every method may fail."""
    return cast(T, _FaultyProxy(wrapped, faults, target, error))


class _FaultyProxy:
    def __init__(self, wrapped: Any, faults: Faults, target: str, error: Error) -> None:
        self._wrapped, self._faults, self._target, self._error = wrapped, faults, target, error

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._wrapped, name)
        if not callable(found) or name == "close":
            return found

        @wraps(found)
        def call(*args: Any, **kwargs: Any) -> Any:
            return self._faults.call(self._target, self._error, partial(found, *args, **kwargs))

        return call


class FaultyFileSystem(LocalFileSystem):
    """A local folder that behaves like a flaky remote store: listings, reads, puts, copies and deletes fail."""

    protocol = "faulty"
    cachable = False
    faults: ClassVar[Faults]

    def ls(self, path: str, detail: bool = False, **options: Any) -> Any:
        return self._call(lambda: LocalFileSystem.ls(self, path, detail=detail, **options))

    def find(self, path: str, *args: Any, **options: Any) -> Any:
        return self._call(lambda: LocalFileSystem.find(self, path, *args, **options))

    def open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        file = self._call(lambda: LocalFileSystem.open(self, path, mode, **options))
        return with_faults(file, self.faults, "bucket", store_error) if mode == "rb" else file

    def pipe_file(self, path: str, value: bytes, **options: Any) -> None:
        self._call(lambda: LocalFileSystem.pipe_file(self, path, value, **options))

    def cp_file(self, path1: str, path2: str, **options: Any) -> None:
        self._call(lambda: LocalFileSystem.cp_file(self, path1, path2, **options))

    def rm_file(self, path: str) -> None:
        self._call(lambda: LocalFileSystem.rm_file(self, path))

    def _call(self, act: Callable[[], T]) -> T:
        return self.faults.call("bucket", store_error, act)


class FaultyDisk:
    """open, rename, remove, mkdir, rmdir and fsync below one folder fail with an I/O error in chosen threads.

    Python calls audit hooks before each of them. A hook that raises prevents the call; one that performs it and then
    raises simulates a disk that completed it but reported an error. Hooks cannot be removed: use a fresh process.
    """

    def __init__(self, folder: Path, faults: Faults) -> None:
        self._folder, self._faults = str(folder), faults
        self._threads: frozenset[int] = frozenset()
        self._acts: dict[str, Callable[..., Any]] = {
            "open": self._create_empty, "os.rename": lambda source, target, *_: os.rename(source, target),
            "os.mkdir": lambda path, mode, *_: os.mkdir(path, mode), "os.remove": lambda path, *_: os.remove(path),
            "os.rmdir": lambda path, *_: os.rmdir(path),
        }  # fmt: skip

    def install(self) -> None:
        """Install the hooks; faults start in threads added with `enable_in`."""
        sys.addaudithook(self._hook)
        fsync = os.fsync

        def faulty_fsync(descriptor: int) -> None:  # the only call without an audit event
            if threading.get_ident() in self._threads:
                self._faults.call("disk", disk_error, lambda: fsync(descriptor))
            else:
                fsync(descriptor)

        os.fsync = faulty_fsync

    def enable_in(self, thread: int | None) -> None:
        """Inject faults in this thread as well; None disables them everywhere."""
        self._threads = self._threads | {thread} if thread is not None else frozenset()

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        act = self._acts.get(event)
        if (
            act is None
            or threading.get_ident() not in self._threads
            or self._faults.is_in_call
            or not self._is_below(args[0])
        ):
            return
        outcome = self._faults.draw("disk")
        if outcome == "lost":
            with self._faults.in_call(), suppress(OSError):
                act(*args)
        if outcome != "ok":
            raise disk_error()

    def _is_below(self, path: Any) -> bool:
        return isinstance(path, str | bytes | os.PathLike) and os.fsdecode(path).startswith(self._folder)

    def _create_empty(self, path: Any, mode: str | None, flags: int) -> None:
        """Create the file and leave it empty."""
        if flags & os.O_CREAT:
            os.close(os.open(path, flags | os.O_CREAT, 0o644))
