"""Does traffic still look like the held-out images? The population stability index of a task's latest predictions."""

import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from mqmk.matcher.calibration import Reference

WINDOW: Final = 500
"""Drift is that of a task's latest images, at most this many."""


@dataclass
class DriftWindow:
    """The histogram of the latest values, to be compared with a reference."""

    reference: Reference
    size: int = WINDOW
    _bins: deque[int] = field(default_factory=deque)
    _counts: Counter[int] = field(default_factory=Counter)
    _drift: float | None = None
    """None after a new value."""

    def add(self, value: float) -> None:
        """Add a value; the oldest is dropped when the window is full."""
        number = self.reference.bin_of(value)
        self._bins.append(number)
        self._counts[number] += 1
        if len(self._bins) > self.size:
            self._counts[self._bins.popleft()] -= 1
        self._drift = None

    def __len__(self) -> int:
        return len(self._bins)

    @property
    def drift(self) -> float:
        """How far the window is from the reference (`excess_drift`)."""
        if (known := self._drift) is not None:  # most of a thousand tasks got no image since the last export
            return known
        live = [self._counts[number] for number in range(len(self.reference.counts))]
        self._drift = found = excess_drift(self.reference.counts, live)
        return found


def population_stability_index(reference: Sequence[int], live: Sequence[int]) -> float:
    """PSI = sum of (q - p) ln(q / p) over bins; half an image is added to each bin, so that none is empty."""
    p, q = _shares(reference), _shares(live)
    return sum((b - a) * math.log(b / a) for a, b in zip(p, q, strict=True))


def excess_drift(reference: Sequence[int], live: Sequence[int]) -> float:
    """PSI beyond what chance gives in 999 of 1,000 cases, so that hundreds of tasks raise no false alarm.

    Without drift, PSI is (1/n + 1/m) times a chi-squared variable with bins - 1 degrees of freedom, and large where
    images are few.
    """
    n, m = sum(reference), sum(live)
    if not n or not m or len(reference) < 2:
        return 0.0
    return max(0.0, population_stability_index(reference, live) - (1 / n + 1 / m) * _chi_squared(len(reference) - 1))


def _chi_squared(degrees: int) -> float:
    """The 99.9th percentile of the chi-squared distribution (Wilson and Hilferty's approximation)."""
    part = 2 / (9 * degrees)
    return degrees * (1 - part + 3.0902 * math.sqrt(part)) ** 3  # the normal distribution's quantile


def _shares(counts: Sequence[int]) -> list[float]:
    total = sum(counts) + 0.5 * len(counts)
    return [(count + 0.5) / total for count in counts]
