"""Attribute failed requests to kills and find wrong answers; pure functions over the recorded run.

A kill explains only the failures that it cannot avoid:

    daemon, trainer, controller   nothing
    replica                       5xx for requests in flight when it died, or routed to it before its death was noticed
    proxy, raylet, GCS            everything until another proxy (of another head) has answered a request
"""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

from programs.chaos.clients import RequestRecord
from programs.chaos.kills import Kill, Kind, ProcessSnapshot

DETECTION_SECONDS: Final = 1.0
"""How long a proxy may keep routing requests to a dead replica."""
GAP_SECONDS: Final = 0.5
"""A longer time without any answer, with several clients sending requests, counts as a gap."""
RESTART_SECONDS: Final = 30.0
"""How long a replica may take to restart; while both are down, requests wait."""
AFTERMATH_SECONDS: Final = 10.0
"""How long after any other kill a gap is attributed to it."""
HEAD: Final = (Kind.RAYLET, Kind.GCS)


@dataclass(frozen=True)
class FailureWindow:
    """The time in which a kill explains failures."""

    kill: Kill
    end: float

    def covers(self, record: RequestRecord) -> bool:
        """Whether the failed request overlaps the window and failed in a way this kill can cause."""
        answered = (record.error or "").startswith("5")  # otherwise not even the proxy was there to return an error
        possible = answered or self.kill.kind is not Kind.REPLICA
        return possible and record.began <= self.end and record.ended >= self.kill.at


@dataclass(frozen=True)
class Row:
    """What all kills of one kind cost."""

    kind: Kind
    kills: int
    failed: int
    """Failed requests attributed to one of them."""
    max_per_kill: int
    """Most failed requests attributed to one kill."""
    longest_gap: float
    """Longest gap attributed to one of them, in seconds; 0 if there was none."""


def failure_windows(
    kills: Sequence[Kill], snapshots: Sequence[ProcessSnapshot], records: Sequence[RequestRecord]
) -> list[FailureWindow]:
    """The window of every kill that may fail requests."""
    found = []
    for kill in kills:
        if kill.kind is Kind.REPLICA:
            found.append(FailureWindow(kill, kill.at + DETECTION_SECONDS))
        elif kill.kind in (Kind.PROXY, *HEAD):
            found.append(FailureWindow(kill, _recovery_time(kill, snapshots, records)))
    return found


def _recovery_time(kill: Kill, snapshots: Sequence[ProcessSnapshot], records: Sequence[RequestRecord]) -> float:
    """Start of the first request that succeeded after the killed process was replaced."""
    before = [each for each in snapshots if each.at <= kill.at][-1]
    gone = Kind.RAYLET if kill.kind in HEAD else Kind.PROXY
    new = [each.at for each in snapshots if each.at > kill.at and each.pids[Kind.PROXY]
           and each.pids[gone] and not set(each.pids[gone]) & set(before.pids[gone])]  # fmt: skip
    began = [each.began for each in records if each.error is None and new and each.began >= new[0]]
    return min(began, default=math.inf)


def attribute_failures(
    records: Sequence[RequestRecord], windows: Sequence[FailureWindow]
) -> tuple[dict[int, list[RequestRecord]], list[RequestRecord]]:
    """Failed requests by the number of the last kill that explains them, and the unexplained ones."""
    by_kill: dict[int, list[RequestRecord]] = defaultdict(list)
    rest = []
    for record in records:
        if record.error is not None:
            last = max((window.kill for window in windows if window.covers(record)), key=lambda k: k.at, default=None)
            (rest if last is None else by_kill[last.number]).append(record)
    return by_kill, rest


def summarize_kills(
    kills: Sequence[Kill], records: Sequence[RequestRecord], windows: Sequence[FailureWindow]
) -> list[Row]:
    """What each kind of kill cost."""
    by_kill, _ = attribute_failures(records, windows)
    rows = []
    for kind in Kind:
        own = [kill for kill in kills if kill.kind is kind]
        failed = [len(by_kill.get(kill.number, ())) for kill in own]
        blamed = [seconds for culprit, seconds in find_gaps(kills, records, windows) if culprit in own]
        rows.append(Row(kind, len(own), sum(failed), max(failed, default=0), max(blamed, default=0.0)))
    return [row for row in rows if row.kills]


