"""The demo: a real daemon gets one task after another, and after each the service is asked about all of them.

Every figure comes from answers over HTTP to pictures that were never in the bucket. Beside the matcher that the service
chose stand exact matching (`mqmk`: a query for every task, a key for every class) and the single-query baseline
(`sqsk`: one query that knows no prompts, one key for a task), on the same pool and the same pictures.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, Protocol

from mqmk.daemon.demo_daemon import DemoDaemon, typed
from mqmk.daemon.demo_pictures import DemoTask, Question
from mqmk.daemon.demo_questions import Answers, ask, is_up
from mqmk.daemon.errors import DaemonError
from mqmk.daemon.ledger import State
from mqmk.learner.metrics import forgetting
from mqmk.learner.pack import pack

SCHEMA: Final = 1
LOOK_SECONDS: Final = 0.25
SWAP_SECONDS: Final = 180.0
"""How long a published version may wait for the replicas; the first one also waits for them to start."""
MANY_EVENTS: Final = 100_000
EXACT: Final = "mqmk"
BASELINE: Final = "sqsk"
ASIDE: Final = (State.QUARANTINED, State.CONFLICT, State.HELD, State.FORGOTTEN)
STEPS: Final = {
    "noticed": "task.discovered",
    "checked": "task.validated",
    "begun": "task.training",
    "learned": "task.trained",
    "judged": "version.planned",
    "published": "task.published",
    "swapped in": "task.serving",
}
"""What happens to a task, from its packing on, and the event that ends each step."""


@dataclass(frozen=True)
class Round:
    """What the service knew after one task."""

    after: str
    tasks: int
    classes: int
    served: Answers
    exact: Answers
    single_query: Answers


@dataclass(frozen=True)
class TaskStory:
    """What became of one task, and how long each step took."""

    name: str
    classes: tuple[str, ...]
    state: str
    reason: str | None
    version: int | None
    seconds: Mapping[str, float]


Kind = Callable[[Round], Answers]
SERVED: Final[Kind] = attrgetter("served")


class View(Protocol):
    """Who shows what happens."""

    def look(self, status: Mapping[str, Any]) -> None:
        """A status document, several times a second."""

    def round(self, found: Round, forgotten: float) -> None:
        """Figures after one more task, and what the served matcher's answers lost on the way."""

    def say(self, line: str) -> None:
        """Something that happens once."""


