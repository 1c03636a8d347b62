"""The parts of a dashboard, and queries that several dashboards share. Plain data."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

Look = Literal["stat", "timeseries", "bars", "table", "matrix", "heatmap", "states"]
Good = Literal["high", "low", "none"]


@dataclass(frozen=True)
class Query:
    """PromQL, and the legend of a series."""

    expr: str
    legend: str = ""


@dataclass(frozen=True)
class Panel:
    """One panel."""

    title: str
    description: str
    look: Look
    queries: tuple[Query, ...]
    unit: str = "short"
    width: int = 8
    height: int = 8
    good: Good = "none"
    """Which values are good; decides the colours of `limits`."""
    limits: tuple[float, float] | None = None
    """Where it turns yellow, and where red."""
    words: Mapping[int, tuple[str, str]] = field(default_factory=dict)
    """Text and colour of a value."""


@dataclass(frozen=True)
class Row:
    """Panels under one heading."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Board:
    """One dashboard."""

    uid: str
    title: str
    description: str
    rows: tuple[Row, ...]
    by_task: bool = False
    """Whether it has a variable `task`."""


def number(
    title: str,
    description: str,
    expr: str,
    unit: str = "short",
    good: Good = "none",
    limits: tuple[float, float] | None = None,
) -> Panel:
    """A single large figure."""
    return Panel(title, description, "stat", (Query(expr),), unit, 4, 4, good, limits)


def share(part: str, whole: str, by: str = "", window: str = "$__rate_interval") -> str:
    """The rate of one counter as a share of another's."""
    group = f" by ({by})" if by else ""
    return f"sum{group} (rate({part}[{window}])) / sum{group} (rate({whole}[{window}]))"


def quantile(share: float, name: str, by: str = "", window: str = "$__rate_interval") -> str:
    """A quantile of a histogram."""
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({share}, sum by ({labels}) (rate({name}[{window}])))"


PREDICTIONS: Final = 'route=~"predict|infer"'
LABELLED: Final = share('ray_mqmk_labelled_matches_total{result="matched"}', "ray_mqmk_labelled_matches_total")
ESTIMATED: Final = share("ray_mqmk_estimated_matches_total", "ray_mqmk_estimated_answers_total")
AGREEMENT: Final = share('ray_mqmk_agreement_answers_total{result="same"}', "ray_mqmk_agreement_answers_total")
UNKNOWN: Final = share("ray_mqmk_unknown_answers_total", "ray_mqmk_calibrated_answers_total")
ERRORS: Final = share(
    f'ray_mqmk_requests_total{{{PREDICTIONS},code=~"5.."}}', f"ray_mqmk_requests_total{{{PREDICTIONS}}}"
)
SERVING_RATE: Final = "avg(mqmk_heldout_task_matching_ratio)"
TASK: Final = '{task=~"$task"}'
