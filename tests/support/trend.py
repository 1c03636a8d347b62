"""The slope of a line fitted to samples over time, with its standard error."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf, sqrt

HOUR = 3600.0


@dataclass(frozen=True)
class Slope:
    """Growth per hour, with its standard error."""

    per_hour: float
    error: float

    def is_clearly_above(self, limit: float) -> bool:
        """By more than two standard errors."""
        return self.per_hour - 2 * self.error > limit


def fit_slope(seconds: Sequence[float], values: Sequence[float]) -> Slope:
    """Least squares. Samples are autocorrelated, so the effective number is reduced by the correlation of residuals."""
    n = len(values)
    if n < 4:
        return Slope(0.0, inf)
    mean_time, mean = sum(seconds) / n, sum(values) / n
    spread = sum((at - mean_time) ** 2 for at in seconds)
    gradient = sum((at - mean_time) * (value - mean) for at, value in zip(seconds, values, strict=True)) / spread
    residuals = [value - mean - gradient * (at - mean_time) for at, value in zip(seconds, values, strict=True)]
    squares = sum(each**2 for each in residuals)
    if squares <= 1e-12 * max(1.0, mean**2):
        return Slope(gradient * HOUR, 0.0)
    correlation = min(0.99, max(0.0, sum(one * other for one, other in pairwise(residuals)) / squares))
    independent = max(3.0, n * (1 - correlation) / (1 + correlation))
    return Slope(gradient * HOUR, sqrt(squares / (independent - 2) / spread) * HOUR)
