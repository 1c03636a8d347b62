"""An in-memory metrics backend, and a calibrated pool."""

import threading
from collections import Counter, defaultdict

import torch
from support.calibration import calibrate
from support.serving.fingerprints import image_bytes, marked_pool

from mqmk.deploy.serving.telemetry.declared import REPLICA_METRICS
from mqmk.matcher.images import decode, prepare
from mqmk.matcher.matchers import match_images
from mqmk.matcher.pool import PromptPool
from mqmk.matcher.prompted_vit import FrozenViT

DECLARED = {metric.name: metric for metric in REPLICA_METRICS}
KNOWN_IMAGES = 60


class RecordingMetrics:
    """Accepts only declared metrics with their declared labels; counters appear after `flush`."""

    def __init__(self) -> None:
        self.counters: Counter[tuple[str, ...]] = Counter()
        self.values: defaultdict[tuple[str, ...], list[float]] = defaultdict(list)
        self.gauges: dict[tuple[str, ...], float] = {}
        self._counted: list[tuple[tuple[str, ...], float]] = []
        self._lock = threading.Lock()

    @property
    def names(self) -> set[str]:
        return {series[0] for series in (*self.counters, *self.values, *self.gauges)}

    def add(self, name: str, value: float, *labels: str) -> None:
        assert value >= 0
        with self._lock:
            self._counted.append((checked("counter", name, labels), value))

    def observe(self, name: str, value: float, *labels: str) -> None:
        self.values[checked("histogram", name, labels)].append(value)

    def set(self, name: str, value: float, *labels: str) -> None:
        self.gauges[checked("gauge", name, labels)] = value

    def flush(self) -> None:
        with self._lock:
            for series, value in self._counted:
                self.counters[series] += value
            self._counted.clear()


def checked(kind: str, name: str, labels: tuple[str, ...]) -> tuple[str, ...]:
    metric = DECLARED[name]
    assert (metric.kind, len(metric.labels)) == (kind, len(labels)), (name, labels)
    assert all(isinstance(label, str) for label in labels)
    return (name, *labels)


def calibrated_pool(vit: FrozenViT, version: int, wrong: int = 15) -> PromptPool:
    """A marked pool, calibrated on noise images, of which `wrong` count as wrong matches."""
    pool = marked_pool(vit, version)
    images = torch.stack([prepare(decode(image_bytes(seed)), vit.info) for seed in range(KNOWN_IMAGES)])
    with torch.inference_mode():
        found = {name: match_images(name, vit, pool, images) for name in ("mqmk", "cascade", "mqmk-ei")}
    true_task = torch.full((KNOWN_IMAGES,), len(pool.tasks) - 1)
    true_task[:wrong] = 0
    right = {name: each.task == true_task for name, each in found.items()}
    return calibrate(pool, found, right, "mqmk")