def find_gaps(kills: Sequence[Kill], records: Sequence[RequestRecord], windows: Sequence[FailureWindow]) -> list[
    tuple[Kill | None, float]
]:  # fmt: skip
    """Every gap: the kill it is attributed to, if any, and its length in seconds."""
    answers = sorted(record.ended for record in records if record.error is None)
    gaps = [(a, b) for a, b in pairwise(answers) if b - a > GAP_SECONDS]
    return [(_attribute_gap(a, b, kills, windows), b - a) for a, b in gaps]


def _attribute_gap(start: float, end: float, kills: Sequence[Kill], windows: Sequence[FailureWindow]) -> Kill | None:
    """An outage that overlaps, else a replica that may still be restarting, else the last kill."""
    outages = [each.kill for each in windows if each.kill.kind is not Kind.REPLICA
               and each.kill.at <= end and each.end >= start]  # fmt: skip
    replicas = [
        kill for kill in kills if kill.kind is Kind.REPLICA and -RESTART_SECONDS <= kill.at - start <= end - start
    ]
    others = [kill for kill in kills if -AFTERMATH_SECONDS <= kill.at - start <= end - start]
    return max(outages or replicas or others, key=lambda kill: kill.at, default=None)


def find_wrong_answers(records: Sequence[RequestRecord], cards: Mapping[int, Mapping[str, Any]],
                       serving: Mapping[int, float]) -> list[str]:  # fmt: skip
    """Answers that do not fit their pool version, contradict each other, or come from an outdated version.

    `cards` are the versions' cards with the tasks of their pages; `serving` is the time from which every replica served
    a version.
    """
    answers = [record for record in records if record.error is None]
    found = [sentence for record in answers for sentence in _check_against_card(record, cards)]
    found += _find_contradictions(answers) + _find_outdated(answers, serving)
    return [f"{sentence} ({count} times)" for sentence, count in Counter(found).items()]


def _check_against_card(record: RequestRecord, cards: Mapping[int, Mapping[str, Any]]) -> list[str]:
    card = cards.get(record.version or 0)
    if card is None:
        return [f"an answer came from version {record.version}, which does not exist"]
    classes = {(label, task["name"]) for task in card["tasks"] for label in task["classes"]}
    named = {(record.label, record.task), *record.top}
    found = [f"{label!r} of task {task!r} is not in version {record.version}" for label, task in named - classes]
    if record.top[:1] != ((record.label, record.task),):
        found.append(f"the answer {record.label!r} of {record.task!r} is not the first of its top list {record.top}")
    return found


def _find_contradictions(answers: Sequence[RequestRecord]) -> list[str]:
    """The same image and version must give the same answer on every replica, before and after every kill."""
    first: dict[tuple[str, int | None], RequestRecord] = {}
    found = []
    for record in answers:
        other = first.setdefault((record.image, record.version), record)
        same = (other.label, other.task) == (record.label, record.task)
        if not same or abs(other.probability - record.probability) > 1e-3:
            found.append(f"version {record.version} answers {other.label!r} and {record.label!r} for {record.image!r}")
    return found


def _find_outdated(answers: Sequence[RequestRecord], serving: Mapping[int, float]) -> list[str]:
    found = []
    for record in answers:
        known = max((version for version, at in serving.items() if at < record.began), default=0)
        if (record.version or 0) < known:
            found.append(f"an answer came from version {record.version} after {known} was served everywhere")
    return found


def find_version_regressions(seen: Sequence[tuple[str, int | None]]) -> list[str]:
    """Replicas whose version decreased although no rollback was requested."""
    last: dict[str, int] = {}
    found = []
    for replica, version in seen:
        if (version or 0) < last.get(replica, 0):
            found.append(f"replica {replica} went back from version {last[replica]} to {version}")
        last[replica] = version or 0
    return found
