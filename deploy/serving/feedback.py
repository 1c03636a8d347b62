"""Recent answers and the true labels that come for them: the matching rate on labelled requests."""

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

COUNTED: Final = ("right", "wrong", "matched", "mismatched", "label_unknown", "id_unknown", "repeated")


@dataclass(frozen=True)
class RecentAnswer:
    """What is kept of an answer: no image, and of its pool only names, which versions share."""

    version: int
    task: str
    label: str
    classes: tuple[str, ...]
    """Of the matched task."""
    pool_classes: tuple[tuple[str, ...], ...]
    """Of every task of the pool."""
    answered_at: float = field(default_factory=time.time)
    has_feedback: bool = False


@dataclass(frozen=True)
class FeedbackBody:
    """What the true label says about the answer."""

    id: str
    label: str
    correct: bool
    matched: bool | None
    """Whether the matched task knows the true label; None if no task of that pool does."""
    task: str
    pool_version: int
    counted: bool
    """False when the answer already had its feedback."""


@dataclass(frozen=True)
class AnswerLocation:
    """A replica that remembers an answer."""

    replica: str
    has_feedback: bool
    answered_at: float


Broadcast = Callable[..., Awaitable[Sequence[object]]]
"""Calls a method of every replica, this one included; a replica that fails returns an exception."""


async def record_once(broadcast: Broadcast, request_id: str, label: str) -> FeedbackBody | None:
    """Count a label at one replica, even if several remember the id of a retried request; None if none does.

    Every caller chooses the same replica: the one that already has feedback, else the one that answered last.
    """
    replies = await broadcast("find_answer", request_id)
    found = [reply for reply in replies if isinstance(reply, AnswerLocation)]
    if not found:
        return None
    chosen = max(found, key=lambda place: (place.has_feedback, place.answered_at, place.replica))
    replies = await broadcast("record_label", chosen.replica, request_id, label)
    return next((reply for reply in replies if isinstance(reply, FeedbackBody)), None)


@dataclass(frozen=True)
class FeedbackTotals:
    """Feedback so far, at one moment."""

    results: Mapping[str, int]
    """Each label under one of `declared.FEEDBACK_RESULTS`: one that no task knows is not also counted as wrong."""
    matched: Mapping[str, int]
    """By the matched task."""
    mismatched: Mapping[str, int]


class RecentAnswers:
    """The latest answers of one replica, by request id; the oldest are dropped first."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._answers: OrderedDict[str, RecentAnswer] = OrderedDict()
        self._lock = threading.Lock()
        self.counts: Counter[str] = Counter()
        self.matched: Counter[str] = Counter()
        """Feedback on answers of each matched task whose match was right; the others are in `mismatched`."""
        self.mismatched: Counter[str] = Counter()

    def remember(self, request_id: str, answer: RecentAnswer) -> None:
        """Keep an answer; a later one with the same id replaces it, and its label still counts only once."""
        with self._lock:
            before = self._answers.pop(request_id, None)
            self._answers[request_id] = replace(answer, has_feedback=before is not None and before.has_feedback)
            if len(self._answers) > self._capacity:
                self._answers.popitem(last=False)

    def find(self, replica: str, request_id: str) -> AnswerLocation | None:
        """Where an answer is remembered, if it is here: at the replica of this name."""
        with self._lock:
            answer = self._answers.get(request_id)
            return None if answer is None else AnswerLocation(replica, answer.has_feedback, answer.answered_at)

    def record_label(self, request_id: str, label: str) -> FeedbackBody | None:
        """Count what the true label says about an answer, once; None if the answer is not remembered here."""
        with self._lock:
            answer = self._answers.get(request_id)
            if answer is None:
                return None
            self._answers[request_id] = replace(answer, has_feedback=True)
            feedback = _compare(request_id, answer, label)
            self._count(answer, feedback)
            return feedback

    def count_unknown_id(self) -> None:
        """Feedback came for an answer that no replica remembers: too late, or a wrong id."""
        with self._lock:
            self.counts["id_unknown"] += 1

    @property
    def totals(self) -> FeedbackTotals:
        """Feedback so far."""
        with self._lock:
            counts = self.counts
            results = {name: counts[name] for name in ("right", "label_unknown", "id_unknown", "repeated")}
            results["wrong"] = counts["wrong"] - counts["label_unknown"]
            return FeedbackTotals(results, dict(self.matched), dict(self.mismatched))

    def _count(self, answer: RecentAnswer, feedback: FeedbackBody) -> None:
        if answer.has_feedback:
            self.counts["repeated"] += 1
            return
        self.counts["right" if feedback.correct else "wrong"] += 1
        if feedback.matched is None:
            self.counts["label_unknown"] += 1
            return
        self.counts["matched" if feedback.matched else "mismatched"] += 1
        (self.matched if feedback.matched else self.mismatched)[answer.task] += 1


def _compare(request_id: str, answer: RecentAnswer, label: str) -> FeedbackBody:
    is_matched = label in answer.classes
    is_known = is_matched or any(label in classes for classes in answer.pool_classes)
    return FeedbackBody(
        id=request_id,
        label=label,
        correct=label == answer.label,
        matched=is_matched if is_known else None,
        task=answer.task,
        pool_version=answer.version,
        counted=not answer.has_feedback,
    )
