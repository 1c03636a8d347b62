"""What a replica measures about its requests and answers, under the names that `declared` lists.

Requests and answers are recorded as they come; `export`, called by the heartbeat thread, adds the rest: images in
flight, feedback, drift. Nothing about an image is kept beyond the bins of the drift windows.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final
from weakref import WeakKeyDictionary

from mqmk.deploy.serving.feedback import FeedbackTotals
from mqmk.deploy.serving.pools.live_pool import LoadedPool
from mqmk.deploy.serving.settings import ServiceSpec
from mqmk.deploy.serving.telemetry.declared import FEEDBACK_RESULTS, NO_MATCHER, OTHER, ROUTES
from mqmk.deploy.serving.telemetry.drift import DriftWindow
from mqmk.deploy.serving.telemetry.ray_backend import Metrics
from mqmk.matcher.calibration import TaskReference
from mqmk.matcher.matcher_info import AUTO
from mqmk.matcher.pool import PromptPool
from mqmk.matcher.predictor import Prediction

log = logging.getLogger(__name__)

EXPORT_SECONDS: Final = 2.0
"""Ray's agent collects every ten."""
PREDICTIONS: Final = ("predict", "infer")
_FAILURES: Final = ("429", "500", "503")
_RESULTS: Final = ("matched", "mismatched")


class TaskWindows:
    """The latest scores and margins of the images matched to one task."""

    def __init__(self, usual: TaskReference) -> None:
        self.score = DriftWindow(usual.score)
        self.margin = DriftWindow(usual.margin) if usual.margin is not None else None

    def add(self, prediction: Prediction) -> None:
        """Add an image."""
        self.score.add(prediction.score)
        if self.margin is not None and prediction.margin is not None:
            self.margin.add(prediction.margin)

    @property
    def summary(self) -> tuple[int, float, float]:
        """Images, drift of the score, drift of the margin."""
        return len(self.score), self.score.drift, self.margin.drift if self.margin is not None else 0.0


@dataclass(frozen=True, eq=False)
class _DriftState:
    """The pool that is served, and what its traffic looks like; a new pool starts empty."""

    loaded: LoadedPool | None
    labels: Mapping[str, str]
    windows: dict[str, TaskWindows] = field(default_factory=dict)


