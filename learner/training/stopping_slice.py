"""Which training images decide when to stop: a tenth of each class, chosen by content and not trained on.

Held-out images must not decide it, or the figures that they give would be chosen along with the epoch. The choice
depends on the images alone, not on their order or on any seed, so a resumed run and every process of a group make the
same one, and copies of an image stay on one side.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch

from mqmk.learner.data.tasks import Batch, ImageSet

ONE_IN: Final = 10
MIN_IMAGES: Final = 10  # with fewer, chance decides between epochs


@dataclass(frozen=True, eq=False)
class Slice:
    """The images of a side that were chosen, or all the others."""

    whole: ImageSet
    chosen: frozenset[bytes]
    inside: bool
    class_counts: tuple[int, ...]

    def __len__(self) -> int:
        return sum(self.class_counts)

    def batches(self, size: int, seed: int | None, balanced: bool = False) -> Iterator[Batch]:
        """Those of the whole side without the images that belong to the other slice, so some are smaller."""
        for batch in self.whole.batches(size, seed, balanced):
            mine = torch.tensor([(digest in self.chosen) == self.inside for digest in _hash_images(batch)])
            if mine.any():
                yield batch.rows(mine)


def split_off(training: ImageSet) -> tuple[ImageSet, ImageSet | None]:
    """The images to train on and those to stop by; all and None where the task is too small to spare any."""
    counts = Counter(
        (label, digest)
        for batch in training.batches(256, seed=None)
        for label, digest in zip(batch.labels.tolist(), _hash_images(batch), strict=True)
    )
    chosen = frozenset(digest for label in {label for label, _ in counts} for digest in _choose_tenth(counts, label))
    inside, outside = (_count_classes(counts, chosen, side) for side in (True, False))
    if sum(inside) < MIN_IMAGES:
        return training, None
    return Slice(training, chosen, False, outside), Slice(training, chosen, True, inside)


def _count_classes(counts: Counter[tuple[int, bytes]], chosen: frozenset[bytes], inside: bool) -> tuple[int, ...]:
    by_label: Counter[int] = Counter()
    for (label, digest), number in counts.items():
        by_label[label] += number if (digest in chosen) == inside else 0
    return tuple(by_label[label] for label in range(max(by_label) + 1))


def _choose_tenth(counts: Counter[tuple[int, bytes]], label: int) -> list[bytes]:
    """Copies count once, so every class keeps an image to train on."""
    digests = sorted(digest for each, digest in counts if each == label)
    return digests[: len(digests) // ONE_IN]


def _hash_images(batch: Batch) -> list[bytes]:
    """A hash of each image and its label: the same image under two labels is two things to learn."""
    labelled = zip(batch.pixels, batch.labels.tolist(), strict=True)
    return [
        hashlib.blake2b(pixels.numpy().tobytes() + b"%d" % label, digest_size=16).digest() for pixels, label in labelled
    ]
