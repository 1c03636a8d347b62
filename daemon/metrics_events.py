"""What the ledger's events add up to: transitions, gate results, and how long tasks took.

Events are append-only, so everything here is read once from the first event on and then only continued: a daemon that
was restarted exports the same totals as before.
"""

import json
import sqlite3
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final

from mqmk.daemon.ledger import State
from mqmk.daemon.metrics_declared import STAGES, TO_SERVED

STAGE_OF: Final = {
    (State.DISCOVERED, State.VALIDATED): "validate",
    (State.VALIDATED, State.TRAINING): "wait",
    (State.TRAINING, State.TRAINED): "train",
    (State.TRAINED, State.PUBLISHED): "publish",
    (State.PUBLISHED, State.SERVING): "roll_out",
}
ASIDE: Final = (State.HELD, State.QUARANTINED, State.CONFLICT, State.FORGOTTEN)


@dataclass
class Spread:
    """A histogram in the making."""

    bounds: Sequence[float]
    total: float = 0.0
    _counts: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        """One more value."""
        self._counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def cumulative(self) -> list[int]:
        """How many values were at most each bound; the last number is all."""
        return list(accumulate(self._counts))


@dataclass
class _Course:
    """Where a task is, since when, and when it was last heard of."""

    state: State
    since: float
    heard: float
    begun: float | None
    """When the clock to being served started; None while it stands."""


class EventTotals:
    """Follows the events of one ledger."""

    def __init__(self) -> None:
        self.last = 0
        self.transitions: Counter[State] = Counter()
        self.gates: Counter[str] = Counter()
        self.commands: Counter[tuple[str, str]] = Counter()
        self.retries = self.epochs = 0
        self.to_served = Spread(TO_SERVED)
        self.stages = {stage: Spread(TO_SERVED) for stage in STAGES}
        self._courses: dict[int, _Course] = {}

    def follow(self, db: sqlite3.Connection) -> None:
        """Take in what happened since the last time."""
        sql = "SELECT number, at, task, event, state, detail FROM events WHERE number > ? ORDER BY number"
        for number, at, task, event, state, detail in db.execute(sql, (self.last,)):
            self.last = number
            self._count(event, detail)
            if task is not None and state is not None:
                self._moved(task, State(state), at)

    def _count(self, event: str, detail: str) -> None:
        if event == "task.will-retry":
            self.retries += 1
        elif event == "task.epoch":
            self.epochs += 1
        elif event == "version.planned" and json.loads(detail).get("kind") == "learn":
            self.gates["passed"] += 1
        elif event.startswith("command."):
            self.commands[event.removeprefix("command."), str(json.loads(detail).get("state", "DONE"))] += 1

    def _moved(self, task: int, to: State, at: float) -> None:
        known = self._courses.get(task)
        if known is not None and known.state is to:
            known.heard = at
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
            self.to_served.observe(at - begun)
            begun = None
        elif to in ASIDE:
            begun = None
        self._courses[task] = _Course(to, at, at, begun)

    def oldest(self, states: Sequence[State], now: float) -> float:
        """Age of the oldest task in these states whose clock runs; 0 without one."""
        begun = [each.begun for each in self._courses.values() if each.state in states and each.begun is not None]
        return max(0.0, now - min(begun)) if begun else 0.0

    def quiet(self, state: State, now: float) -> float:
        """The longest silence about a task in this state; 0 without one."""
        heard = [each.heard for each in self._courses.values() if each.state is state]
        return max(0.0, now - min(heard)) if heard else 0.0
