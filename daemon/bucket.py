"""Which complete tasks are in the bucket? The daemon's one door to it, be it a local folder or an object store.

    tasks/<folder>/*.tar, TASK.json     a task, complete once every shard that TASK.json names is there
    tasks/<folder>/*.tar                complete once `_SUCCESS` is written last, or nothing has changed for a while
    tasks/<folder>/_LEARNED             what was learned of it (bucket_tidy.py)
    learned/<folder>/                   what was learned and moved

A quick look costs one listing of the folder names and one of every folder that is not known yet; a look at everything
also finds tasks that were overwritten. Both report a task again until it is known.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, BinaryIO, Final, Literal

from mqmk.daemon import bucket_tidy
from mqmk.daemon.bucket_contents import Contents, contents
from mqmk.daemon.bucket_settling import Settling
from mqmk.daemon.bucket_store import TASKS, Store, StoredFile, local_folder, open_store
from mqmk.daemon.bucket_tidy import Finish
from mqmk.daemon.errors import BucketError
from mqmk.learner.manifest import is_safe_name

if TYPE_CHECKING:
    from mqmk.daemon.bucket_watch import FolderWatch

MOST: Final = 500  # sightings of a quick look; the rest comes with the next one, which follows at once


@dataclass(frozen=True)
class Sighting:
    """A complete task in the bucket that is not known yet, or not in this form."""

    folder: str  # under tasks/
    fingerprint: str  # changes when TASK.json does, or the shards where there is none
    completeness: Literal["manifest", "settled"]


@dataclass(frozen=True)
class StoredShard:
    """A tar in a task's folder."""

    name: str
    bytes: int


