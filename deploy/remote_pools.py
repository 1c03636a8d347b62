"""Where pool versions live for machines that share no folder: `pools/` on S3, laid out as the folder is.

Versions are immutable objects, the card last: what has no card is no version. CURRENT is replaced by a conditional put,
so that of two writers one wins and the other is told. What is served from here is downloaded into a folder of the
machine, one download for all its replicas, and proven by its digest before it has a name there.
"""

import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from mqmk.deploy.object_store import ChangedError, ObjectStore, Stamped, open_objects
from mqmk.matcher.errors import PoolError
from mqmk.matcher.pointer import POINTER, Pointer, parse_pointer, written_pointer
from mqmk.matcher.pool import PromptPool
from mqmk.matcher.pool_files import CARD, TENSORS, PoolVersion, identify
from mqmk.matcher.pool_store import PoolStore
from mqmk.matcher.prompted_vit import BackboneInfo

FOLDER: Final = "pools"
PROBE: Final = "CONDITIONAL"
"""An object that is written once, to see that the store refuses to write it twice."""


class RemotePools:
    """A pool store on S3, and the folder of this machine for what was downloaded from it."""

    def __init__(self, objects: ObjectStore, cache: Path, kept: int = 3) -> None:
        self._objects, self._cache, self._kept = objects, PoolStore(cache), kept
        self._pointer: Stamped | None = None

    @property
    def name(self) -> str:
        """Where it is, for people."""
        return self._objects.name

    def current(self) -> Pointer | None:
        """What CURRENT says; None before the first version."""
        self._pointer = self._objects.read(POINTER, self._pointer)
        return None if self._pointer is None else self._parsed(self._pointer)

    def read(self, at: PoolVersion | Pointer, backbone: BackboneInfo | None = None) -> PromptPool:
        """The pool of a version, downloaded unless it is here already."""
        with self._one_at_a_time():
            folder = self._cache.folder / at.folder
            if not _holds(folder, at):
                self._download(at, folder)
            os.utime(folder)
            self._forget_the_oldest()
            return self._cache.read(at, backbone)

    def add(self, at: PoolVersion | Pointer, folder: Path) -> None:
        """Upload a version; nothing happens if it is there."""
        _check(folder, at, str(folder))
        files = (TENSORS, CARD)
        if self._objects.sizes(at.folder) != {name: (folder / name).stat().st_size for name in files}:
            for name in files:
                self._objects.upload(folder / name, f"{at.folder}/{name}")

    def point_at(self, wanted: PoolVersion | Pointer, ours: Callable[[Pointer], bool]) -> None:
        """Move CURRENT, if it is absent or names a version of ours; ChangedError if it is moved at the same time."""
        now = self._objects.read(POINTER)
        if now is not None:
            before = self._parsed(now)
            if (before.version, before.digest) == (wanted.version, wanted.digest):
                return
            if not ours(before):
                raise PoolError(
                    f"{self.name}/{POINTER} names {before.folder}, which is not a version of this daemon: another one "
                    "publishes there, or this state directory is older than the store. Give one of them another "
                    f"pools.url; if this daemon shall go on, remove the object {POINTER}"
                )
        self._objects.replace(POINTER, written_pointer(wanted.version, wanted.digest), now)

    def check_conditions(self) -> None:
        """PoolError if the store writes over an object that must be absent: two daemons could both win there."""
        try:
            for _ in range(2):
                self._objects.replace(PROBE, b"written once\n", None)
        except ChangedError:
            return
        raise PoolError(f"{self.name}: this store ignores conditional puts (If-None-Match); use one that keeps them")

    def _parsed(self, found: Stamped) -> Pointer:
        return parse_pointer(found.data, f"{self.name}/{POINTER}")

    def _download(self, at: PoolVersion | Pointer, final: Path) -> None:
        part = Path(tempfile.mkdtemp(prefix=".part-", dir=self._cache.folder))
        try:
            for name in (CARD, TENSORS):  # without a card it is no version
                self._objects.download(f"{at.folder}/{name}", part / name)
            _check(part, at, f"{self.name}/{at.folder}")
            shutil.rmtree(final, ignore_errors=True)  # damaged, or it would have been taken
            part.rename(final)
        finally:
            shutil.rmtree(part, ignore_errors=True)

    def _forget_the_oldest(self) -> None:
        """What was not used for longest goes; also what a killed download left."""
        folder = self._cache.folder
        versions = sorted((path for same in self._cache.folders().values() for path in same), key=_last_use)
        for path in [*folder.glob(".part-*"), *versions[: -self._kept]]:
            shutil.rmtree(path, ignore_errors=True)

    @contextmanager
    def _one_at_a_time(self) -> Iterator[None]:
        """Replicas of a machine share the folder; a lock whose holder dies is free."""
        folder = self._cache.folder
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if folder.lstat().st_uid not in (os.getuid(), 0):  # anybody may make a folder among temporary files
                raise PoolError(f"{folder} belongs to somebody else; name another folder as pools.cache")
            with (folder / ".lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                yield
        except OSError as error:
            raise PoolError(f"{folder}: {error.strerror}; name another folder as pools.cache") from error


def open_remote_pools(url: str, cache: Path | None = None, kept: int = 3) -> RemotePools:
    """The store of a `pools.url`; nothing is connected yet."""
    place = f"{url.rstrip('/')}/{FOLDER}"
    return RemotePools(open_objects(place), cache or default_cache(url), kept)


def default_cache(url: str) -> Path:
    """A folder for temporary files of our own; it may vanish at any time."""
    name = hashlib.sha256(url.encode()).hexdigest()[:12]
    return Path(tempfile.gettempdir()) / f"mqmk-pools-{os.getuid()}-{name}"


def _check(folder: Path, at: PoolVersion | Pointer, name: str) -> None:
    found = identify(folder)
    if (found.version, found.digest) != (at.version, at.digest):
        raise PoolError(f"{name}: expected digest {at.digest}, got {found.digest}")


def _holds(folder: Path, at: PoolVersion | Pointer) -> bool:
    with suppress(PoolError):
        _check(folder, at, str(folder))
        return True
    return False


def _last_use(folder: Path) -> float:
    with suppress(FileNotFoundError):
        return folder.stat().st_mtime
    return 0.0
