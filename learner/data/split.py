"""Which images of a task are held out? Drawn once, class by class, from their content alone.

Of every class the images with the smallest hashes are held out: as many as `holdout` says, at least one if there are
two, and never all of them. Exact and near copies of each other stay on one side, or a task would be tested on what
it was trained on. The same task gives the same split on every machine and in every order of its shards.

A Split travels with the task's report, so that training and evaluation stream the shards and know each image's side.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mqmk.learner.data.similarity import group_copies


def short_hash(sha256: bytes) -> int:
    """What an image is known by here: 64 bits of the hash of its bytes."""
    return int.from_bytes(sha256[:8], "big")


@dataclass(frozen=True)
class Split:
    """The side of every image of a task, by `short_hash`."""

    thresholds: tuple[int, ...]
    """Of each class; images with smaller hashes are held out."""
    held_out: frozenset[int] = frozenset()
    trained: frozenset[int] = frozenset()
    """Images on another side than the threshold says: near copies that stay together, and those with two labels."""
    left_out: frozenset[int] = frozenset()
    """Images that could not be read when the task was validated: neither trained nor tested on."""

    def is_held_out(self, label: int, image: int) -> bool:
        """Whether an image is kept to test the task on."""
        return image in self.held_out or (image < self.thresholds[label] and image not in self.trained)

    def to_json(self) -> dict[str, list[str]]:
        """For the ledger and for workers."""
        parts = (sorted(part) for part in (self.held_out, self.trained, self.left_out))
        names = ("thresholds", "held_out", "trained", "left_out")
        return {name: [f"{n:016x}" for n in part] for name, part in zip(names, (self.thresholds, *parts), strict=True)}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "Split":
        """What `to_json` gave."""
        thresholds, *parts = ([int(n, 16) for n in fields[name]] for name in cls.__dataclass_fields__)
        return cls(tuple(thresholds), *map(frozenset, parts))


@dataclass(frozen=True)
class HashedImage:
    """What the split needs to know of an image."""

    image: int
    label: int
    perceptual_hash: int
    """Its perceptual hash; 0 for blank paper, which resembles nothing."""


@dataclass(frozen=True)
class Side:
    """What was decided for one class."""

    held_out: frozenset[int]
    most_alike: int
    """Images in the largest group of near copies, if it is too large to stay on one side; else 0."""


def draw_split(
    seen: Sequence[HashedImage], classes: int, holdout: float, near_bits: int | None
) -> tuple[Split, list[Side]]:
    """The split of a task, and what was decided class by class."""
    by_class: list[list[HashedImage]] = [[] for _ in range(classes)]
    for each in seen:
        by_class[each.label].append(each)
    labels: dict[int, int] = {}
    unclear = frozenset(each.image for each in seen if labels.setdefault(each.image, each.label) != each.label)
    sides = [_draw_side(members, unclear, holdout, near_bits) for members in by_class]
    thresholds, held_out, trained = [], set[int](), set[int]()
    for members, side in zip(by_class, sides, strict=True):
        images = sorted({each.image for each in members})
        thresholds.append(images[len(side.held_out)] if images else 0)
        below = frozenset(images[: len(side.held_out)])
        held_out |= side.held_out - below
        trained |= below - side.held_out
    return Split(tuple(thresholds), frozenset(held_out), frozenset(trained)), sides


def count_held_out(images: int, holdout: float) -> int:
    """How many of a class are held out."""
    return min(max(1, round(holdout * images)), images - 1) if holdout and images > 1 else 0


def _draw_side(members: Sequence[HashedImage], unclear: frozenset[int], holdout: float, near_bits: int | None) -> Side:
    """Whole groups in the order of their smallest hashes, as long as they fit; else the smallest group."""
    wanted, copies = count_held_out(len(members), holdout), Counter(each.image for each in members)
    groups, most_alike = _group(members, near_bits)
    sizes = {group: sum(copies[image] for image in group) for group in groups if not unclear & set(group)}
    held_out, count = set[int](), 0
    for group, size in sizes.items():
        if count + size <= wanted:
            held_out |= set(group)
            count += size
    if wanted and not held_out and len(groups) > 1 and sizes:
        _, smallest = min((size, group) for group, size in sizes.items())
        held_out |= set(smallest)
    return Side(frozenset(held_out), most_alike)


def _group(members: Sequence[HashedImage], near_bits: int | None) -> tuple[list[tuple[int, ...]], int]:
    """Near copies of each other, each group sorted and all of them; one with most of the class is taken apart."""
    hashes = {each.image: each.perceptual_hash for each in members}
    images = sorted(hashes)
    groups: list[tuple[int, ...]] = []
    most_alike = 0
    for places in group_copies([hashes[image] for image in images], near_bits):
        group = tuple(images[place] for place in places)
        if len(group) > max(1, len(images) // 2):
            most_alike = len(group)
            groups += [(image,) for image in group]
        else:
            groups.append(group)
    return sorted(groups), most_alike
