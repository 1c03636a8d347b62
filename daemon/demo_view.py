"""What a demo looks like: a table that grows on a terminal, or plain lines where there is none."""

import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from mqmk.daemon.demo import Demo, Round, mlflow_command
from mqmk.daemon.demo_pictures import DemoTask
from mqmk.daemon.ledger import State

WORDS: Final[Mapping[str, str]] = {
    State.DISCOVERED: "discovered, being checked",
    State.VALIDATED: "checked, waits for a trainer",
    State.TRAINING: "learning",
    State.TRAINED: "learned, being judged",
    State.PUBLISHED: "published, being swapped in",
    State.SERVING: "served",
}
COLOURS: Final[Mapping[str, str]] = {
    State.SERVING: "green", State.PUBLISHED: "cyan", State.TRAINED: "cyan", State.TRAINING: "magenta",
    State.QUARANTINED: "red", State.CONFLICT: "red", State.HELD: "yellow",
}  # fmt: skip


class LineView:
    """A line for each change."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._begun = time.monotonic()
        self._shown: dict[str, str] = {}

    def look(self, status: Mapping[str, Any]) -> None:
        """Say what changed since the last look."""
        epochs = _epochs(status)
        for row in status["tasks"]:
            now = _happens(row, epochs)
            if self._shown.get(row["name"]) != now:
                self._shown[row["name"]] = now
                self.say(f"{row['name']}: {now}")

    def round(self, found: Round) -> None:
        """The figures in a sentence."""
        served, single = found.served, found.single_query
        self.say(
            f"after {found.after}, {found.classes} classes, {served.asked} pictures asked: "
            f"accuracy {served.accuracy:.1%}, matching rate {served.matching_rate:.1%}, "
            f"forgetting {found.forgetting:.1%} ({served.matcher}); single query: "
            f"accuracy {single.accuracy:.1%}, matching rate {single.matching_rate:.1%}"
        )

    def say(self, line: str) -> None:
        """The line, with the seconds since the start."""
        text = Text(f"{time.monotonic() - self._begun:6.1f} s  {line}")
        self._console.print(text, soft_wrap=True)


class LiveView:
    """One table: a row for each task, with what happens to it and what the service knew after it."""

    def __init__(self, live: Live, tasks: Sequence[DemoTask]) -> None:
        self._live, self._tasks = live, tasks
        self._begun = time.monotonic()
        self._status: Mapping[str, Any] = {"tasks": [], "progress": []}
        self._rounds: dict[str, Round] = {}
        self._said = "Ray and the service are starting"

    def look(self, status: Mapping[str, Any]) -> None:
        """Draw it anew."""
        self._status = status
        self._draw()

    def round(self, found: Round) -> None:
        """The row of a task gets its figures."""
        self._rounds[found.after] = found
        self._draw()

    def say(self, line: str) -> None:
        """The line above the table."""
        self._said = line
        self._draw()

    def _draw(self) -> None:
        head = Text(f"{_clock(time.monotonic() - self._begun)}  {self._said}", overflow="fold")
        self._live.update(Group(head, self._table()))

    def _table(self) -> Table:
        table = empty_table()
        rows, epochs = {row["name"]: row for row in self._status["tasks"]}, _epochs(self._status)
        for task in self._tasks:
            row = rows.get(task.name)
            state = row["state"] if row else ""
            happens = Text(_happens(row, epochs) if row else "", style=COLOURS.get(state, ""))
            version = str(row["version"] or "") if row else ""
            table.add_row(Text(task.name), happens, version, *figures(self._rounds.get(task.name)))
        return table


def empty_table() -> Table:
    """The columns."""
    table = Table(caption="accuracy and matching rate: answers over HTTP, so far learned tasks mixed")
    table.add_column("task", no_wrap=True)
    table.add_column("what happens", no_wrap=True, min_width=20)
    table.add_column("v", justify="right")
    for name in ("accuracy", "matched", "forgot", "1 query\naccuracy", "1 query\nmatched"):
        table.add_column(name, justify="right", no_wrap=True)
    return table


def figures(found: Round | None) -> list[str]:
    """The cells of one round."""
    if found is None:
        return [""] * 5
    served, single = found.served, found.single_query
    values = (served.accuracy, served.matching_rate, found.forgetting, single.accuracy, single.matching_rate)
    return [f"{value:.1%}" for value in values]


def _epochs(status: Mapping[str, Any]) -> dict[str, str]:
    return {each["task"]: f"epoch {each['epoch']} of {each['epochs']}" for each in status["progress"]}


def _happens(row: Mapping[str, Any], epochs: Mapping[str, str]) -> str:
    state = row["state"]
    if state == State.TRAINING and row["name"] in epochs:
        return f"learning, {epochs[row['name']]}"
    return WORDS.get(state) or f"{state}: {row['reason']}"


def _clock(seconds: float) -> str:
    return f"{int(seconds // 60)}:{int(seconds % 60):02}"


def summary(demo: Demo) -> list[str]:
    """How it went, in a few sentences."""
    last, seconds = demo.rounds[-1], demo.moments
    served, single = last.served, last.single_query
    took = seconds.get("all_served", seconds["first_served"])
    return [
        f"{last.tasks} tasks, {last.classes} classes, all served after {_clock(took)}; "
        f"the first one after {_clock(seconds['first_served'])}.",
        f"Asked about {served.asked} pictures it never saw, the service finds the right task for "
        f"{served.matching_rate:.1%} ({served.matcher}, {served.queries:.1f} queries a picture) and the right class "
        f"for {served.accuracy:.1%}; tasks lost {last.forgetting:.1%} since they were learned.",
        f"A single query without prompts ({single.matcher}) finds the right task for {single.matching_rate:.1%} and "
        f"the right class for {single.accuracy:.1%}.",
    ]


def places(demo: Demo, document: Mapping[str, Any], results: str) -> list[tuple[str, str]]:
    """Where to go on."""
    url, question = document["url"], demo.tasks[0].questions[0]
    state = document["state_dir"]
    found = [
        ("page", f"{url}/"),
        ("API", f"{url}/docs"),
        ("metrics", document["metrics_url"]),
        ("MLflow", mlflow_command(demo.daemon)),
        ("ask", f"curl --data-binary '@{question.path}' {url}/predict"),
        ("look", f"mqmk-daemon status --state {state}"),
        ("figures", results),
    ]
    return [(name, text) for name, text in found if text]