class Bucket:
    """Cheap to make: nothing is connected before it is used. One thread looks and waits; others may open and wake."""

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
        self._closed: set[str] = set()  # folders that were learned, as their `_LEARNED` says
        self._stirred = threading.Event()
        self._watch: FolderWatch | None = None
        self.problems: tuple[str, ...] = ()  # what the last look found and could not follow, for people

    @cached_property
    def _store(self) -> Store:
        return open_store(self._url, timeout_seconds=self._timeout_seconds)

    def prepare(self) -> None:
        """Make the folder of a local bucket; an object store must exist."""
        folder = local_folder(self._url)
        try:
            if folder is not None:
                (folder / TASKS).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            reason = f"{folder}: cannot be made: {error.strerror}; choose another bucket.url"
            raise BucketError(reason, passing=False) from error

    def check(self) -> None:
        """BucketError if the bucket cannot be listed."""
        self._store.folders()

    def look(self, known: Mapping[str, str], *, everything: bool = False) -> list[Sighting]:
        """The complete tasks that are not in `known` (folder -> fingerprint that was acted on).

        With `everything`, also known folders whose fingerprint has changed: the slow way, now and then.
        """
        problems: list[str] = []
        found: list[Sighting] = []
        for folder, listed in self._listed(known, everything, problems):
            try:
                present = contents(self._store.files(_place(folder)) if listed is None else listed)
                sighting = self._judged(folder, present, known.get(folder), problems)
            except BucketError as error:
                if error.passing:
                    raise
                problems.append(str(error))  # of this folder alone; the others are none the worse for it
                continue
            if sighting is not None:
                found.append(sighting)
            if len(found) >= MOST and not everything:
                self.wake()
                break
        self.problems = tuple(sorted(problems))
        return found

    def manifest(self, sighting: Sighting) -> bytes | None:
        """TASK.json; None for a task that has none."""
        if sighting.completeness == "settled":
            return None
        try:
            return bucket_tidy.read_manifest(self._store, sighting.folder)
        except FileNotFoundError as error:
            reason = f"{TASKS}/{sighting.folder}/TASK.json was removed since it was seen"
            raise BucketError(reason, passing=True) from error

    def shards(self, folder: str) -> list[StoredShard]:
        """The tars of a folder, by name."""
        found = contents(self._store.files(_place(folder)))
        return [StoredShard(shard.name, shard.bytes) for shard in found.shards if is_safe_name(shard.name)]

    def open(self, folder: str, name: str) -> BinaryIO:
        """A shard, streaming; FileNotFoundError if it is not there, BucketError here and in every read else."""
        if not is_safe_name(name):
            raise BucketError(f"expected the name of a shard, got {name!a:.100}", passing=False)
        return self._store.open(_place(folder), name)

    def wait(self, seconds: float) -> bool:
        """Sleep; True as soon as another look is worth it: a local folder changed, one may be settled, or `wake`."""
        folder = local_folder(self._url)
        if folder is not None and self._watch is None:
            from mqmk.daemon.bucket_watch import FolderWatch  # a worker that only opens shards needs no watchfiles

            self._watch = FolderWatch(folder / TASKS, self._stirred)
        left = self._settling.seconds_left
        stirred = self._stirred.wait(min(seconds, left))
        self._stirred.clear()
        return stirred or left <= seconds

    def wake(self) -> None:
        """End the present or the next `wait`, from any thread."""
        self._stirred.set()

    def finish(self, folder: str, fingerprint: str, how: Finish) -> None:
        """What happens to a folder after it was learned as `fingerprint`; may be killed halfway and done again.

        What was put there since then is neither moved nor deleted, but BucketError if it replaced what was learned.
        """
        _place(folder)
        bucket_tidy.finish(self._store, folder, fingerprint, how)

    def close(self) -> None:
        """Stop watching."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def _listed(
        self, known: Mapping[str, str], everything: bool, problems: list[str]
    ) -> Iterator[tuple[str, list[StoredFile] | None]]:
        """The folders that this look must judge, with what they hold where that is known; odd names are problems."""
        if everything:
            self._closed.clear()
            whole = dict(self._store.everything())
            names = sorted(whole)
        else:
            names = sorted(self._store.folders())
        self._settling.forget_all_but(set(names))
        for name in names:
            if not is_safe_name(name):
                problems += _odd_name(name)
            elif everything:
                yield name, whole[name]
            elif name in self._settling or (name not in known and name not in self._closed):
                yield name, None

    def _judged(self, folder: str, found: Contents, known: str | None, problems: list[str]) -> Sighting | None:
        """The sighting of a folder that holds a complete task other than the known one."""
        fingerprint = found.fingerprint
        if not found.files or (fingerprint is not None and fingerprint == known) or self._is_closed(folder, found):
            self._settling.forget(folder)
            return None
        if not self._keeps_its_promise(folder, found) and not self._settling.is_over(folder, found.state):
            return None
        reason = _unusable(found)
        if fingerprint is None or reason:
            problems.append(f"{TASKS}/{folder}: {reason}")
            return None
        return Sighting(folder, fingerprint, "settled" if found.manifest is None else "manifest")

    def _is_closed(self, folder: str, found: Contents) -> bool:
        """Learned before, says the folder itself, even if the ledger does not know."""
        if not bucket_tidy.is_leftover(self._store, folder, found):
            return False
        self._closed.add(folder)
        return True

    def _keeps_its_promise(self, folder: str, found: Contents) -> bool:
        """Every shard that TASK.json names is there in full: copying tools put TASK.json before the tars.

        What stays incomplete is reported as it is once it has settled: validation says what is missing.
        """
        if found.manifest is None:
            return found.says_success
        manifest = bucket_tidy.promised(self._store, folder)
        there = {(shard.name, shard.bytes) for shard in found.shards}
        return manifest is not None and all((shard.name, shard.bytes) in there for shard in manifest.shards)


def _odd_name(name: str) -> list[str]:
    """What is hidden is meant to be passed over."""
    reason = "expected a folder name of letters, digits and - _ . or space; rename it"
    return [] if name.startswith(".") else [f"{TASKS}/{name!a:.120}: {reason}"]


def _unusable(found: Contents) -> str | None:
    """Why a folder that is complete is no task; one with a manifest is judged by validation."""
    if found.manifest is not None:
        return None
    if found.odd_shards:
        return f"expected shard names like birds-000000.tar, got {found.odd_shards[0]!a:.120}; rename it"
    if not found.shards:
        return "expected .tar shards, found none; `mqmk-daemon pack` makes them from a folder of pictures"
    return None


def _place(folder: str) -> str:
    if not is_safe_name(folder):
        raise BucketError(f"expected the name of a folder under {TASKS}/, got {folder!a:.100}", passing=False)
    return f"{TASKS}/{folder}"
