"""What a replica measures about its requests and answers, in the names that `metric_names` declares.

Requests and answers are measured as they come; `export`, called by the thread that watches CURRENT, tells the rest:
what is under way, feedback, drift. No number of a picture is kept beyond the bins of the drift windows.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from mqmk.deploy.feedback import Told
from mqmk.deploy.metric_names import NO_MATCHER, OTHER, ROUTES, VERDICTS
from mqmk.deploy.pool_holder import Held
from mqmk.deploy.replica_metrics import Metrics
from mqmk.deploy.settings import ServeSettings
from mqmk.matcher.calibration import TaskReference, Window
from mqmk.matcher.predictor import AUTO, Prediction

log = logging.getLogger(__name__)

EXPORT_SECONDS: Final = 2.0
"""Ray's agent takes numbers every ten."""
PREDICTIONS: Final = ("predict", "infer")
_FAILURES: Final = ("429", "500", "503")
_RESULTS: Final = ("matched", "mismatched")


class TaskWindows:
    """The latest scores and margins of the pictures that were matched to one task."""

    def __init__(self, usual: TaskReference) -> None:
        self.score = Window(usual.score)
        self.margin = Window(usual.margin) if usual.margin is not None else None

    def add(self, prediction: Prediction) -> None:
        """One more picture."""
        self.score.add(prediction.score)
        if self.margin is not None and prediction.margin is not None:
            self.margin.add(prediction.margin)

    @property
    def told(self) -> tuple[int, float, float]:
        """Pictures, drift of the score, drift of the margin."""
        return len(self.score), self.score.drift, self.margin.drift if self.margin is not None else 0.0


@dataclass(frozen=True, eq=False)
class _Followed:
    """The pool that is served, and what its traffic looks like; another pool begins anew."""

    held: Held | None
    labels: Mapping[str, str]
    windows: dict[str, TaskWindows] = field(default_factory=dict)


