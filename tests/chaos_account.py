"""Which failed request is explained by which kill, and is any answer wrong? Pure functions over what was written down.

A kill explains what it must cost and nothing more:

    daemon, trainer, controller   nothing
    replica                       answers 5xx to requests under way when it died, or sent to it before that was noticed
    proxy, raylet, GCS            everything until another proxy (of another head) has answered
"""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

from chaos_clients import Sample
from chaos_kills import Kill, Kind, Look

NOTICE_SECONDS: Final = 1.0
"""How long a proxy may send requests to a replica that has just died."""
SILENCE_SECONDS: Final = 0.5
"""Time without any answer, with several clients asking, that is worth an explanation."""
RESTART_SECONDS: Final = 30.0
"""How long a replica may take to come back; while both are gone, requests wait."""
ECHO_SECONDS: Final = 10.0
"""How long after any other kill a silence is blamed on it."""
HEAD: Final = (Kind.RAYLET, Kind.GCS)


@dataclass(frozen=True)
class Window:
    """The time in which a kill explains failures."""

    kill: Kill
    end: float

    def covers(self, sample: Sample) -> bool:
        """Whether the failed request was under way at some time of it, and failed as it would."""
        answered = (sample.error or "").startswith("5")  # else nobody was there to answer, not even with an error
        possible = answered or self.kill.kind is not Kind.REPLICA
        return possible and sample.began <= self.end and sample.ended >= self.kill.at


@dataclass(frozen=True)
class Row:
    """What all kills of one kind cost."""

    kind: Kind
    kills: int
    failed: int
    """Requests that failed and are explained by one of them."""
    most: int
    """Of one kill."""
    silence: float
    """Longest time without any answer that is blamed on one of them, in seconds; 0 if there was none worth telling."""


def windows(kills: Sequence[Kill], looks: Sequence[Look], samples: Sequence[Sample]) -> list[Window]:
    """Of every kill that explains anything."""
    found = []
    for kill in kills:
        if kill.kind is Kind.REPLICA:
            found.append(Window(kill, kill.at + NOTICE_SECONDS))
        elif kill.kind in (Kind.PROXY, *HEAD):
            found.append(Window(kill, _answered_again(kill, looks, samples)))
    return found


def _answered_again(kill: Kill, looks: Sequence[Look], samples: Sequence[Sample]) -> float:
    """When a request began that was the first to succeed with what replaced the dead one."""
    before = [each for each in looks if each.at <= kill.at][-1]
    gone = Kind.RAYLET if kill.kind in HEAD else Kind.PROXY
    new = [each.at for each in looks if each.at > kill.at and each.pids[Kind.PROXY]
           and each.pids[gone] and not set(each.pids[gone]) & set(before.pids[gone])]  # fmt: skip
    began = [each.began for each in samples if each.error is None and new and each.began >= new[0]]
    return min(began, default=math.inf)


def explained(samples: Sequence[Sample], found: Sequence[Window]) -> tuple[dict[int, list[Sample]], list[Sample]]:
    """Failed requests by the number of the last kill that explains them; and those that none explains."""
    by_kill: dict[int, list[Sample]] = defaultdict(list)
    rest = []
    for sample in samples:
        if sample.error is not None:
            last = max((window.kill for window in found if window.covers(sample)), key=lambda k: k.at, default=None)
            (rest if last is None else by_kill[last.number]).append(sample)
    return by_kill, rest


def table(kills: Sequence[Kill], samples: Sequence[Sample], found: Sequence[Window]) -> list[Row]:
    """What each kind of kill cost."""
    by_kill, _ = explained(samples, found)
    rows = []
    for kind in Kind:
        own = [kill for kill in kills if kill.kind is kind]
        failed = [len(by_kill.get(kill.number, ())) for kill in own]
        blamed = [seconds for culprit, seconds in silences(kills, samples, found) if culprit in own]
        rows.append(Row(kind, len(own), sum(failed), max(failed, default=0), max(blamed, default=0.0)))
    return [row for row in rows if row.kills]