class RequestMetrics:
    """Of one replica. Its event loop records, another thread calls `export`."""

    def __init__(
        self,
        metrics: Metrics,
        spec: ServiceSpec,
        *,
        every_seconds: float = EXPORT_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._metrics, self._spec = metrics, spec
        self._every, self._clock, self._exported = every_seconds, clock, float("-inf")
        self._drift: _DriftState | None = None
        self._exported_counts: Counter[tuple[str, str]] = Counter()
        self._names: set[str] = set()
        self._pool_labels: WeakKeyDictionary[PromptPool, Mapping[str, str]] = WeakKeyDictionary()

    def count_request(self, route: str, code: str, matcher: str, seconds: float) -> None:
        """Count a response. Rejections are quick, so they are left out of the latency of predictions."""
        self._metrics.add("mqmk_requests_total", 1.0, route, code, matcher)
        if route in PREDICTIONS and code[0] in "25":
            self._metrics.observe("mqmk_request_duration_seconds", seconds, "total")

    def observe_stages(self, decode: float, queue: float, match: float) -> None:
        """Record the stages of one request."""
        self._metrics.observe("mqmk_request_duration_seconds", decode, "decode")
        self._metrics.observe("mqmk_request_duration_seconds", queue, "queue")
        self._metrics.observe("mqmk_request_duration_seconds", match, "match")

    def observe_batch(self, images: int) -> None:
        """Record the size of a batch."""
        self._metrics.observe("mqmk_batch_images", images)

    def count_answer(self, loaded: LoadedPool, prediction: Prediction, unknown: bool | None) -> None:
        """Record an answer."""
        metrics, matcher, sure = self._metrics, prediction.matcher, loaded.confidence(prediction.matcher)
        task = self._labels(loaded)[prediction.task]
        metrics.add("mqmk_answers_total", 1.0, task)
        metrics.observe("mqmk_queries_per_image", prediction.num_queries, matcher)
        metrics.observe("mqmk_match_score", prediction.score, matcher)
        if prediction.margin is not None:
            metrics.observe("mqmk_match_margin", prediction.margin, matcher)
        if unknown is not None:
            metrics.add("mqmk_calibrated_answers_total", 1.0, matcher)
            metrics.add("mqmk_unknown_answers_total", float(unknown), matcher)
        if sure.calibration:
            probability = sure.calibration.probability(prediction.score, prediction.margin)
            metrics.add("mqmk_estimated_matches_total", probability, task)
            metrics.add("mqmk_estimated_answers_total", 1.0, task)
        if usual := sure.reference.get(prediction.task):
            self._update_drift(loaded, prediction, usual)

    def count_agreement(self, matcher: str, same: bool) -> None:
        """Count a sampled answer that was matched again exactly."""
        self._metrics.add("mqmk_agreement_answers_total", 1.0, matcher, "same" if same else "different")

    def export(self, loaded: LoadedPool | None, inflight: int, totals: FeedbackTotals) -> None:
        """Export periodically, and at once when another pool is loaded. Never raises."""
        if self._drift and self._drift.loaded is loaded and self._clock() < self._exported + self._every:
            return
        self._exported = self._clock()
        try:
            self._export(loaded, inflight, totals)
        except Exception:  # a metric that fails must not end the thread that calls
            log.exception("metrics could not be exported", extra={"event": "metrics.export_failed"})

    def _export(self, loaded: LoadedPool | None, inflight: int, totals: FeedbackTotals) -> None:
        drift = self._drift
        if drift is None or drift.loaded is not loaded:
            drift = self._start_drift(loaded)
        self._metrics.set("mqmk_inflight_images", inflight)
        self._metrics.set("mqmk_inflight_limit_images", self._spec.serve.max_queue)
        self._export_feedback(totals, drift.labels)
        self._export_drift(drift)
        self._metrics.flush()

    def _labels(self, loaded: LoadedPool) -> Mapping[str, str]:
        if (labels := self._pool_labels.get(loaded.pool)) is None:
            labels = self._pool_labels[loaded.pool] = self._assign_labels([task.name for task in loaded.pool.tasks])
        return labels

    def _assign_labels(self, names: Sequence[str]) -> Mapping[str, str]:
        """Tasks that had a series keep it, even once forgotten: Ray exports a series until the replica ends."""
        for name in names:
            if len(self._names) < self._spec.task_labels:
                self._names.add(name)
        return {name: name if name in self._names else OTHER for name in names}

    def _update_drift(self, loaded: LoadedPool, prediction: Prediction, usual: TaskReference) -> None:
        drift = self._drift
        if drift is None or drift.loaded is not loaded:
            return  # an answer of the previous pool, or the first one of the next
        windows = drift.windows.get(prediction.task)
        if windows is None:
            windows = drift.windows[prediction.task] = TaskWindows(usual)
        windows.add(prediction)

    # Zero at the start, and when another pool is served

    def _start_drift(self, loaded: LoadedPool | None) -> _DriftState:
        labels = self._labels(loaded) if loaded else {}
        if self._drift is None:
            self._show_requests(NO_MATCHER)
            for result in FEEDBACK_RESULTS:
                self._metrics.add("mqmk_feedback_total", 0.0, result)
        else:  # tasks that are gone
            self._show_drift(dict.fromkeys(self._drift.labels.values(), (0, 0.0, 0.0)))
        if loaded:
            self._show_matcher(loaded.auto if self._spec.serve.matcher == AUTO else self._spec.serve.matcher)
        for label in dict.fromkeys(labels.values()):
            self._show_task(label)
        self._drift = _DriftState(loaded, labels)
        return self._drift

    def _show_requests(self, matcher: str) -> None:
        for route in PREDICTIONS:
            for code in _FAILURES if matcher == NO_MATCHER else ("200", *_FAILURES):
                self._metrics.add("mqmk_requests_total", 0.0, route, code, matcher)
        for route in ROUTES:
            if route not in PREDICTIONS and matcher == NO_MATCHER:
                self._metrics.add("mqmk_requests_total", 0.0, route, "200", matcher)

    def _show_matcher(self, matcher: str) -> None:
        self._show_requests(matcher)
        self._metrics.add("mqmk_calibrated_answers_total", 0.0, matcher)
        self._metrics.add("mqmk_unknown_answers_total", 0.0, matcher)
        for result in ("same", "different"):
            self._metrics.add("mqmk_agreement_answers_total", 0.0, matcher, result)

    def _show_task(self, label: str) -> None:
        for name in ("mqmk_answers_total", "mqmk_estimated_matches_total", "mqmk_estimated_answers_total"):
            self._metrics.add(name, 0.0, label)
        for result in _RESULTS:
            self._metrics.add("mqmk_labelled_matches_total", 0.0, label, result)

    # Feedback and drift

    def _export_feedback(self, totals: FeedbackTotals, labels: Mapping[str, str]) -> None:
        for result in FEEDBACK_RESULTS:
            if delta := self._delta("feedback", result, totals.results[result]):
                self._metrics.add("mqmk_feedback_total", delta, result)
        for result, by_task in zip(_RESULTS, (totals.matched, totals.mismatched), strict=True):
            for task, count in by_task.items():
                if delta := self._delta(result, task, count):
                    self._metrics.add("mqmk_labelled_matches_total", delta, labels.get(task, OTHER), result)

    def _delta(self, kind: str, name: str, count: int) -> int:
        """The increase since the last export."""
        before, self._exported_counts[kind, name] = self._exported_counts[kind, name], count
        return count - before

    def _export_drift(self, drift: _DriftState) -> None:
        """`other` shows the task with the fullest window, of equals the one with the largest drift."""
        worst = dict.fromkeys(drift.labels.values(), (0, 0.0, 0.0))
        for task, windows in list(drift.windows.items()):
            label = drift.labels[task]
            worst[label] = max(worst[label], windows.summary)
        self._show_drift(worst)

    def _show_drift(self, by_label: Mapping[str, tuple[int, float, float]]) -> None:
        for label, (images, score, margin) in by_label.items():
            self._metrics.set("mqmk_drift_window_images", images, label)
            self._metrics.set("mqmk_drift_index", score, label, "score")
            self._metrics.set("mqmk_drift_index", margin, label, "margin")
