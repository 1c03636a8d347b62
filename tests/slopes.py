"""How fast does something grow? The slope of a line through samples over time, and how sure it is."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf, sqrt

HOUR = 3600.0


@dataclass(frozen=True)
class Slope:
    """Growth an hour, with its standard error."""

    per_hour: float
    error: float

    def is_clearly_above(self, limit: float) -> bool:
        """By more than two standard errors."""
        return self.per_hour - 2 * self.error > limit


def slope(seconds: Sequence[float], values: Sequence[float]) -> Slope:
    """Least squares. Neighbouring samples are alike, so they count as fewer: by the correlation of their residuals."""
    n = len(values)
    if n < 4:
        return Slope(0.0, inf)
    middle, mean = sum(seconds) / n, sum(values) / n
    spread = sum((at - middle) ** 2 for at in seconds)
    steep = sum((at - middle) * (value - mean) for at, value in zip(seconds, values, strict=True)) / spread
    left = [value - mean - steep * (at - middle) for at, value in zip(seconds, values, strict=True)]
    squares = sum(each**2 for each in left)
    if squares <= 1e-12 * max(1.0, mean**2):
        return Slope(steep * HOUR, 0.0)
    alike = min(0.99, max(0.0, sum(one * other for one, other in pairwise(left)) / squares))
    independent = max(3.0, n * (1 - alike) / (1 + alike))
    return Slope(steep * HOUR, sqrt(squares / (independent - 2) / spread) * HOUR)
