"""Exporting a replica's metrics through Ray, and a twin that drops them.

Metrics are listed in `declared`; labels are given in the declared order. Adding 0 to a counter exports it as zero.
Requests only append here: `flush` hands everything to Ray, for many requests at once and in another thread. Ray's agent
exports it about ten seconds later.
"""

import threading
import time
from collections import deque
from typing import Any, Final, Protocol

from mqmk.deploy.serving.telemetry.declared import REPLICA_METRICS, ZERO, Metric

Series = tuple[str, tuple[str, ...]]
"""A metric's name and the values of its labels."""
CHUNK: Final = 16
"""Histogram values that are handed to Ray without a pause; each takes some microseconds."""
MAX_PENDING: Final = 100_000
"""Values that may wait for `flush`, which is called every two seconds; beyond it the oldest are dropped."""
_DECLARED: Final = {metric.name: metric for metric in REPLICA_METRICS}


class Metrics(Protocol):
    """A sink for metrics. Any thread may call."""

    def add(self, name: str, value: float, *labels: str) -> None:
        """Increase a counter; adding 0 exports it before it counts."""

    def observe(self, name: str, value: float, *labels: str) -> None:
        """Add a value to a histogram."""

    def set(self, name: str, value: float, *labels: str) -> None:
        """Set a gauge."""

    def flush(self) -> None:
        """Export what was recorded."""


class NoMetrics:
    """Drops everything: for services without Ray."""

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
        self._metrics = {metric.name: _create(metric) for metric in REPLICA_METRICS}
        self._tags: dict[Series, dict[str, str]] = {}
        self._counted: dict[Series, float] = {}
        self._observed: deque[tuple[Series, float]] = deque(maxlen=MAX_PENDING)
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
        self._metrics[name].set(value, self._tags_of((name, labels)))

    def flush(self) -> None:
        """Hand everything to Ray."""
        for number in range(len(self._observed)):
            series, value = self._observed.popleft()
            self._metrics[series[0]].observe(value, self._tags_of(series))
            if number % CHUNK == CHUNK - 1:
                time.sleep(0)  # requests wait for the interpreter
        with self._lock:
            counted, self._counted = self._counted, {}
        for series, value in counted.items():
            self._metrics[series[0]].inc(value or ZERO, self._tags_of(series))

    def _tags_of(self, series: Series) -> dict[str, str]:
        tags = self._tags.get(series)
        if tags is None:  # label values are bounded, and so is this
            name, labels = series
            tags = self._tags[series] = dict(zip(_DECLARED[name].labels, labels, strict=True))
        return tags


def _create(metric: Metric) -> Any:
    from ray.serve import metrics

    ray: Any = metrics  # its annotations allow one label only
    if metric.kind == "histogram":
        return ray.Histogram(metric.name, metric.description, list(metric.buckets), metric.labels)
    return (ray.Counter if metric.kind == "counter" else ray.Gauge)(metric.name, metric.description, metric.labels)