class Measures:
    """Of one replica. Answers come from its event loop, `export` from another thread."""

    def __init__(
        self,
        metrics: Metrics,
        settings: ServeSettings,
        *,
        every_seconds: float = EXPORT_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._metrics, self._settings = metrics, settings
        self._every, self._clock, self._exported = every_seconds, clock, float("-inf")
        self._followed: _Followed | None = None
        self._told: Counter[tuple[str, str]] = Counter()
        self._names: set[str] = set()

    def request(self, route: str, code: str, matcher: str, seconds: float) -> None:
        """A request was answered. Refusals are quick, and would make the time of answers look better than it is."""
        self._metrics.add("mqmk_requests_total", 1.0, route, code, matcher)
        if route in PREDICTIONS and code[0] in "25":
            self._metrics.observe("mqmk_request_seconds", seconds, "total")

    def stages(self, decode: float, queue: float, match: float) -> None:
        """Where the seconds of one request went."""
        self._metrics.observe("mqmk_request_seconds", decode, "decode")
        self._metrics.observe("mqmk_request_seconds", queue, "queue")
        self._metrics.observe("mqmk_request_seconds", match, "match")

    def batch(self, images: int) -> None:
        """Some pictures were computed together."""
        self._metrics.observe("mqmk_batch_images", images)

    def answer(self, held: Held, prediction: Prediction, unknown: bool | None) -> None:
        """A picture was answered."""
        metrics, matcher, sure = self._metrics, prediction.matcher, held.confidence(prediction.matcher)
        task = self._labels(held)[prediction.task]
        metrics.add("mqmk_answers_total", 1.0, task)
        metrics.observe("mqmk_queries_per_image", prediction.queries, matcher)
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
            self._look_for_drift(held, prediction, usual)

    def agreed(self, matcher: str, same: bool) -> None:
        """A sampled answer was matched again exactly."""
        self._metrics.add("mqmk_agreement_answers_total", 1.0, matcher, "same" if same else "different")

    def export(self, held: Held | None, inside: int, told: Told) -> None:
        """Tell what is told from time to time, and at once when another pool is held. Never raises."""
        if self._followed and self._followed.held is held and self._clock() < self._exported + self._every:
            return
        self._exported = self._clock()
        try:
            self._export(held, inside, told)
        except Exception:  # a number that cannot be told must not end the thread that watches CURRENT
            log.exception("metrics could not be exported", extra={"event": "metrics_failed"})

    def _export(self, held: Held | None, inside: int, told: Told) -> None:
        followed = self._followed
        if followed is None or followed.held is not held:
            followed = self._begin(held)
        self._metrics.set("mqmk_inflight_images", inside)
        self._metrics.set("mqmk_inflight_limit_images", self._settings.max_queue)
        self._export_feedback(told, followed.labels)
        self._export_drift(followed)
        self._metrics.flush()

    def _labels(self, held: Held) -> Mapping[str, str]:
        return held.pool.remember("task labels", lambda: self._named([task.name for task in held.pool.tasks]))

    def _named(self, names: Sequence[str]) -> Mapping[str, str]:
        """Tasks that had a series keep it, even while they are forgotten: Ray shows a series until the replica ends."""
        for name in names:
            if len(self._names) < self._settings.task_labels:
                self._names.add(name)
        return {name: name if name in self._names else OTHER for name in names}

    def _look_for_drift(self, held: Held, prediction: Prediction, usual: TaskReference) -> None:
        followed = self._followed
        if followed is None or followed.held is not held:
            return  # an answer of the pool before, or the first one of the next
        windows = followed.windows.get(prediction.task)
        if windows is None:
            windows = followed.windows[prediction.task] = TaskWindows(usual)
        windows.add(prediction)

    # Zero at the start, and when another pool is served

    def _begin(self, held: Held | None) -> _Followed:
        labels = self._labels(held) if held else {}
        if self._followed is None:
            self._show_requests(NO_MATCHER)
            for verdict in VERDICTS:
                self._metrics.add("mqmk_feedback_total", 0.0, verdict)
        else:  # tasks that went
            self._show_drift(dict.fromkeys(self._followed.labels.values(), (0, 0.0, 0.0)))
        if held:
            self._show_matcher(held.auto if self._settings.matcher == AUTO else self._settings.matcher)
        for label in dict.fromkeys(labels.values()):
            self._show_task(label)
        self._followed = _Followed(held, labels)
        return self._followed

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

    def _export_feedback(self, told: Told, labels: Mapping[str, str]) -> None:
        for verdict in VERDICTS:
            if grown := self._grown("verdict", verdict, told.verdicts[verdict]):
                self._metrics.add("mqmk_feedback_total", grown, verdict)
        for result, by_task in zip(_RESULTS, (told.matched, told.mismatched), strict=True):
            for task, count in by_task.items():
                if grown := self._grown(result, task, count):
                    self._metrics.add("mqmk_labelled_matches_total", grown, labels.get(task, OTHER), result)

    def _grown(self, kind: str, name: str, count: int) -> int:
        """By how much, since it was told last."""
        before, self._told[kind, name] = self._told[kind, name], count
        return count - before

    def _export_drift(self, followed: _Followed) -> None:
        """`other` shows the task with the fullest window, of equals the one with the largest drift."""
        worst = dict.fromkeys(followed.labels.values(), (0, 0.0, 0.0))
        for task, windows in list(followed.windows.items()):
            label = followed.labels[task]
            worst[label] = max(worst[label], windows.told)
        self._show_drift(worst)

    def _show_drift(self, by_label: Mapping[str, tuple[int, float, float]]) -> None:
        for label, (images, score, margin) in by_label.items():
            self._metrics.set("mqmk_drift_window_images", images, label)
            self._metrics.set("mqmk_drift_index", score, label, "score")
            self._metrics.set("mqmk_drift_index", margin, label, "margin")
