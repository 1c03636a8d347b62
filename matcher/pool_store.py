"""Where pool versions live and which one is served: `pools/layers/`, `pools/versions/` and the pointer `pools/CURRENT`.

Layers and cards are immutable (pool_cards.py); the pointer is the only thing that moves, by an atomic rename. Absent
pointer: nothing has been learned yet. Every operation may be repeated.
"""

import hashlib
import logging
import re
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Protocol

from mqmk.matcher.durable import replace_file, sync_folder
from mqmk.matcher.errors import PoolError
from mqmk.matcher.pointer import POINTER, Pointer, encode_pointer, read_pointer, version_name
from mqmk.matcher.pool import PromptPool
from mqmk.matcher.pool_cards import (
    PoolCard,
    assemble_pool,
    check_card,
    check_content,
    check_name,
    encode_version,
    named_files,
    parse_card,
)
from mqmk.matcher.pool_files import CARD, PoolVersion, read_pool
from mqmk.matcher.prompted_vit import BackboneInfo

log = logging.getLogger(__name__)
_CARD = re.compile(r"([0-9]+)-([0-9a-f]{12})\.json")

__all__ = ["Pointer", "PoolSource", "PoolStore", "current_backbone", "open_pool"]


class PoolSource(Protocol):
    """What whoever serves needs of a store, wherever it is. What goes wrong is PoolError."""

    @property
    def name(self) -> str:
        """Where it is, for people."""

    def current(self) -> Pointer | None:
        """What CURRENT says; None before the first version."""

    def read(
        self, at: PoolVersion | Pointer, backbone: BackboneInfo | None = None, known: Iterable[PromptPool] = ()
    ) -> PromptPool:
        """The pool of a version, checked against its digest and, if given, its backbone; `known` pools are reused."""

    def cards(self, version: int) -> list[PoolCard]:
        """Every sound card with this number; more than one only after damage from outside."""


def open_pool(place: Path, backbone: BackboneInfo | None = None) -> tuple[Pointer, PromptPool]:
    """A pool from an exported folder, a card of a store, or the current version of a store or state directory."""
    if (place / CARD).is_file():
        identity, pool = read_pool(place, backbone)
        return Pointer(identity.version, identity.digest), pool
    if place.is_file():
        store = PoolStore(place.parent.parent)
        card = store.parse(place.read_bytes())
        return Pointer(card.identity.version, card.identity.digest), store.assemble(card, backbone)
    for store in (PoolStore(place), PoolStore(place / "pools")):
        if current := store.current():
            whole = _whole_pool(store, current)
            return current, read_pool(whole, backbone)[1] if whole else store.read(current, backbone)
    raise PoolError(f"{place}: expected an exported pool ({CARD}), a card, or a pool store ({POINTER}); found none")


def current_backbone(pools: Path) -> BackboneInfo | None:
    """The backbone of the current version; None before the first one."""
    store = PoolStore(pools)
    current = store.current()
    if current is None:
        return None
    whole = _whole_pool(store, current)
    return read_pool(whole)[1].backbone if whole else store.card(current).backbone


def _whole_pool(store: "PoolStore", at: Pointer) -> Path | None:
    """The folder of a version that release 0.1 stored as a whole, in a store that no daemon has upgraded yet."""
    folder = store.folder / version_name(at.version, at.digest)
    return folder if (folder / CARD).is_file() else None


