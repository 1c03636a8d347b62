"""What this project promises of a measured figure, and whether it holds."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Bar:
    """A promise of this project and what was measured."""

    promise: str
    limit: float
    measured: float
    holds: bool


def at_most(promise: str, limit: float, measured: float) -> Bar:
    """A promise that a figure stays small."""
    return Bar(f"{promise} <= {limit:g}", limit, round(measured, 3), measured <= limit)


def at_least(promise: str, limit: float, measured: float) -> Bar:
    """A promise that a figure is large enough."""
    return Bar(f"{promise} >= {limit:g}", limit, round(measured, 3), measured >= limit)
