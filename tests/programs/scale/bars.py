"""The measurements after each block of tasks, their limits, and what ten thousand tasks would cost."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Final

import numpy as np

BASELINE_TASK: Final = 10
"""Growth is measured from the row whose tasks lie around this one."""
FAR: Final = 10_000
"""Tasks that the slopes are extrapolated to."""

MANY_ROWS: Final = 5


@dataclass(frozen=True)
class Row:
    """The last `window` of `tasks` tasks; None is what could not be measured, bytes of S3 where it is not used."""

    tasks: int
    window: int
    serving_seconds: float | None = None
    """From the drop to SERVING, median."""
    validate_seconds: float | None = None
    train_seconds: float | None = None
    build_seconds: float | None = None
    """From TRAINED to PUBLISHED: build, evaluate, gate, store; median."""
    roll_out_seconds: float | None = None
    added_store: float | None = None
    """Bytes that a version added, mean."""
    added_mlflow: float | None = None
    added_state: float | None = None
    """Everything in the state directory, store and MLflow included."""
    added_s3: float | None = None
    store_bytes: float | None = None
    mlflow_bytes: float | None = None
    state_bytes: float | None = None
    s3_bytes: float | None = None
    bytes_by_part: Mapping[str, int] = field(default_factory=dict)
    pool_bytes: float | None = None
    """The current pool, as a replica loads it."""
    pool_statistics_bytes: float | None = None
    """What only the builder reads."""
    swap_bytes: float | None = None
    """Read by a replica from CURRENT's move until it reported the new version, median."""
    swap_ms: float | None = None
    request_p50_ms: float | None = None
    """Of all requests while these tasks were learned."""
    request_p99_ms: float | None = None
    quiet_p50_ms: float | None = None
    """Of requests in a row while nothing was learned."""
    requests: int = 0
    """So far, as `failed`."""
    failed: int = 0
    queries: float | None = None
    """That one request took, mean."""
    answers_right: float | None = None
    builder_peak_mib: float | None = None
    daemon_peak_mib: float | None = None
    daemon_mib: float | None = None
    replica_mib: float | None = None
    status_ms: float | None = None
    status_bytes: float | None = None
    pool_ms: float | None = None
    """GET /pool."""
    pool_page_bytes: float | None = None
    accuracy: float | None = None
    """Of the version, on held-out images."""
    minutes: float = 0.0
    """Since the program began."""
    settled: bool = True
    """False where MLflow or S3 did not have every version when bytes were counted."""

    @property
    def centre(self) -> float:
        return self.tasks - (self.window - 1) / 2


def write_row(row: Row, path: Path) -> None:
    with path.open("a") as file:
        file.write(json.dumps(asdict(row)) + "\n")


def read_rows(path: Path) -> list[Row]:
    """In the order of tasks; the newest of rows with the same number."""
    known = {each.name for each in fields(Row)}
    found = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    rows = [Row(**{name: value for name, value in each.items() if name in known}) for each in found]
    return [*{row.tasks: row for row in sorted(rows, key=lambda row: row.tasks)}.values()]


# A line of the table

_COLUMNS: Final[Sequence[tuple[str, str, Callable[[Row], float | None]]]] = (
    ("tasks", "{:,.0f}", lambda row: row.tasks),
    ("served s", "{:.2f}", lambda row: row.serving_seconds),
    ("build s", "{:.2f}", lambda row: row.build_seconds),
    ("+store kB", "{:,.0f}", lambda row: _scaled(row.added_store, 1e3)),
    ("+mlflow kB", "{:,.0f}", lambda row: _scaled(row.added_mlflow, 1e3)),
    ("+state kB", "{:,.0f}", lambda row: _scaled(row.added_state, 1e3)),
    ("+s3 kB", "{:,.0f}", lambda row: _scaled(row.added_s3, 1e3)),
    ("pool MB", "{:,.1f}", lambda row: _scaled(row.pool_bytes, 1e6)),
    ("state MB", "{:,.0f}", lambda row: _scaled(row.state_bytes, 1e6)),
    ("swap kB", "{:,.0f}", lambda row: _scaled(row.swap_bytes, 1e3)),
    ("swap ms", "{:,.0f}", lambda row: row.swap_ms),
    ("p50 ms", "{:.1f}", lambda row: row.request_p50_ms),
    ("p99 ms", "{:.0f}", lambda row: row.request_p99_ms),
    ("quiet ms", "{:.1f}", lambda row: row.quiet_p50_ms),
    ("failed", "{:.0f}", lambda row: row.failed),
    ("queries", "{:.1f}", lambda row: row.queries),
    ("builder MiB", "{:,.0f}", lambda row: row.builder_peak_mib),
    ("daemon MiB", "{:,.0f}", lambda row: row.daemon_peak_mib),
    ("replica MiB", "{:,.0f}", lambda row: row.replica_mib),
    ("status ms", "{:,.0f}", lambda row: row.status_ms),
    ("/pool ms", "{:.0f}", lambda row: row.pool_ms),
    ("/pool kB", "{:,.0f}", lambda row: _scaled(row.pool_page_bytes, 1e3)),
    ("accuracy", "{:.1%}", lambda row: row.accuracy),
)