class PoolStore:
    """The folder `pools/` of a state directory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.layers, self.versions = folder / "layers", folder / "versions"

    @property
    def name(self) -> str:
        """Where it is, for people."""
        return str(self.folder)

    def current(self) -> Pointer | None:
        """What CURRENT says; None before the first version."""
        return read_pointer(self.folder)

    def point_at(self, version: PoolVersion | Pointer) -> None:
        """Move CURRENT; durable when this returns."""
        self.folder.mkdir(parents=True, exist_ok=True)
        replace_file(self.folder / POINTER, encode_pointer(version.version, version.digest))

    # Writing

    def write(self, pool: PromptPool, version: int, parent: int | None, cards: Path | None = None) -> PoolVersion:
        """Add a version, durable when this returns; layers that are stored are not written again.

        A candidate's card goes to another folder, `cards`, until it is adopted.
        """
        encoded = encode_version(pool, version, parent, self.has_layer)
        for name, data in encoded.files.items():
            self.add_layer(name, data)
        self._add(cards or self.versions, encoded.identity.card, encoded.card)
        return encoded.identity

    def has_layer(self, name: str) -> bool:
        """Whether a layer or page of this name is stored."""
        return (self.layers / name).exists()

    def add_layer(self, name: str, data: bytes) -> None:
        """Store a layer or page; PoolError if the content is not what its name says."""
        self._add(self.layers, name, check_content(name, data))

    def add_card(self, at: PoolVersion | Pointer, data: bytes) -> None:
        """Store the card of a version whose layers are stored; PoolError if it is another one."""
        self._add(self.versions, at.card, check_card(at, data))

    def _add(self, folder: Path, name: str, data: bytes) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / name
        if not path.exists() or path.read_bytes() != data:  # a damaged one is replaced
            replace_file(path, data)

    def adopt(self, candidate: Path) -> bool:
        """Move a candidate's card into the store; False if it or one of its layers is not there."""
        final = self.versions / candidate.name
        if final.exists():
            return True
        try:
            card = parse_card(candidate.read_bytes(), self.read_layer)
        except (OSError, PoolError):
            return False
        if not all(self.has_layer(name) for name in card.files):
            return False
        self.versions.mkdir(parents=True, exist_ok=True)
        candidate.rename(final)
        sync_folder(self.versions)
        return True

    # Reading

    def card(self, at: PoolVersion | Pointer) -> PoolCard:
        """The card of a version."""
        return self.parse(self.card_bytes(at))

    def parse(self, card: bytes) -> PoolCard:
        """A card whose pages are in this store."""
        return parse_card(card, self.read_layer)

    def card_bytes(self, at: PoolVersion | Pointer) -> bytes:
        """The file of a card."""
        return check_card(at, self._read(self.versions / at.card))

    def read(
        self, at: PoolVersion | Pointer, backbone: BackboneInfo | None = None, known: Iterable[PromptPool] = ()
    ) -> PromptPool:
        """The pool of a version, checked against its digest and, if given, its backbone; `known` pools are reused."""
        return self.assemble(self.card(at), backbone, known)

    def assemble(
        self, card: PoolCard, backbone: BackboneInfo | None = None, known: Iterable[PromptPool] = ()
    ) -> PromptPool:
        """The pool of a card whose layers are in this store."""
        try:
            return assemble_pool(card, self.read_layer, backbone, known)
        except PoolError as error:
            raise PoolError(f"{self.folder}, version {card.identity.version}: {error}") from error

    def check(self, at: PoolVersion | Pointer) -> None:
        """PoolError if the card is damaged or a layer is missing or of another size; their hashes are not computed."""
        card = self.card(at)
        sizes = {task.layer: task.bytes for task in card.tasks}
        for name in sorted(card.files):
            path, size = self.layers / name, sizes.get(name.partition(".")[0])
            if not path.exists() or (size is not None and path.stat().st_size != size):
                raise PoolError(f"{path}: missing or cut short; version {at.version} needs it")

    def holds(self, at: PoolVersion | Pointer) -> bool:
        """Whether a version is here and sound."""
        with suppress(PoolError):
            self.read(at)
            return True
        return False

    def cards(self, version: int) -> list[PoolCard]:
        """Every sound card with this number; more than one only after damage from outside."""
        found = []
        for path in self.paths().get(version, []):
            with suppress(PoolError):
                card = self.parse(self._read(path))
                found += [card] if card.identity.card == path.name else []
        return found

    def paths(self) -> dict[int, list[Path]]:
        """The card files of every version, by number, in order; more than one only after damage from outside."""
        found: dict[int, list[Path]] = {}
        for path in sorted(self.versions.iterdir()) if self.versions.is_dir() else []:
            if name := _CARD.fullmatch(path.name):
                found.setdefault(int(name[1]), []).append(path)
        return dict(sorted(found.items()))

    def read_layer(self, name: str) -> bytes:
        """A layer or page, checked against its name."""
        return check_content(name, self._read(self.layers / check_name(name)))

    def _read(self, path: Path) -> bytes:
        try:
            return path.read_bytes()
        except OSError as error:
            raise PoolError(f"{path}: {error.strerror}") from error

    # Removing

    def remove(self, card: Path) -> None:
        """Take a version out of the store; `collect` frees the layers that nobody else names."""
        card.unlink(missing_ok=True)
        sync_folder(self.versions)

    def collect(self, also: Iterable[PoolCard] = ()) -> list[str] | None:
        """Delete layers that no card of the store and none of the given ones names; not while a build is writing some.

        Nothing is deleted while a card of the store cannot be read, since nobody knows what it names: then the answer
        is None.
        """
        named, unreadable = self._named_files()
        for path, reason in unreadable.items():
            _warn_once(path, reason)
        if unreadable:
            return None
        kept = named.union(*(card.files for card in also))
        removed = [path for path in self._layer_files() if path.name not in kept]
        for path in removed:
            path.unlink(missing_ok=True)
        if removed:
            sync_folder(self.layers)
        return sorted(path.name for path in removed)

    def unreadable_cards(self) -> dict[Path, str]:
        """Cards that keep `collect` from deleting anything, and why they cannot be read."""
        return self._named_files()[1]

    def _named_files(self) -> tuple[set[str], dict[Path, str]]:
        """What the cards of the store name, and which cards cannot be read."""
        named, pages, unreadable = set[str](), dict[str, frozenset[str]](), dict[Path, str]()
        for path in (path for paths in self.paths().values() for path in paths):
            try:
                data = self._read(path)
                if not path.stem.endswith(f"-{hashlib.sha256(data).hexdigest()[:12]}"):
                    raise PoolError("wrong sha256; the file was changed, damaged or cut short")
                named |= named_files(data, self.read_layer, pages)
            except PoolError as error:
                unreadable[path] = str(error)
        return named, unreadable

    def _layer_files(self) -> list[Path]:
        return [path for path in self.layers.iterdir() if path.is_file()] if self.layers.is_dir() else []


@cache
def _warn_once(card: Path, reason: str) -> None:
    log.warning("no layer is deleted, because %s cannot be read: %s; mqmk-daemon doctor says what to do", card, reason,
                extra={"event": "card.unreadable"})  # fmt: skip
