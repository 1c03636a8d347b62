"""Which complete tasks are in the bucket? The daemon's only access to it, be it a local folder or an object store.

    tasks/<folder>/*.tar, TASK.json     a task, complete once every shard that TASK.json names is there
    tasks/<folder>/*.tar                complete once `_SUCCESS` is written last, or nothing has changed for a while
    tasks/<folder>/_LEARNED             which of its files were learned (cleanup.py)
    learned/<folder>/                   files that were learned and moved

A scan lists every file, so it also finds tasks that were overwritten; a known, unchanged task costs nothing more. On S3
that is one request per thousand files. In a bucket with more than MOST_LISTED files, a scan lists only the folder names
and the folders that are not known yet, and everything now and then. A task is reported until it is known.
"""

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, BinaryIO, Final

from mqmk.daemon.bucket import cleanup
from mqmk.daemon.bucket.cleanup import AfterLearning
from mqmk.daemon.bucket.listing import Contents
from mqmk.daemon.bucket.manifest import read_manifest
from mqmk.daemon.bucket.settling import Settling
from mqmk.daemon.bucket.store import TASKS, Store, StoredFile, local_folder, open_store
from mqmk.daemon.errors import BucketError
from mqmk.learner.data.manifest import Manifest, is_safe_name
from mqmk.learner.errors import TaskRejected

if TYPE_CHECKING:
    from mqmk.daemon.bucket.watch import FolderWatch

MOST: Final = 500  # tasks reported by one scan; the next scan follows at once and reports the rest
MOST_LISTED: Final = 5_000  # files that every scan lists


@dataclass(frozen=True)
class FoundTask:
    """A complete task in the bucket that is new or has changed."""

    folder: str  # under tasks/
    fingerprint: str  # changes when TASK.json does, or the shards if there is none
    manifest: Manifest | TaskRejected | None = field(compare=False)
    """TASK.json, or why it cannot be used; None if there is none."""


@dataclass(frozen=True)
class StoredShard:
    """A tar in a task's folder."""

    name: str
    bytes: int


