"""Faults for every outside call: it fails before anything happens, or it happens and the answer is lost.

faults = Faults(0.05, seed=0)
FaultyFiles.faults = faults                     # the bucket: an fsspec file system, `bucket.url: faulty:///folder`
faulty(ledger, faults, "ledger", ledger_error)  # a part whose every method may fail
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
Fate = Literal["well", "failed", "lost"]
Error = Callable[[], Exception]


@dataclass
class Faults:
    """Which calls fail, by chance; what was done to whom is counted."""

    share: float
    seed: int = 0
    asked: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    lost: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._dice = random.Random(self.seed)
        self._thread = threading.local()

    def reset(self, share: float) -> None:
        """From the beginning, with another share."""
        self.share, self._dice = share, random.Random(self.seed)
        for each in (self.asked, self.failed, self.lost):
            each.clear()

    def draw(self, door: str) -> Fate:
        """What becomes of the next call."""
        self.asked[door] += 1
        chance = self._dice.random()
        self.failed[door] += chance < self.share / 2
        self.lost[door] += self.share / 2 <= chance < self.share
        return "failed" if chance < self.share / 2 else "lost" if chance < self.share else "well"

    def around(self, door: str, error: Error, act: Callable[[], T]) -> T:
        """Do it, or not, or do it and say that it failed."""
        if self.is_inside:
            return act()
        fate = self.draw(door)
        if fate == "failed":
            raise error()
        with self.inside():
            done = act()
        if fate == "lost":
            raise error()
        return done

    @property
    def is_inside(self) -> bool:
        """Whether this thread is in a call already: what a call does inside is not hit again."""
        return getattr(self._thread, "inside", False)

    @contextmanager
    def inside(self) -> Iterator[None]:
        """A call."""
        self._thread.inside = True
        try:
            yield
        finally:
            self._thread.inside = False

    @property
    def table(self) -> str:
        """What happened at each door."""
        rows = [f"{door}: {n:,} calls, {self.failed[door]} failed, {self.lost[door]} answers lost"
                for door, n in sorted(self.asked.items())]  # fmt: skip
        return "\n".join(rows)


def disk_error() -> OSError:
    """What a disk says."""
    return OSError(errno.EIO, os.strerror(errno.EIO), "injected")


def ledger_error() -> Exception:
    """The same through SQLite."""
    return sqlite3.OperationalError("disk I/O error (injected)")


def mlflow_error() -> Exception:
    """What a client of MLflow sees of a server that is restarted."""
    from mlflow.exceptions import MlflowException
    from mlflow.protos.databricks_pb2 import TEMPORARILY_UNAVAILABLE

    return MlflowException("503 (injected)", error_code=TEMPORARILY_UNAVAILABLE)


def store_error() -> Exception:
    """What a store far away says, or the line to it."""
    return next(_STORE_ERRORS)()


_STORE_ERRORS = cycle((lambda: ConnectionResetError("injected"), lambda: TimeoutError("injected"), disk_error))


def faulty(part: T, faults: Faults, door: str, error: Error) -> T:
    """The part, with every method at the mercy of the dice."""
    return cast(T, _Faulty(part, faults, door, error))


class _Faulty:
    def __init__(self, part: Any, faults: Faults, door: str, error: Error) -> None:
        self._part, self._faults, self._door, self._error = part, faults, door, error

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._part, name)
        if not callable(found) or name == "close":
            return found

        @wraps(found)
        def call(*given: Any, **named: Any) -> Any:
            return self._faults.around(self._door, self._error, partial(found, *given, **named))

        return call


class FaultyFiles(LocalFileSystem):
    """A folder that behaves like a store far away: listings, reads, puts, copies and deletes fail."""

    protocol = "faulty"
    cachable = False
    faults: ClassVar[Faults]

    def ls(self, path: str, detail: bool = False, **options: Any) -> Any:
        return self._around(lambda: LocalFileSystem.ls(self, path, detail=detail, **options))

    def find(self, path: str, *given: Any, **options: Any) -> Any:
        return self._around(lambda: LocalFileSystem.find(self, path, *given, **options))

    def open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        file = self._around(lambda: LocalFileSystem.open(self, path, mode, **options))
        return faulty(file, self.faults, "bucket", store_error) if mode == "rb" else file

    def pipe_file(self, path: str, value: bytes, **options: Any) -> None:
        self._around(lambda: LocalFileSystem.pipe_file(self, path, value, **options))

    def cp_file(self, path1: str, path2: str, **options: Any) -> None:
        self._around(lambda: LocalFileSystem.cp_file(self, path1, path2, **options))

    def rm_file(self, path: str) -> None:
        self._around(lambda: LocalFileSystem.rm_file(self, path))

    def _around(self, act: Callable[[], T]) -> T:
        return self.faults.around("bucket", store_error, act)


class FaultyDisk:
    """Opens, renames, removes, new folders and fsync below one folder, in one thread, fail with an I/O error.

    Python tells audit hooks of each of them beforehand. A hook that raises prevents it; one that does the same itself
    and raises then is a disk that did it and said that it did not. A hook cannot be taken away: use a fresh process.
    """

    def __init__(self, folder: Path, faults: Faults) -> None:
        self._folder, self._faults = str(folder), faults
        self._thread: int | None = None
        self._acts: dict[str, Callable[..., Any]] = {
            "open": self._opened, "os.rename": lambda source, target, *_: os.rename(source, target),
            "os.mkdir": lambda path, mode, *_: os.mkdir(path, mode), "os.remove": lambda path, *_: os.remove(path),
            "os.rmdir": lambda path, *_: os.rmdir(path),
        }  # fmt: skip

    def install(self) -> None:
        """From here on, in the thread that calls `hit`."""
        sys.addaudithook(self._hook)
        fsync = os.fsync

        def faulty_fsync(descriptor: int) -> None:  # the one call without an audit event
            if threading.get_ident() == self._thread:
                self._faults.around("disk", disk_error, lambda: fsync(descriptor))
            else:
                fsync(descriptor)

        os.fsync = faulty_fsync

    def hit(self, thread: int | None) -> None:
        """The thread that suffers; None spares all."""
        self._thread = thread

    def _hook(self, event: str, given: tuple[Any, ...]) -> None:
        act = self._acts.get(event)
        if act is None or threading.get_ident() != self._thread or self._faults.is_inside or not self._below(given[0]):
            return
        fate = self._faults.draw("disk")
        if fate == "lost":
            with self._faults.inside(), suppress(OSError):
                act(*given)
        if fate != "well":
            raise disk_error()

    def _below(self, path: Any) -> bool:
        return isinstance(path, str | bytes | os.PathLike) and os.fsdecode(path).startswith(self._folder)

    def _opened(self, path: Any, mode: str | None, flags: int) -> None:
        """A file that was made, and nothing in it."""
        if flags & os.O_CREAT:
            os.close(os.open(path, flags | os.O_CREAT, 0o644))
