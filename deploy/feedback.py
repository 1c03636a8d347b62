"""Which answers can still be told right or wrong, and how many were: the matching rate on labelled requests."""

import threading
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

Owners = Mapping[str, frozenset[str]]
"""The tasks that know each label, of one pool."""

COUNTED: Final = ("right", "wrong", "matched", "mismatched", "label_unknown", "id_unknown", "repeated")


@dataclass(frozen=True)
class Remembered:
    """What is kept of an answer: no picture."""

    version: int
    task: str
    margin: float | None
    label: str
    owners: Owners
    told: bool = False


@dataclass(frozen=True)
class Verdict:
    """What feedback said about an answer."""

    id: str
    label: str
    correct: bool
    matched: bool | None
    """Whether the matched task knows the true label; None if no task of that pool does."""
    task: str
    pool_version: int
    counted: bool
    """False when the answer had its feedback before."""


@dataclass(frozen=True)
class Told:
    """How often feedback said what, at one moment."""

    verdicts: Mapping[str, int]
    """Each label under one of `metric_names.VERDICTS`: one that no task knows is not counted as wrong, too."""
    matched: Mapping[str, int]
    """By the matched task."""
    mismatched: Mapping[str, int]


class Answers:
    """The last answers of one replica, by request id; the oldest go first."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: OrderedDict[str, Remembered] = OrderedDict()
        self._lock = threading.Lock()
        self.counts: Counter[str] = Counter()
        self.matched: Counter[str] = Counter()
        """Feedback on answers of each matched task whose match was right; the others are in `mismatched`."""
        self.mismatched: Counter[str] = Counter()

    def remember(self, request_id: str, answer: Remembered) -> None:
        """Keep an answer; a later one with the same id takes its place."""
        with self._lock:
            self._known.pop(request_id, None)
            self._known[request_id] = answer
            if len(self._known) > self._most:
                self._known.popitem(last=False)

    def tell(self, request_id: str, label: str) -> Verdict | None:
        """Count what the true label says about an answer, once; None if the answer is not remembered here."""
        with self._lock:
            answer = self._known.get(request_id)
            if answer is None:
                return None
            self._known[request_id] = replace(answer, told=True)
            verdict = _verdict(request_id, answer, label)
            self._count(answer, verdict)
            return verdict

    def missed(self) -> None:
        """Feedback came for an answer that nobody remembers: too late, or a wrong id."""
        with self._lock:
            self.counts["id_unknown"] += 1

    @property
    def told(self) -> Told:
        """What feedback has said so far."""
        with self._lock:
            counts = self.counts
            verdicts = {name: counts[name] for name in ("right", "label_unknown", "id_unknown", "repeated")}
            verdicts["wrong"] = counts["wrong"] - counts["label_unknown"]
            return Told(verdicts, dict(self.matched), dict(self.mismatched))

    def _count(self, answer: Remembered, verdict: Verdict) -> None:
        if answer.told:
            self.counts["repeated"] += 1
            return
        self.counts["right" if verdict.correct else "wrong"] += 1
        if verdict.matched is None:
            self.counts["label_unknown"] += 1
            return
        self.counts["matched" if verdict.matched else "mismatched"] += 1
        (self.matched if verdict.matched else self.mismatched)[answer.task] += 1


def _verdict(request_id: str, answer: Remembered, label: str) -> Verdict:
    knowing = answer.owners.get(label)
    return Verdict(
        id=request_id,
        label=label,
        correct=label == answer.label,
        matched=None if knowing is None else answer.task in knowing,
        task=answer.task,
        pool_version=answer.version,
        counted=not answer.told,
    )
