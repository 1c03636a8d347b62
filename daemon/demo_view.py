"""What a demo looks like: a table that grows on a terminal, or plain lines where there is none."""

import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from mqmk.daemon.demo import BASELINE, EXACT, SERVED, Demo, Round, lost, mlflow_command
from mqmk.daemon.demo_daemon import typed
from mqmk.daemon.demo_pictures import DemoTask
from mqmk.daemon.ledger import State

WORDS: Final[Mapping[str, str]] = {
    State.DISCOVERED: "being checked",
    State.VALIDATED: "waits",
    State.TRAINING: "learning",
    State.TRAINED: "being judged",
    State.PUBLISHED: "swapping in",
    State.SERVING: "served",
}
COLOURS: Final[Mapping[str, str]] = {
    State.SERVING: "green", State.PUBLISHED: "cyan", State.TRAINED: "cyan", State.TRAINING: "magenta",
    State.QUARANTINED: "red", State.CONFLICT: "red", State.HELD: "yellow",
}  # fmt: skip
CAPTION: Final = (
    "Answers over HTTP about pictures that were never learned, of all tasks so far, mixed. Right: how often the right "
    f"task was matched; by the matcher that serves, exactly ({EXACT}), and with a single query ({BASELINE})."
)


class LineView:
    """A line for each change."""

    def __init__(self, console: Console, begun: float) -> None:
        self._console, self._begun = console, begun
        self._shown: dict[str, str] = {}

    def look(self, status: Mapping[str, Any]) -> None:
        """Say what changed since the last look."""
        epochs = _epochs(status)
        for row in status["tasks"]:
            now = _happens(row, epochs)
            if self._shown.get(row["name"]) != now:
                self._shown[row["name"]] = now
                self.say(f"{row['name']}: {now}")

    def round(self, found: Round, forgotten: float) -> None:
        """The figures in a sentence."""
        served, single = found.served, found.single_query
        self.say(
            f"after {found.after}, {found.classes} classes, {served.asked} pictures asked: accuracy "
            f"{served.accuracy:.1%}, forgetting {forgotten:.1%}, matching rate {served.matching_rate:.1%} "
            f"({served.matcher}; {EXACT} {found.exact.matching_rate:.1%}, {BASELINE} {single.matching_rate:.1%})"
        )

    def say(self, line: str) -> None:
        """The line, with the seconds since the start."""
        text = Text(f"{time.monotonic() - self._begun:6.1f} s  {line}")
        self._console.print(text, soft_wrap=True)


class LiveView:
    """One table: a row for each task, with what happens to it and what the service knew after it."""

    def __init__(self, live: Live, tasks: Sequence[DemoTask], begun: float) -> None:
        self._live, self._tasks, self._begun = live, tasks, begun
        self._status: Mapping[str, Any] = {"tasks": [], "progress": []}
        self._figures: dict[str, list[str]] = {}
        self._said = "Ray and the service are starting"

    def look(self, status: Mapping[str, Any]) -> None:
        """Draw it anew."""
        self._status = status
        self._draw()

    def round(self, found: Round, forgotten: float) -> None:
        """The row of a task gets its figures."""
        self._figures[found.after] = _cells(found, forgotten)
        self._draw()

    def say(self, line: str) -> None:
        """The line above the table."""
        self._said = line
        self._draw()

    def _draw(self) -> None:
        passed = _clock(time.monotonic() - self._begun)
        head = Text(f"{passed} since the start; {self._said}", overflow="fold")
        self._live.update(Group(head, self._table()))

    def _table(self) -> Table:
        table = _empty_table()
        rows, epochs = {row["name"]: row for row in self._status["tasks"]}, _epochs(self._status)
        for task in self._tasks:
            row = rows.get(task.name)
            happens = (
                Text(_happens(row, epochs).partition(":")[0], style=COLOURS.get(row["state"], "")) if row else Text("")
            )
            table.add_row(Text(task.name), happens, *self._figures.get(task.name, [""] * 6))
        return table


def _empty_table() -> Table:
    """Narrow enough for 80 letters a line."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, caption=CAPTION, caption_justify="left")
    table.add_column("task", no_wrap=True)
    table.add_column("what happens", min_width=13)
    for name in ("accuracy", "forgot"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("matcher", no_wrap=True)
    for name in ("rate", EXACT, BASELINE):
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _cells(found: Round, forgotten: float) -> list[str]:
    """The figures of one round."""
    rates = [each.matching_rate for each in (found.served, found.exact, found.single_query)]
    return [f"{found.served.accuracy:.1%}", f"{forgotten:.1%}", found.served.matcher, *(f"{one:.1%}" for one in rates)]


def _epochs(status: Mapping[str, Any]) -> dict[str, str]:
    return {each["task"]: f"epoch {each['epoch']} of {each['epochs']}" for each in status["progress"]}


def _happens(row: Mapping[str, Any], epochs: Mapping[str, str]) -> str:
    state = row["state"]
    if state == State.TRAINING and row["name"] in epochs:
        return epochs[row["name"]]
    if state == State.SERVING:
        return f"serves as v{row['version']}"
    return WORDS.get(state) or f"{state}: {row['reason']}"


def _clock(seconds: float) -> str:
    return f"{int(seconds // 60)}:{int(seconds % 60):02}"


def summary(demo: Demo) -> list[str]:
    """How it went, in a few sentences."""
    last, seconds = demo.rounds[-1], demo.moments
    served, exact, single = last.served, last.exact, last.single_query
    took = seconds.get("all_served", seconds["first_served"])
    return [
        f"{last.tasks} tasks with {last.classes} classes are served after {_clock(took)}, the first one after "
        f"{_clock(seconds['first_served'])}.",
        f"Of {served.asked} pictures it never saw, the service names the right class for {served.accuracy:.1%}; tasks "
        f"lost {lost(demo.rounds, SERVED):.1%} since they were learned.",
        f"The right task was matched for {served.matching_rate:.1%} ({served.matcher}, chosen by measurement), "
        f"{exact.matching_rate:.1%} with {EXACT} and {single.matching_rate:.1%} with the single-query baseline "
        f"{BASELINE}, which is right about the class for {single.accuracy:.1%}.",
        *(f"{one.name} is not served, but {one.state}: {one.reason}" for one in demo.stories if one.state != "SERVING"),
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
        ("look", f"{typed('mqmk-daemon')} status --state {state}"),
        ("report", f"{typed('mqmk-daemon')} report --state {state}"),
        ("figures", results),
    ]
    return [(name, text) for name, text in found if text]