def silences(kills: Sequence[Kill], samples: Sequence[Sample], found: Sequence[Window]) -> list[
    tuple[Kill | None, float]
]:  # fmt: skip
    """Every silence worth telling: which kill is to blame, if any, and how many seconds it was."""
    answers = sorted(sample.ended for sample in samples if sample.error is None)
    gaps = [(a, b) for a, b in pairwise(answers) if b - a > SILENCE_SECONDS]
    return [(_culprit(a, b, kills, found), b - a) for a, b in gaps]


def _culprit(start: float, end: float, kills: Sequence[Kill], found: Sequence[Window]) -> Kill | None:
    """An outage if one overlaps, else a replica that may not be back, else whatever was killed last."""
    outages = [each.kill for each in found if each.kill.kind is not Kind.REPLICA
               and each.kill.at <= end and each.end >= start]  # fmt: skip
    replicas = [
        kill for kill in kills if kill.kind is Kind.REPLICA and -RESTART_SECONDS <= kill.at - start <= end - start
    ]
    others = [kill for kill in kills if -ECHO_SECONDS <= kill.at - start <= end - start]
    return max(outages or replicas or others, key=lambda kill: kill.at, default=None)


def wrong_answers(samples: Sequence[Sample], cards: Mapping[int, Mapping[str, Any]],
                  serving: Mapping[int, float]) -> list[str]:  # fmt: skip
    """What no answer may be: of parts that its version does not have, at odds with another, or behind what is served.

    `cards` are the versions' pool.json; `serving` says since when every replica was known to hold a version.
    """
    answers = [sample for sample in samples if sample.error is None]
    found = [sentence for sample in answers for sentence in _inconsistent(sample, cards)]
    found += _at_odds(answers) + _behind(answers, serving)
    return [f"{sentence} ({count} times)" for sentence, count in Counter(found).items()]


def _inconsistent(sample: Sample, cards: Mapping[int, Mapping[str, Any]]) -> list[str]:
    card = cards.get(sample.version or 0)
    if card is None:
        return [f"an answer came from version {sample.version}, which does not exist"]
    classes = {(label, task["name"]) for task in card["tasks"] for label in task["classes"]}
    named = {(sample.label, sample.task), *sample.top}
    found = [f"{label!r} of task {task!r} is not in version {sample.version}" for label, task in named - classes]
    if sample.top[:1] != ((sample.label, sample.task),):
        found.append(f"the answer {sample.label!r} of {sample.task!r} is not the first of its own list {sample.top}")
    return found


def _at_odds(answers: Sequence[Sample]) -> list[str]:
    """The same picture and version have the same answer, whichever replica gives it, before and after every kill."""
    first: dict[tuple[str, int | None], Sample] = {}
    found = []
    for sample in answers:
        other = first.setdefault((sample.picture, sample.version), sample)
        same = (other.label, other.task) == (sample.label, sample.task)
        if not same or abs(other.probability - sample.probability) > 1e-3:
            found.append(f"version {sample.version} says {other.label!r} and {sample.label!r} to {sample.picture!r}")
    return found


def _behind(answers: Sequence[Sample], serving: Mapping[int, float]) -> list[str]:
    found = []
    for sample in answers:
        known = max((version for version, at in serving.items() if at < sample.began), default=0)
        if (sample.version or 0) < known:
            found.append(f"an answer came from version {sample.version} after {known} was served everywhere")
    return found


def went_back(seen: Sequence[tuple[str, int | None]]) -> list[str]:
    """Replicas, by their ids, whose version became smaller; nobody asked for a roll-back."""
    last: dict[str, int] = {}
    found = []
    for replica, version in seen:
        if (version or 0) < last.get(replica, 0):
            found.append(f"replica {replica} went back from version {last[replica]} to {version}")
        last[replica] = version or 0
    return found