def _scaled(value: float | None, unit: float) -> float | None:
    return None if value is None else value / unit


def heading() -> str:
    return "  ".join(name.rjust(_width(name)) for name, _, _ in _COLUMNS)


def line(row: Row) -> str:
    return "  ".join(_text(pattern, value(row)).rjust(_width(name)) for name, pattern, value in _COLUMNS)


def _text(pattern: str, value: float | None) -> str:
    return "-" if value is None else pattern.format(value)


def _width(name: str) -> int:
    return max(7, len(name))


# Limits


@dataclass(frozen=True)
class Criterion:
    """A measured value and the most it may be."""

    what: str
    value: float | None
    limit: float
    unit: str = "x"
    detail: str = ""

    @property
    def holds(self) -> bool | None:
        """None if it could not be measured."""
        return None if self.value is None else self.value <= self.limit

    def __str__(self) -> str:
        result = {True: "holds", False: "MISSED", None: "not measured"}[self.holds]
        measured = "-" if self.value is None else f"{self.value:,.2f}"
        return f"{result:12} {self.what:58} {measured:>10} {self.unit:3} of at most {self.limit:,g}  {self.detail}"


def baseline(rows: Sequence[Row]) -> Row:
    """The row around the tenth task, and not the last if there is another."""
    return min(rows[:-1] or rows, key=lambda row: abs(row.centre - BASELINE_TASK))


def bars(rows: Sequence[Row]) -> list[Criterion]:
    """The last row against the one around the tenth task; ratios need two rows."""
    first, last = baseline(rows), rows[-1]

    def growth(what: str, name: str, limit: float, shown: Callable[[float], str]) -> Criterion:
        old, new = getattr(first, name), getattr(last, name)
        ratio = new / old if first is not last and old and new is not None else None
        detail = f"{shown(old)} at {first.tasks}, {shown(new)} at {last.tasks}" if ratio is not None else ""
        return Criterion(what, ratio, limit, detail=detail)

    found = [
        growth("seconds from drop to SERVING", "serving_seconds", 2.0, "{:.2f} s".format),
        growth("bytes added by a version to the pool store", "added_store", 1.2, _kilobytes),
        growth("bytes added by a version to MLflow", "added_mlflow", 1.2, _kilobytes),
        growth("bytes added by a version to the state directory", "added_state", 1.2, _kilobytes),
    ]
    if last.added_s3 is not None:
        found.append(growth("bytes added by a version to S3", "added_s3", 1.2, _kilobytes))
    return [
        *found,
        Criterion("bytes a swap reads, of the pool", _percent(last.swap_bytes, last.pool_bytes), 5.0, "%"),
        growth("request p50 while tasks are learned", "request_p50_ms", 1.3, "{:.1f} ms".format),
        growth("request p50 while nothing is learned", "quiet_p50_ms", 1.3, "{:.1f} ms".format),
        Criterion("peak memory of the builder", _scaled(last.builder_peak_mib, 1e9 / 2**20), 1.5, "GB"),
        _replica_bar(first, last),
        Criterion("store of all versions, in pools", _ratio(last.store_bytes, last.pool_bytes), 3.0,
            detail=f"{_ratio(last.store_bytes, _whole_pool(last)) or 0:.2f} with the builder's statistics in the pool"),
        Criterion("failed requests", float(last.failed), 0.0, "", f"of {last.requests:,}"),
    ]  # fmt: skip


def _replica_bar(first: Row, last: Row) -> Criterion:
    """Python, torch and Ray are there without any pool: the growth of its memory is compared with that of the pool."""
    grown = [
        getattr(last, name) - getattr(first, name)
        for name in ("replica_mib", "pool_bytes")
        if getattr(last, name) is not None and getattr(first, name) is not None
    ]
    if first is last or len(grown) < 2 or grown[1] <= 0:
        return Criterion("growth of the replica, in growth of the pool", None, 2.0)
    detail = f"{grown[0]:,.0f} MiB for {grown[1] / 2**20:,.1f} MiB of pool"
    return Criterion(
        "growth of the replica, in growth of the pool", max(0.0, grown[0] * 2**20 / grown[1]), 2.0, detail=detail
    )


def _whole_pool(row: Row) -> float | None:
    return None if row.pool_bytes is None else row.pool_bytes + (row.pool_statistics_bytes or 0)


