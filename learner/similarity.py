"""Which pictures of a task contradict each other: the same picture, or nearly, under two labels; and class imbalance.

Two pictures are the same if their bytes are. They are nearly the same if their 63 bit perceptual hashes differ in few
bits, as after a resize or another JPEG quality. Measured on CIFAR-100: within 5 bits are 99 to 100 % of resized,
recompressed, brighter and grey copies, and 3 of 18 million pairs of pictures from two classes. (A crop is not found.)

Candidates share one of `near_bits + 1` bands of the hash: two hashes that differ in at most `near_bits` bits agree on
at least one band. Buckets are capped, so time per picture is bounded whatever the size of the task, at the price that
near copies may be missed among many 100,000 pictures; exact ones never are. Memory grows by about 0.3 kB per picture.
"""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
from jaxtyping import Float
from PIL import Image

HASH_BITS: Final = 63
_SIDE, _LOW, _BUCKET = 32, 8, 256
_FLAT = 2.0  # grey levels; below this spread a picture is blank paper and its hash is noise


@dataclass(frozen=True)
class Lookalike:
    """An earlier picture with another label."""

    number: int  # of the earlier picture, counted from 0 in the order of `add`
    label: int
    distance: int | None  # bits of the perceptual hash; None: the very same bytes


def picture_hash(picture: Image.Image) -> int | None:
    """The signs of the low frequencies (DCT) around their median; None for a blank picture."""
    grey = picture.convert("L").resize((_SIDE, _SIDE), Image.Resampling.LANCZOS)
    pixels = np.asarray(grey, dtype=np.float64)
    if pixels.std() < _FLAT:
        return None
    low = (_COSINES @ pixels @ _COSINES.T).flatten()[1:]  # [8, 8] -> [63]: without the mean brightness
    return int.from_bytes(np.packbits(low > np.median(low)).tobytes(), "big") >> 1


class Lookalikes:
    """Remembers every picture by its hashes, and finds earlier ones that contradict a new one."""

    def __init__(self, near_bits: int | None = 5) -> None:
        if near_bits is not None and not 0 <= near_bits <= 7:
            raise ValueError(f"expected near_bits from 0 to 7 or None, got {near_bits}")
        self._near_bits = near_bits
        self._bands = _bands((near_bits or 0) + 1)
        self._exact: dict[int, int] = {}  # 8 bytes of the sha256 -> number of the first such picture
        self._labels, self._hashes = array("I"), array("Q")
        self._buckets: dict[tuple[int, int], array[int]] = {}

    def add(self, sha256: bytes, picture: Image.Image, label: int) -> Lookalike | None:
        """Remember a picture; the worst contradiction it makes with an earlier one, if any."""
        number = len(self._labels)
        self._labels.append(label)
        first = self._exact.setdefault(int.from_bytes(sha256[:8], "big"), number)
        seen = picture_hash(picture) if self._near_bits is not None else None
        self._hashes.append(seen or 0)
        near = self._nearest(seen, number, label) if seen is not None else None
        if self._labels[first] != label:
            return Lookalike(first, self._labels[first], None)
        return near

    def _nearest(self, seen: int, number: int, label: int) -> Lookalike | None:
        """The nearest hash with another label; puts this one into its buckets on the way."""
        best: Lookalike | None = None
        for band, (shift, mask) in enumerate(self._bands):
            bucket = self._buckets.setdefault((band, seen >> shift & mask), array("I"))
            for other in bucket:
                distance = (self._hashes[other] ^ seen).bit_count()
                near = self._labels[other] != label and distance <= (self._near_bits or 0)
                if near and (best is None or distance < (best.distance or 0)):
                    best = Lookalike(other, self._labels[other], distance)
            if len(bucket) < _BUCKET:
                bucket.append(number)
        return best


def imbalance(counts: Mapping[str, int], most: float) -> str | None:
    """A sentence about classes whose sizes differ too much, or None."""
    largest, smallest = max(counts, key=counts.__getitem__), min(counts, key=counts.__getitem__)
    if counts[largest] <= most * counts[smallest]:
        return None
    return (
        f"expected at most {most:g} samples of the largest class for each of the smallest, "
        f"got {counts[largest]:,} of {largest} and {counts[smallest]:,} of {smallest}"
    )


def _bands(count: int) -> list[tuple[int, int]]:
    """(shift, mask) of bands that together cover the hash."""
    edges = [HASH_BITS * band // count for band in range(count + 1)]
    return [(low, (1 << high - low) - 1) for low, high in pairwise(edges)]


def _cosines() -> Float[np.ndarray, "8 32"]:
    """The first rows of the type II discrete cosine transform."""
    rows, places = np.arange(_LOW)[:, None], np.arange(_SIDE)[None, :]
    return np.cos(np.pi * rows * (2 * places + 1) / (2 * _SIDE))


_COSINES = _cosines()
