"""How a replica's numbers get out: the door to Ray's metrics, and its twin that drops everything.

What there is to tell is declared in `metric_names`; labels are given in the declared order. A counter that is added 0
is shown as zero. A request only leaves its numbers here: they are handed to Ray by `flush`, for many requests at once
and in another thread. Ray's agent shows all of it about ten seconds later.
"""

import threading
import time
from collections import deque
from typing import Any, Final, Protocol

from mqmk.deploy.metric_names import REPLICA_METRICS, ZERO, Metric

Series = tuple[str, tuple[str, ...]]
"""A metric's name and the values of its labels."""
AT_ONCE: Final = 16
"""Values of histograms that are handed on without a break; each takes some microseconds."""
MOST_KEPT: Final = 100_000
"""Values that wait for `flush`, which comes every two seconds; if it does not come, the oldest are dropped."""
_DECLARED: Final = {metric.name: metric for metric in REPLICA_METRICS}


class Metrics(Protocol):
    """Where numbers go. Any thread may call."""

    def add(self, name: str, value: float, *labels: str) -> None:
        """Count; adding 0 shows a counter before it counts."""

    def observe(self, name: str, value: float, *labels: str) -> None:
        """Put a value into a histogram."""

    def set(self, name: str, value: float, *labels: str) -> None:
        """Tell a gauge's value."""

    def flush(self) -> None:
        """Hand on what was counted."""


class NoMetrics:
    """Drops everything: for a replica that nobody watches, and for tests without Ray."""

    def add(self, name: str, value: float, *labels: str) -> None:
        """Nothing."""

    def observe(self, name: str, value: float, *labels: str) -> None:
        """Nothing."""

    def set(self, name: str, value: float, *labels: str) -> None:
        """Nothing."""

    def flush(self) -> None:
        """Nothing."""


class RayMetrics:
    """Ray's metrics of this process. In a Serve replica they also carry its deployment, replica and application."""

    def __init__(self) -> None:
        self._made = {metric.name: _made(metric) for metric in REPLICA_METRICS}
        self._tags: dict[Series, dict[str, str]] = {}
        self._counted: dict[Series, float] = {}
        self._observed: deque[tuple[Series, float]] = deque(maxlen=MOST_KEPT)
        self._lock = threading.Lock()

    def add(self, name: str, value: float, *labels: str) -> None:
        """Kept until `flush`."""
        series = (name, labels)
        with self._lock:
            self._counted[series] = self._counted.get(series, 0.0) + value

    def observe(self, name: str, value: float, *labels: str) -> None:
        """Kept until `flush`."""
        self._observed.append(((name, labels), value))

    def set(self, name: str, value: float, *labels: str) -> None:
        """At once."""
        self._made[name].set(value, self._tags_of((name, labels)))

    def flush(self) -> None:
        """Hand everything to Ray."""
        for number in range(len(self._observed)):
            series, value = self._observed.popleft()
            self._made[series[0]].observe(value, self._tags_of(series))
            if number % AT_ONCE == AT_ONCE - 1:
                time.sleep(0)  # requests wait for the interpreter
        with self._lock:
            counted, self._counted = self._counted, {}
        for series, value in counted.items():
            self._made[series[0]].inc(value or ZERO, self._tags_of(series))

    def _tags_of(self, series: Series) -> dict[str, str]:
        tags = self._tags.get(series)
        if tags is None:  # label values are bounded, and so is this
            name, labels = series
            tags = self._tags[series] = dict(zip(_DECLARED[name].labels, labels, strict=True))
        return tags


def _made(metric: Metric) -> Any:
    from ray.serve import metrics

    ray: Any = metrics  # its annotations allow one label only
    if metric.kind == "histogram":
        return ray.Histogram(metric.name, metric.description, list(metric.buckets), metric.labels)
    return (ray.Counter if metric.kind == "counter" else ray.Gauge)(metric.name, metric.description, metric.labels)