@dataclass
class Demo:
    """One run: `play`, then `document`."""

    daemon: DemoDaemon
    tasks: Sequence[DemoTask]
    scratch: Path
    view: View
    begun: float
    """When the command was typed; on the monotonic clock."""
    rounds: list[Round] = field(default_factory=list)
    stories: list[TaskStory] = field(default_factory=list)
    moments: dict[str, float] = field(default_factory=dict)
    dropped: dict[str, float] = field(default_factory=dict)

    def play(self) -> None:
        """Every task: drop it, wait until it is served; then drop the next one and ask about all so far."""
        known: list[DemoTask] = []
        self._drop(self.tasks[0])
        for number, task in enumerate(self.tasks):
            served = self._served(task)
            if number + 1 < len(self.tasks):
                self._drop(self.tasks[number + 1])
            if served:
                known.append(task)
                self._moment("first_served" if len(known) == 1 else "all_served")
                self._ask(task, known)
        if not known:
            raise DaemonError(f"no task is served; the first reason: {self.stories[0].reason}")

    def _drop(self, task: DemoTask) -> None:
        bucket = Path(self.daemon.config.bucket_url)
        self.dropped[task.name] = time.time()
        pack(task.write(self.scratch / task.name), bucket / "tasks", task.name)

    def _served(self, task: DemoTask) -> bool:
        """Wait until a task is served, or was put aside for a reason that its story tells."""
        waiting: float | None = None
        while True:
            self._look()
            rows = self.daemon.ledger.named(task.name)
            state = rows[0].state if rows else None
            if state is State.SERVING or state in ASIDE:
                self._tell(task)
                return state is State.SERVING
            waiting = None if state is not State.PUBLISHED else waiting or time.monotonic()
            if waiting and time.monotonic() - waiting > SWAP_SECONDS:
                raise DaemonError(self._not_swapped(task))
            time.sleep(LOOK_SECONDS)

    def _not_swapped(self, task: DemoTask) -> str:
        replicas = self.daemon.status()["serving"]["replicas"]
        reason = next((each["last_failure"] for each in replicas if each["last_failure"]), "no replica runs")
        return (
            f"{task.name} is published, but not served after {SWAP_SECONDS:g} s: {reason}; the end of the log:\n"
            f"{self.daemon.last_lines()}\n`mqmk-daemon doctor` checks what serving needs"
        )

    def _tell(self, task: DemoTask) -> None:
        row = self.daemon.ledger.named(task.name)[0]
        at = {event.event: event.at for event in self.daemon.ledger.events(row, MANY_EVENTS)}
        names = [name for name, event in STEPS.items() if event in at]
        moments = [self.dropped[task.name], *(at[STEPS[name]] for name in names)]
        seconds = {name: round(end - begin, 2) for name, (begin, end) in zip(names, pairwise(moments), strict=True)}
        self.stories.append(TaskStory(task.name, task.classes, row.state.value, row.reason, row.version, seconds))
        if row.state is not State.SERVING:
            self.view.say(f"{task.name} is {row.state}: {row.reason}")

    def _ask(self, task: DemoTask, known: Sequence[DemoTask]) -> None:
        questions = [question for each in known for question in each.questions]
        served = self._answers(questions, None)
        found = Round(
            after=task.name,
            tasks=len(known),
            classes=sum(len(each.classes) for each in known),
            served=served,
            exact=served if served.matcher == EXACT else self._answers(questions, EXACT),
            single_query=self._answers(questions, BASELINE),
        )
        self.rounds.append(found)
        self.view.round(found, lost(self.rounds, SERVED))

    def _answers(self, questions: Sequence[Question], matcher: str | None) -> Answers:
        return ask(self.daemon.url, questions, matcher, self._look)

    def _look(self) -> None:
        status = self.daemon.status()
        if "page_up" not in self.moments and status["serving"]["replicas"] and is_up(self.daemon.url):
            self._moment("page_up")
            self.view.say(f"the page is up: {self.daemon.url}/ (draw on it while it learns)")
        self.view.look(status)

    def _moment(self, name: str) -> None:
        self.moments[name] = round(time.monotonic() - self.begun, 1)

    def document(self) -> dict[str, Any]:
        """Everything that was found, for `--json` and the state directory."""
        return {
            "schema": SCHEMA,
            "state_dir": str(self.daemon.config.state.dir),
            "url": self.daemon.url,
            "metrics_url": self.daemon.metrics_url if is_up(self.daemon.metrics_url) else None,
            "mlflow": mlflow_command(self.daemon),
            "seconds": self.moments | {"total": round(time.monotonic() - self.begun, 1)},
            "tasks": [asdict(story) for story in self.stories],
            "rounds": [_figures(self.rounds[:end]) for end in range(1, len(self.rounds) + 1)],
        }


def mlflow_command(daemon: DemoDaemon) -> str | None:
    """What to type to see the trainings and versions."""
    command = f"{typed('mlflow')} ui --backend-store-uri {daemon.config.tracking_uri}"
    return command if daemon.config.mlflow.enabled else None


def lost(rounds: Sequence[Round], kind: Kind) -> float:
    """Forgetting: what tasks lost since they were learned, on average."""
    return forgetting([[*kind(each).by_task.values()] for each in rounds])


def _figures(rounds: Sequence[Round]) -> dict[str, Any]:
    last = rounds[-1]
    kinds: dict[str, Kind] = {name: attrgetter(name) for name in ("served", "exact", "single_query")}
    figures = {
        name: asdict(kind(last)) | {"accuracy": kind(last).accuracy, "forgetting": lost(rounds, kind)}
        for name, kind in kinds.items()
    }
    return {"after": last.after, "tasks": last.tasks, "classes": last.classes} | figures
