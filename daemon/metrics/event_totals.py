"""Totals of the ledger's events: transitions, gate results, and how long tasks took.

Events are append-only: they are read once from the first one on, then incrementally. A restarted daemon exports the
same totals as before.
"""

import json
import sqlite3
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final

from mqmk.daemon.ledger.event_names import current_name
from mqmk.daemon.ledger.ledger import State
from mqmk.daemon.metrics.declared import STAGES, TIME_TO_SERVING_BUCKETS

STAGE_OF: Final = {
    (State.DISCOVERED, State.VALIDATED): "validate",
    (State.VALIDATED, State.TRAINING): "wait",
    (State.TRAINING, State.TRAINED): "train",
    (State.TRAINED, State.PUBLISHED): "publish",
    (State.PUBLISHED, State.SERVING): "roll_out",
}
ASIDE: Final = (State.HELD, State.QUARANTINED, State.CONFLICT, State.FORGOTTEN)


@dataclass
class Histogram:
    """Cumulative counts of observed values."""

    bounds: Sequence[float]
    total: float = 0.0
    _counts: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def cumulative(self) -> list[int]:
        """How many values were at most each bound; the last count is all of them."""
        return list(accumulate(self._counts))


@dataclass
class _TaskProgress:
    """The state of a task, since when, and when its last event was."""

    state: State
    since: float
    last_event: float
    begun: float | None
    """When the time to serving began; None while it does not run."""


class EventTotals:
    """Totals of the events of one ledger."""

    def __init__(self) -> None:
        self.last = 0
        self.transitions: Counter[State] = Counter()
        self.gates: Counter[str] = Counter()
        self.commands: Counter[tuple[str, str]] = Counter()
        self.retries = self.epochs = 0
        self.time_to_serving = Histogram(TIME_TO_SERVING_BUCKETS)
        self.stages = {stage: Histogram(TIME_TO_SERVING_BUCKETS) for stage in STAGES}
        self._progress: dict[int, _TaskProgress] = {}

    def update(self, db: sqlite3.Connection) -> None:
        """Add the events since the last call."""
        sql = "SELECT number, at, task, event, state, detail FROM events WHERE number > ? ORDER BY number"
        for number, at, task, event, state, detail in db.execute(sql, (self.last,)):
            self.last = number
            self._count(current_name(event), detail)
            if task is not None and state is not None:
                self._record_transition(task, State(state), at)

    def _count(self, event: str, detail: str) -> None:
        if event == "task.retry_scheduled":
            self.retries += 1
        elif event == "task.epoch_finished":
            self.epochs += 1
        elif event == "version.planned" and json.loads(detail).get("kind") == "learn":
            self.gates["passed"] += 1
        elif event.startswith("command."):
            self.commands[event.removeprefix("command."), str(json.loads(detail).get("state", "DONE"))] += 1

    def _record_transition(self, task: int, to: State, at: float) -> None:
        known = self._progress.get(task)
        if known is not None and known.state is to:
            known.last_event = at
            return
        self.transitions[to] += 1
        before = known.state if known else None
        begun = known.begun if known else None
        if before is State.TRAINED and to is State.HELD:
            self.gates["held"] += 1
        if known and (stage := STAGE_OF.get((known.state, to))):
            self.stages[stage].observe(at - known.since)
        if to is State.DISCOVERED or (before is State.HELD and to is State.TRAINED):
            begun = at
        elif to is State.SERVING and begun is not None:
            self.time_to_serving.observe(at - begun)
            begun = None
        elif to in ASIDE:
            begun = None
        self._progress[task] = _TaskProgress(to, at, at, begun)

    def oldest_age(self, states: Sequence[State], now: float) -> float:
        """Age of the oldest task in these states whose time to serving runs; 0 without one."""
        begun = [each.begun for each in self._progress.values() if each.state in states and each.begun is not None]
        return max(0.0, now - min(begun)) if begun else 0.0

    def seconds_since_event(self, state: State, now: float) -> float:
        """The longest time that a task in this state has had no event; 0 without one."""
        last = [each.last_event for each in self._progress.values() if each.state is state]
        return max(0.0, now - min(last)) if last else 0.0
