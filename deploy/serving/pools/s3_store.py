"""A pool store on S3, for machines that share no folder; same layout as the local one.

Layers and cards are immutable objects, the card last: what has no card is no version. CURRENT is replaced by a
conditional put, so that of two writers one wins and the other gets an error. What is served from here is downloaded
into a folder of the machine, once for all its replicas and only the layers it lacks, each checked against its hash.
"""

import fcntl
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from mqmk.deploy.serving.pools.s3_objects import ChangedError, ObjectStore, Stamped, open_objects
from mqmk.matcher.errors import PoolError
from mqmk.matcher.pointer import POINTER, Pointer, encode_pointer, parse_pointer
from mqmk.matcher.pool import PromptPool
from mqmk.matcher.pool_cards import LAYER_SUFFIX, PoolCard, check_content, check_name, parse_card
from mqmk.matcher.pool_files import PoolVersion
from mqmk.matcher.pool_store import PoolStore
from mqmk.matcher.prompted_vit import BackboneInfo

FOLDER: Final = "pools"
LAYERS, VERSIONS = "layers", "versions"
PROBE: Final = "CONDITIONAL"
"""An object that is written once, to check that the store rejects a second write."""


class RemotePools:
    """A pool store on S3, with a local cache."""

    def __init__(self, objects: ObjectStore, cache: Path, kept: int = 3) -> None:
        self._objects, self._cache, self._kept = objects, PoolStore(cache), kept
        self._pointer: Stamped | None = None
        self._uploaded: dict[str, int] | None = None
        """Layers that are there, and their sizes; None before they were listed."""

    @property
    def name(self) -> str:
        """Its URL, for messages."""
        return self._objects.name

    def reconnect(self) -> None:
        """Use the credentials that this process has now."""
        self._objects.reconnect()

    def current(self) -> Pointer | None:
        """The pointer CURRENT; None before the first version."""
        self._pointer = self._objects.read(POINTER, self._pointer)
        return None if self._pointer is None else self._parse(self._pointer)

    def read(
        self, at: PoolVersion | Pointer, backbone: BackboneInfo | None = None, known: Iterable[PromptPool] = ()
    ) -> PromptPool:
        """The pool of a version; only layers that neither `known` pools nor this machine have are downloaded."""
        known = tuple(known)
        with self._lock_cache():
            self._sweep()
            card = parse_card(self._card_bytes(at), self._fetch_layer)
            there = {
                name + LAYER_SUFFIX
                for pool in known
                for task in pool.tasks
                for name in (task.layer, task.statistics)
                if name
            }
            for name in sorted(card.files - there):
                self._fetch_layer(name)
            os.utime(self._cache.versions / at.card)
            self._evict()
            return self._cache.assemble(card, backbone, known)

    def cards(self, version: int) -> list[PoolCard]:
        """Every valid card with this number; more than one only after outside interference."""
        found = []
        for name in sorted(self._objects.sizes(VERSIONS, f"{version}-")):
            card = self._objects.read(f"{VERSIONS}/{name}")
            with suppress(PoolError), self._lock_cache():
                parsed = parse_card(card.data, self._fetch_layer) if card else None
                found += [parsed] if parsed and parsed.identity.card == name else []
        return found

    def add(self, at: PoolVersion | Pointer, local: PoolStore) -> None:
        """Upload a version of a local store: the layers that are not there, then the card."""
        card = local.card(at)
        cards = self._objects.sizes(VERSIONS, at.card)
        if self._uploaded is None or cards:  # by another process, or added again: layers may have been removed since
            self._uploaded = self._objects.sizes(LAYERS)
        for name in sorted(card.files):
            if self._uploaded.get(name) != _size(local.layers / name):
                size = len(local.read_layer(name))  # a damaged one must not leave this machine
                self._objects.upload(local.layers / name, f"{LAYERS}/{name}")
                self._uploaded[name] = size
        if cards.get(at.card) != _size(local.versions / at.card):
            self._objects.upload(local.versions / at.card, f"{VERSIONS}/{at.card}")

    def versions(self) -> list[str]:
        """The names of all cards."""
        return sorted(self._objects.sizes(VERSIONS))

    def remove_version(self, name: str) -> None:
        """Delete a card; its layers are deleted by `remove_layers`."""
        self._objects.remove(f"{VERSIONS}/{name}")

    def remove_layers(self, kept: Callable[[str], bool]) -> list[str]:
        """Delete all layers but those to keep, and say which."""
        removed = sorted(name for name in self._objects.sizes(LAYERS) if not kept(name))
        for name in removed:
            self._objects.remove(f"{LAYERS}/{name}")
        self._uploaded = None
        return removed

    def point_at(self, wanted: PoolVersion | Pointer, ours: Callable[[Pointer], bool]) -> None:
        """Move CURRENT if it is absent or names one of our versions; ChangedError if another writer does."""
        now = self._objects.read(POINTER)
        if now is not None:
            before = self._parse(now)
            if (before.version, before.digest) == (wanted.version, wanted.digest):
                return
            if not ours(before):
                raise PoolError(
                    f"{self.name}/{POINTER} names {before.card}, which is not a version of this daemon: another one "
                    "publishes there, or this state directory is older than the store. Give one of them another "
                    f"pools.url; if this daemon should take over, remove the object {POINTER}"
                )
        self._objects.replace(POINTER, encode_pointer(wanted.version, wanted.digest), now)

    def check_conditions(self) -> None:
        """PoolError if the store ignores conditions: two daemons could both win there."""
        try:
            for _ in range(2):
                self._objects.replace(PROBE, b"written once\n", None)
        except ChangedError:
            return
        raise PoolError(f"{self.name}: this store ignores conditional puts (If-None-Match); use one that supports them")

    def _parse(self, found: Stamped) -> Pointer:
        return parse_pointer(found.data, f"{self.name}/{POINTER}")

    def _card_bytes(self, at: PoolVersion | Pointer) -> bytes:
        """The card of a version, from this machine if it is here and sound."""
        with suppress(PoolError):
            return self._cache.card_bytes(at)
        found = self._objects.read(f"{VERSIONS}/{at.card}")
        if found is None:
            raise PoolError(f"{self.name}/{VERSIONS}/{at.card}: no such object")
        self._cache.add_card(at, found.data)
        return found.data

    def _fetch_layer(self, name: str) -> bytes:
        """A layer or page, from this machine if it is here and sound."""
        with suppress(PoolError):
            return self._cache.read_layer(name)
        self._cache.layers.mkdir(parents=True, exist_ok=True)
        part = self._cache.layers / f".{check_name(name)}.part"
        try:
            self._objects.download(f"{LAYERS}/{name}", part)
            data = check_content(name, part.read_bytes())
            part.rename(self._cache.layers / name)
        finally:
            part.unlink(missing_ok=True)
        return data

    def _sweep(self) -> None:
        """Remove what killed downloads left."""
        for part in self._cache.folder.glob("*/.*.part"):
            part.unlink(missing_ok=True)

    def _evict(self) -> None:
        """Versions that were not used for longest go, and layers that no other version here names."""
        cards = sorted((path for paths in self._cache.paths().values() for path in paths), key=_last_use)
        for path in cards[: -self._kept]:
            self._cache.remove(path)
        if len(cards) > self._kept:
            self._cache.collect()

    @contextmanager
    def _lock_cache(self) -> Iterator[None]:
        """Replicas of a machine share the folder; a lock whose holder dies is free."""
        folder = self._cache.folder
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if folder.lstat().st_uid not in (os.getuid(), 0):  # anyone may create a folder in /tmp
                raise PoolError(f"{folder} belongs to another user; set pools.cache to another folder")
            with (folder / ".lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                yield
        except OSError as error:
            raise PoolError(f"{folder}: {error.strerror}; set pools.cache to another folder") from error


def open_remote_pools(url: str, cache: Path | None = None, kept: int = 3) -> RemotePools:
    """The store of a `pools.url`; does not connect yet."""
    place = f"{url.rstrip('/')}/{FOLDER}"
    return RemotePools(open_objects(place), cache or default_cache(url), kept)


def default_cache(url: str) -> Path:
    """A temporary folder per user and URL; it may vanish at any time."""
    name = hashlib.sha256(url.encode()).hexdigest()[:12]
    return Path(tempfile.gettempdir()) / f"mqmk-pools-{os.getuid()}-{name}"


def _last_use(card: Path) -> float:
    with suppress(FileNotFoundError):
        return card.stat().st_mtime
    return 0.0


def _size(path: Path) -> int:
    """-1 if there is no such file: equal to no size of an object."""
    with suppress(FileNotFoundError):
        return path.stat().st_size
    return -1
