"""Which images of a task contradict each other: the same image, or nearly, under two labels; and class imbalance.

Two images are the same if their bytes are. They are nearly the same if their 63 bit perceptual hashes differ in few
bits, as after a resize or another JPEG quality. Measured on CIFAR-100: within 5 bits are 99 to 100 % of resized,
recompressed, brighter and grey copies, and 3 of 18 million pairs of images from two classes. (A crop is not found.)

Candidates share one of `near_bits + 1` bands of the hash: two hashes that differ in at most `near_bits` bits agree on
at least one band. Buckets are capped, so time per image is bounded whatever the size of the task, at the price that
near copies may be missed among many 100,000 images; exact ones never are. Memory grows by about 0.3 kB per image.
"""

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
from jaxtyping import Float
from PIL import Image

HASH_BITS: Final = 63
_SIDE, _LOW, _BUCKET = 32, 8, 256
_FLAT = 2.0  # grey levels; below this spread an image is blank paper and its hash is noise


@dataclass(frozen=True)
class Lookalike:
    """An earlier image with another label."""

    number: int  # of the earlier image, counted from 0 in the order of `add`
    label: int
    distance: int | None  # bits of the perceptual hash; None: the very same bytes


def image_hash(image: Image.Image) -> int | None:
    """The signs of the low frequencies (DCT) around their median; None for a blank image."""
    grey = image.convert("L").resize((_SIDE, _SIDE), Image.Resampling.LANCZOS)
    pixels = np.asarray(grey, dtype=np.float64)
    if pixels.std() < _FLAT:
        return None
    low = (_COSINES @ pixels @ _COSINES.T).flatten()[1:]  # [8, 8] -> [63]: without the mean brightness
    return int.from_bytes(np.packbits(low > np.median(low)).tobytes(), "big") >> 1


class NearHashes:
    """Hashes in bands, to find those that are near to a new one."""

    def __init__(self, near_bits: int) -> None:
        if not 0 <= near_bits <= 7:
            raise ValueError(f"expected near_bits from 0 to 7 or None, got {near_bits}")
        self._near_bits, self._bands = near_bits, _split_bands(near_bits + 1)
        self._buckets: dict[tuple[int, int], array[int]] = {}

    def add(self, number: int, hashes: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Add `hashes[number]`; yields earlier ones that are near, perhaps more than once: distance in bits, number."""
        seen = hashes[number]
        for band, (shift, mask) in enumerate(self._bands):
            bucket = self._buckets.setdefault((band, seen >> shift & mask), array("I"))
            for other in bucket:
                distance = (hashes[other] ^ seen).bit_count()
                if distance <= self._near_bits:
                    yield distance, other
            if len(bucket) < _BUCKET:
                bucket.append(number)


class Lookalikes:
    """An index of images by their hashes, which finds earlier ones that contradict a new one."""

    def __init__(self, near_bits: int | None = 5) -> None:
        self._near = None if near_bits is None else NearHashes(near_bits)
        self._exact: dict[int, int] = {}  # 8 bytes of the sha256 -> number of the first such image
        self.images, self.labels, self.hashes = array("Q"), array("I"), array("Q")  # as they were added; 0: no hash

    def add(self, sha256: bytes, image: Image.Image, label: int) -> Lookalike | None:
        """Add an image; the worst contradiction with an earlier one, if any."""
        number = len(self.labels)
        self.labels.append(label)
        self.images.append(int.from_bytes(sha256[:8], "big"))
        first = self._exact.setdefault(self.images[-1], number)
        self.hashes.append((image_hash(image) or 0) if self._near else 0)
        near = self._nearest(number, label)
        if self.labels[first] != label:
            return Lookalike(first, self.labels[first], None)
        return near

    def _nearest(self, number: int, label: int) -> Lookalike | None:
        """The nearest hash with another label."""
        if self._near is None or not self.hashes[number]:
            return None
        near = self._near.add(number, self.hashes)
        nearest = min((each for each in near if self.labels[each[1]] != label), default=None)
        return None if nearest is None else Lookalike(nearest[1], self.labels[nearest[1]], nearest[0])


def group_copies(hashes: Sequence[int], near_bits: int | None) -> list[list[int]]:
    """The numbers of hashes that are near to each other, or to others of their group; 0 is near to none."""
    group_of = list(range(len(hashes)))
    members = [[number] for number in group_of]
    index = None if near_bits is None else NearHashes(near_bits)
    for number, seen in enumerate(hashes):
        for _, other in index.add(number, hashes) if index and seen else ():
            gone, into = sorted((group_of[other], group_of[number]), key=lambda group: len(members[group]))
            if into != gone:
                for moved in members[gone]:
                    group_of[moved] = into
                members[into] += members[gone]
                members[gone] = []
    return sorted(sorted(group) for group in members if group)


def describe_imbalance(counts: Mapping[str, int], most: float) -> str | None:
    """A sentence about classes whose sizes differ too much, or None."""
    largest, smallest = max(counts, key=counts.__getitem__), min(counts, key=counts.__getitem__)
    if counts[largest] <= most * counts[smallest]:
        return None
    return (
        f"expected at most {most:g} samples of the largest class for each of the smallest, "
        f"got {counts[largest]:,} of {largest} and {counts[smallest]:,} of {smallest}"
    )


def _split_bands(count: int) -> list[tuple[int, int]]:
    """(shift, mask) of bands that together cover the hash."""
    edges = [HASH_BITS * band // count for band in range(count + 1)]
    return [(low, (1 << high - low) - 1) for low, high in pairwise(edges)]


def _dct_rows() -> Float[np.ndarray, "8 32"]:
    """The first rows of the type II discrete cosine transform."""
    rows, places = np.arange(_LOW)[:, None], np.arange(_SIDE)[None, :]
    return np.cos(np.pi * rows * (2 * places + 1) / (2 * _SIDE))


_COSINES = _dct_rows()
