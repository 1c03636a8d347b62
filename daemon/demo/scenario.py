"""The demo: a real daemon gets one task after another, and after each the service predicts images of all tasks so far.

Every figure comes from predictions over HTTP of images that were never in the bucket. The matcher that serves is
compared with exact matching (`mqmk`: one query per task, one key per class) and with the single-query baseline (`sqsk`:
one query without prompts, one key per task), on the same pool and the same images.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from shlex import quote
from typing import Any, Final, Protocol

from mqmk.daemon.demo.client import MatcherScore, is_up, score_images
from mqmk.daemon.demo.daemon import DemoDaemon, command_name
from mqmk.daemon.demo.tasks import DemoTask, UnseenImage
from mqmk.daemon.errors import DaemonError
from mqmk.daemon.ledger.ledger import State
from mqmk.learner.data.pack import pack
from mqmk.learner.evaluation.metrics import forgetting
from mqmk.matcher.matcher_info import EXACT

SCHEMA: Final = 1
LOOK_SECONDS: Final = 0.25
SWAP_SECONDS: Final = 180.0
"""How long replicas may take to serve a published version; the first one includes their start."""
MANY_EVENTS: Final = 100_000
BASELINE: Final = "sqsk"
ASIDE: Final = (State.QUARANTINED, State.CONFLICT, State.HELD, State.FORGOTTEN)
STEPS: Final = {
    "noticed": "task.discovered",
    "checked": "task.validated",
    "begun": "task.training_started",
    "learned": "task.trained",
    "judged": "version.planned",
    "published": "task.published",
    "swapped in": "task.rolled_out",
}
"""The steps of a task after it was packed, and the event that ends each."""


@dataclass(frozen=True)
class Round:
    """How well the service did after one more task."""

    after: str
    tasks: int
    classes: int
    served: MatcherScore
    exact: MatcherScore
    single_query: MatcherScore


@dataclass(frozen=True)
class TaskOutcome:
    """The outcome of one task, and how long each step took."""

    name: str
    classes: tuple[str, ...]
    state: str
    reason: str | None
    version: int | None
    seconds: Mapping[str, float]


Kind = Callable[[Round], MatcherScore]
SERVED: Final[Kind] = attrgetter("served")


class View(Protocol):
    """Shows the progress."""

    def show_status(self, status: Mapping[str, Any]) -> None:
        """Show a status document; called several times a second."""

    def show_round(self, found: Round, forgotten: float) -> None:
        """Show the scores after one more task, and the forgetting of the matcher that serves."""

    def show_message(self, line: str) -> None:
        """Show something that happens once."""


@dataclass
class Demo:
    """One run: `run`, then `document`."""

    daemon: DemoDaemon
    tasks: Sequence[DemoTask]
    scratch: Path
    view: View
    begun: float
    """When the command started, on the monotonic clock."""
    rounds: list[Round] = field(default_factory=list)
    outcomes: list[TaskOutcome] = field(default_factory=list)
    moments: dict[str, float] = field(default_factory=dict)
    dropped: dict[str, float] = field(default_factory=dict)

    def run(self) -> None:
        """For every task: drop it, wait until it is served; then drop the next one and score all tasks so far."""
        known: list[DemoTask] = []
        self._drop(self.tasks[0])
        for number, task in enumerate(self.tasks):
            served = self._wait_until_served(task)
            if number + 1 < len(self.tasks):
                self._drop(self.tasks[number + 1])
            if served:
                known.append(task)
                self._mark("first_served" if len(known) == 1 else "all_served")
                self._score(task, known)
        if not known:
            raise DaemonError(f"no task is served; the first reason: {self.outcomes[0].reason}")

    def _drop(self, task: DemoTask) -> None:
        bucket = Path(self.daemon.config.bucket_url)
        self.dropped[task.name] = time.time()
        pack(task.write(self.scratch / task.name), bucket / "tasks", task.name)

    def _wait_until_served(self, task: DemoTask) -> bool:
        """Wait until a task is served (True) or set aside (False); its outcome has the reason."""
        waiting: float | None = None
        while True:
            self._refresh()
            rows = self.daemon.ledger.tasks_named(task.name)
            state = rows[0].state if rows else None
            if state is State.SERVING or state in ASIDE:
                self._record_outcome(task)
                return state is State.SERVING
            waiting = None if state is not State.PUBLISHED else waiting or time.monotonic()
            if waiting and time.monotonic() - waiting > SWAP_SECONDS:
                raise self._rollout_timeout(task)
            time.sleep(LOOK_SECONDS)

    def _rollout_timeout(self, task: DemoTask) -> DaemonError:
        replicas = self.daemon.status()["serving"]["replicas"]
        reason = next((each["last_failure"] for each in replicas if each["last_failure"]), "no replica is running")
        return DaemonError(
            f"{task.name} is published but not served after {SWAP_SECONDS:g} s: {reason}; the end of the log:\n"
            f"{self.daemon.last_lines()}\n`mqmk-daemon doctor` checks what serving needs"
        )

    def _record_outcome(self, task: DemoTask) -> None:
        row = self.daemon.ledger.tasks_named(task.name)[0]
        at = {event.event: event.at for event in self.daemon.ledger.events(row, MANY_EVENTS)}
        names = [name for name, event in STEPS.items() if event in at]
        moments = [self.dropped[task.name], *(at[STEPS[name]] for name in names)]
        seconds = {name: round(end - begin, 2) for name, (begin, end) in zip(names, pairwise(moments), strict=True)}
        self.outcomes.append(TaskOutcome(task.name, task.classes, row.state.value, row.reason, row.version, seconds))
        if row.state is not State.SERVING:
            self.view.show_message(f"{task.name} is {row.state}: {row.reason}")

    def _score(self, task: DemoTask, known: Sequence[DemoTask]) -> None:
        images = [image for each in known for image in each.unseen]
        served = self._score_images(images, None)
        found = Round(
            after=task.name,
            tasks=len(known),
            classes=sum(len(each.classes) for each in known),
            served=served,
            exact=served if served.matcher == EXACT else self._score_images(images, EXACT),
            single_query=self._score_images(images, BASELINE),
        )
        self.rounds.append(found)
        self.view.show_round(found, mean_forgetting(self.rounds, SERVED))

    def _score_images(self, images: Sequence[UnseenImage], matcher: str | None) -> MatcherScore:
        return score_images(self.daemon.url, images, matcher, self._refresh)

    def _refresh(self) -> None:
        status = self.daemon.status()
        if "page_up" not in self.moments and status["serving"]["replicas"] and is_up(self.daemon.url):
            self._mark("page_up")
            self.view.show_message(f"the page is up: {self.daemon.url}/ (draw on it while the daemon learns)")
        self.view.show_status(status)

    def _mark(self, name: str) -> None:
        self.moments[name] = round(time.monotonic() - self.begun, 1)

    def document(self) -> dict[str, Any]:
        """All results, for `--json` and the state directory."""
        return {
            "schema": SCHEMA,
            "state_dir": str(self.daemon.config.state.dir),
            "url": self.daemon.url,
            "metrics_url": self.daemon.metrics_url if is_up(self.daemon.metrics_url) else None,
            "mlflow": mlflow_command(self.daemon),
            "seconds": self.moments | {"total": round(time.monotonic() - self.begun, 1)},
            "tasks": [asdict(outcome) for outcome in self.outcomes],
            "rounds": [_figures(self.rounds[:end]) for end in range(1, len(self.rounds) + 1)],
        }


def mlflow_command(daemon: DemoDaemon) -> str | None:
    """The command that shows training runs and versions."""
    command = f"{command_name('mlflow')} ui --backend-store-uri {quote(daemon.config.tracking_uri)}"
    return command if daemon.config.mlflow.enabled else None


def mean_forgetting(rounds: Sequence[Round], kind: Kind) -> float:
    """The accuracy that tasks lost since they were learned, on average."""
    return forgetting([[*kind(each).by_task.values()] for each in rounds])


def _figures(rounds: Sequence[Round]) -> dict[str, Any]:
    last = rounds[-1]
    kinds: dict[str, Kind] = {name: attrgetter(name) for name in ("served", "exact", "single_query")}
    figures = {
        name: asdict(kind(last)) | {"accuracy": kind(last).accuracy, "forgetting": mean_forgetting(rounds, kind)}
        for name, kind in kinds.items()
    }
    return {"after": last.after, "tasks": last.tasks, "classes": last.classes} | figures