def _ratio(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


def _percent(part: float | None, whole: float | None) -> float | None:
    ratio = _ratio(part, whole)
    return None if ratio is None else 100 * ratio


def _kilobytes(value: float) -> str:
    return f"{value / 1e3:,.0f} kB"


# Slopes


@dataclass(frozen=True)
class Slope:
    """A straight line through a value of all rows."""

    what: str
    unit: str
    last: float
    per_thousand: float
    error: float
    """Standard error of `per_thousand`; 0 with two rows."""
    far: float

    def __str__(self) -> str:
        return (
            f"{self.what:44} {self.last:12,.2f} {self.per_thousand:12,.2f} ± {self.error:8,.2f} {self.far:14,.2f}  "
            f"{self.unit}"
        )


_LEVELS: Final[Sequence[tuple[str, str, float, str]]] = (
    ("serving_seconds", "drop to SERVING", 1, "s"),
    ("build_seconds", "build", 1, "s"),
    ("added_store", "a version adds to the store", 1e3, "kB"),
    ("added_mlflow", "a version adds to MLflow", 1e3, "kB"),
    ("added_state", "a version adds to the state directory", 1e3, "kB"),
    ("added_s3", "a version adds to S3", 1e3, "kB"),
    ("pool_bytes", "one pool", 1e6, "MB"),
    ("swap_bytes", "a swap reads", 1e3, "kB"),
    ("swap_ms", "publish to all replicas", 1, "ms"),
    ("request_p50_ms", "request p50 while tasks are learned", 1, "ms"),
    ("request_p99_ms", "request p99 while tasks are learned", 1, "ms"),
    ("quiet_p50_ms", "request p50 while nothing is learned", 1, "ms"),
    ("builder_peak_mib", "builder, peak", 1, "MiB"),
    ("daemon_peak_mib", "daemon, peak", 1, "MiB"),
    ("replica_mib", "replica", 1, "MiB"),
    ("status_ms", "status --json", 1, "ms"),
    ("pool_ms", "GET /pool", 1, "ms"),
)
_TOTALS: Final[Sequence[tuple[str, str | None, str, float, str]]] = (
    ("serving_seconds", None, "all tasks, one after the other", 3600, "hours"),
    ("added_store", "store_bytes", "store", 1e9, "GB"),
    ("added_mlflow", "mlflow_bytes", "MLflow", 1e9, "GB"),
    ("added_state", "state_bytes", "state directory", 1e9, "GB"),
    ("added_s3", "s3_bytes", "S3", 1e9, "GB"),
)
"""The cost of each task, its total so far, and their names."""


def slopes(rows: Iterable[Row], far: int = FAR) -> list[Slope]:
    """Every value of the rows, extrapolated to `far` tasks."""
    own = list(rows)
    found = (_level(own, *each, far=far) for each in _LEVELS)
    return [slope for slope in found if slope]


def _points(rows: Sequence[Row], name: str) -> list[tuple[float, float]]:
    known = [(row.centre, getattr(row, name)) for row in rows]
    return [(at, value) for at, value in known if value is not None]


def _level(rows: Sequence[Row], name: str, what: str, scale: float, unit: str, far: int) -> Slope | None:
    points = _points(rows, name)
    if len(points) < 2:
        return None
    steep, level, error = fit(points)
    return Slope(what, unit, points[-1][1] / scale, 1000 * steep / scale, 1000 * error / scale,
                 (level + steep * far) / scale)  # fmt: skip


def fit(points: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """Least squares: slope, value at 0, standard error of the slope."""
    at, values = np.array(points, dtype=float).T
    steep, level = np.polyfit(at, values, 1)
    left = values - (level + steep * at)
    spread = ((at - at.mean()) ** 2).sum()
    error = np.sqrt((left**2).sum() / (len(at) - 2) / spread) if len(at) > 2 else 0.0
    return float(steep), float(level), float(error)


def totals(rows: Sequence[Row], far: int = FAR) -> list[str]:
    """The totals at `far` tasks, if every task adds what the fitted line says."""
    found = []
    for name, total, what, scale, unit in _TOTALS:
        points = _points(rows, name)
        if len(points) < 2:
            continue
        steep, level, _ = fit(points)
        begun = rows[-1].tasks if total else 0
        so_far = getattr(rows[-1], total) if total else 0.0
        rest = level * (far - begun) + steep * (far**2 - begun**2) / 2
        found.append(f"{what:44} {(so_far + rest) / scale:,.2f} {unit}")
    return found


def slopes_text(rows: Sequence[Row], far: int = FAR) -> str:
    head = f"{'':44} {'last':>12} {'per 1,000':>12}   {'error':>8} {f'at {far:,}':>14}"
    note = [] if len(rows) >= MANY_ROWS else [f"{len(rows)} rows are too few for meaningful slopes"]
    return "\n".join([*note, head, *map(str, slopes(rows, far)), "", f"in all by {far:,} tasks", *totals(rows, far)])
