"""Which versions may be served instead of a damaged one? Its ancestors without a task that it does not have.

A forgotten task must never come back: what CURRENT's own card does not name, with the same data, is not served. If that
card cannot be read, nothing is.
"""

from collections.abc import Iterator

from mqmk.matcher.pointer import Pointer
from mqmk.matcher.pool_cards import PoolCard
from mqmk.matcher.pool_store import PoolSource


def ancestors(store: PoolSource, current: Pointer) -> Iterator[Pointer]:
    """Newest first; their tensors are not checked. PoolError if the store does not answer."""
    card = next((card for card in store.cards(current.version) if card.identity.digest == current.digest), None)
    allowed = card.contents if card else frozenset()
    while card and (card := _parent(store, card)):
        if card.contents and card.contents <= allowed and all(manifest for _, manifest in card.contents):
            yield Pointer(card.identity.version, card.identity.digest)


def _parent(store: PoolSource, card: PoolCard) -> PoolCard | None:
    """None if there is none, if it is missing or damaged, or if it is ambiguous."""
    number = card.identity.parent
    if number is None or number >= card.identity.version:
        return None
    found = store.cards(number)
    return found[0] if len(found) == 1 else None
