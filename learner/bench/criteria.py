"""The limits that benchmarks check a measured figure against."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Criterion:
    """A limit on a figure, and the measurement."""

    promise: str
    limit: float
    measured: float
    holds: bool


def at_most(promise: str, limit: float, measured: float) -> Criterion:
    """The figure must not exceed the limit."""
    return Criterion(f"{promise} <= {limit:g}", limit, round(measured, 3), measured <= limit)


def at_least(promise: str, limit: float, measured: float) -> Criterion:
    """The figure must reach the limit."""
    return Criterion(f"{promise} >= {limit:g}", limit, round(measured, 3), measured >= limit)