class Bucket:
    """Cheap to create: connects on first use. One thread scans and waits; others may open shards and call `wake`."""

    def __init__(
        self,
        url: str,
        *,
        settle_seconds: float,
        timeout_seconds: float = 15.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._url, self._timeout_seconds = url, timeout_seconds
        self._settling = Settling(settle_seconds, clock)
        self._learned: dict[str, str] = {}  # folders whose `_LEARNED` covers everything, and their state then
        self._size = 0  # files, at the last listing of everything
        self._wake_up = threading.Event()
        self._changed = False  # since the last scan, as seen by `wait`
        self._has_failed = False  # the last scan
        self._watch: FolderWatch | None = None
        self.problems: tuple[str, ...] = ()  # folders that the last scan skipped, and why

    @cached_property
    def _store(self) -> Store:
        return open_store(self._url, timeout_seconds=self._timeout_seconds)

    def prepare(self) -> None:
        """Create the folder of a local bucket; an object store must exist."""
        folder = local_folder(self._url)
        try:
            if folder is not None:
                (folder / TASKS).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            reason = f"{folder}: cannot be created: {error.strerror}; choose another bucket.url"
            raise BucketError(reason, transient=False) from error

    def check(self) -> None:
        """BucketError if the bucket cannot be listed."""
        self._store.folders()

    def scan(self, known: Mapping[str, str], *, everything: bool = False) -> list[FoundTask]:
        """The complete tasks that are not in `known` (folder -> fingerprint that was acted on), or have changed.

        With `everything`, finds changes also in a bucket of more than MOST_LISTED files.
        """
        self._changed, self._has_failed = False, True
        self._wake_up.clear()
        problems: list[str] = []
        found: list[FoundTask] = []
        for folder, listed in self._list_folders(known, everything, problems):
            try:
                present = Contents.of(self._store.files(_task_path(folder)) if listed is None else listed)
                task = self._classify(folder, present, known.get(folder), problems)
            except BucketError as error:
                if error.transient:
                    raise
                problems.append(str(error))  # concerns this folder alone
                self._settling.forget(folder)
                continue
            if task is not None:
                found.append(task)
            if len(found) >= MOST and not everything:
                self.wake()
                break
        self.problems, self._has_failed = tuple(sorted(problems)), False
        return found

    def shards(self, folder: str) -> list[StoredShard]:
        """The tars of a folder, by name."""
        found = Contents.of(self._store.files(_task_path(folder)))
        return [StoredShard(shard.name, shard.bytes) for shard in found.shards if is_safe_name(shard.name)]

    def open_shard(self, folder: str, name: str) -> BinaryIO:
        """A shard as a stream; FileNotFoundError if it does not exist, else BucketError, here and in every read."""
        if not is_safe_name(name):
            raise BucketError(f"expected the name of a shard, got {name!a:.100}", transient=False)
        return self._store.open_file(_task_path(folder), name)

    def wait(self, seconds: float) -> bool:
        """Sleep; True as soon as a scan is worthwhile: a local folder changed, one may have settled, or `wake`."""
        folder = local_folder(self._url)
        if folder is not None and self._watch is None:
            from mqmk.daemon.bucket.watch import FolderWatch  # workers only open shards

            self._watch = FolderWatch(folder / TASKS, self._wake_up)
        left = self._seconds_to_settle()
        woken = self._wake_up.wait(min(seconds, left))
        self._wake_up.clear()
        self._changed = self._changed or woken
        return woken or left <= seconds

    def has_changed(self) -> bool:
        """Whether an early scan is worthwhile, for the reasons that end a `wait`."""
        return self._changed or self._wake_up.is_set() or self._seconds_to_settle() <= 0

    def _seconds_to_settle(self) -> float:
        """After a scan that failed, infinite: the next one is due after a pause, and a `wait` must not end before."""
        return math.inf if self._has_failed else self._settling.seconds_left

    def wake(self) -> None:
        """End the current or the next `wait`, from any thread."""
        self._wake_up.set()

    def clean_up(self, folder: str, fingerprint: str, how: AfterLearning, manifest: Manifest | None) -> None:
        """Apply `bucket.after_learning` to a folder that was learned as `fingerprint`; idempotent, also after a kill.

        Files added since then are neither moved nor deleted; BucketError if they replaced what was learned.
        """
        _task_path(folder)
        cleanup.clean_up(self._store, folder, fingerprint, how, manifest)

    def close(self) -> None:
        """Stop watching the folder."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def _list_folders(
        self, known: Mapping[str, str], everything: bool, problems: list[str]
    ) -> Iterator[tuple[str, list[StoredFile] | None]]:
        """The folders to classify, with their files where they are listed already; invalid names are problems."""
        whole = dict(self._store.list_all()) if everything or self._size <= MOST_LISTED else None
        if whole is not None:
            self._size = sum(len(files or ()) for files in whole.values())
        names = sorted(self._store.folders() if whole is None else whole)
        self._settling.forget_all_but(set(names))
        for name in names:
            if not is_safe_name(name):
                problems += _describe_invalid_name(name)
            elif whole is not None:
                yield name, whole[name]
            elif name in self._settling or (name not in known and name not in self._learned):
                yield name, None

    def _classify(self, folder: str, found: Contents, known: str | None, problems: list[str]) -> FoundTask | None:
        """The task of a folder, if it is complete and not the known one.

        A task that stays incomplete is reported once it has settled: validation says what is missing.
        """
        fingerprint = found.fingerprint
        if not found.files or (fingerprint is not None and fingerprint == known) or self._is_learned(folder, found):
            self._settling.forget(folder)
            return None
        try:
            manifest = read_manifest(self._store, folder) if found.manifest is not None else None
        except FileNotFoundError:
            problems.append(f"{TASKS}/{folder}: TASK.json was removed during the scan")
            self._settling.forget(folder)
            return None
        if not _is_complete(found, manifest) and not self._settling.has_settled(folder, found.state):
            return None
        reason = _find_problem(found)
        if fingerprint is None or reason:
            problems.append(f"{TASKS}/{folder}: {reason}")
            return None
        return FoundTask(folder, fingerprint, manifest)

    def _is_learned(self, folder: str, found: Contents) -> bool:
        """Whether the folder itself says that it was learned, even if the ledger does not know."""
        if self._learned.get(folder) == found.state:
            return True
        if not cleanup.is_already_learned(self._store, folder, found):
            return False
        self._learned[folder] = found.state
        return True


def _is_complete(found: Contents, manifest: Manifest | TaskRejected | None) -> bool:
    """Whether every shard that TASK.json names is there in full: copying tools put TASK.json before the tars."""
    if manifest is None:
        return found.is_marked_complete
    present = {(shard.name, shard.bytes) for shard in found.shards}
    return isinstance(manifest, Manifest) and all((shard.name, shard.bytes) in present for shard in manifest.shards)


def _describe_invalid_name(name: str) -> list[str]:
    """Nothing for hidden names, which are skipped on purpose."""
    reason = "expected a folder name of letters, digits and - _ . or space; rename it"
    return [] if name.startswith(".") else [f"{TASKS}/{name!a:.120}: {reason}"]


def _find_problem(found: Contents) -> str | None:
    """Why a complete folder is no task; one with a manifest is left to validation."""
    if found.manifest is not None:
        return None
    if found.misnamed_shards:
        return f"expected shard names like birds-000000.tar, got {found.misnamed_shards[0]!a:.120}; rename it"
    if not found.shards:
        return "expected .tar shards, found none; `mqmk-daemon pack` makes them from a folder of images"
    return None


def _task_path(folder: str) -> str:
    if not is_safe_name(folder):
        raise BucketError(f"expected the name of a folder under {TASKS}/, got {folder!a:.100}", transient=False)
    return f"{TASKS}/{folder}"
