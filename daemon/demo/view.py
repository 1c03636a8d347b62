"""What a demo prints: a live table on a terminal, plain lines elsewhere."""

import time
from collections.abc import Mapping, Sequence
from shlex import quote
from typing import Any, Final

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from mqmk.daemon.demo.daemon import command_name
from mqmk.daemon.demo.scenario import BASELINE, SERVED, Demo, Round, mean_forgetting, mlflow_command
from mqmk.daemon.demo.tasks import DemoTask
from mqmk.daemon.ledger.ledger import State
from mqmk.daemon.words import plural
from mqmk.matcher.matcher_info import EXACT

WORDS: Final[Mapping[str, str]] = {
    State.DISCOVERED: "validating",
    State.VALIDATED: "waiting",
    State.TRAINING: "training",
    State.TRAINED: "evaluating",
    State.PUBLISHED: "rolling out",
    State.SERVING: "serving",
}
COLOURS: Final[Mapping[str, str]] = {
    State.SERVING: "green", State.PUBLISHED: "cyan", State.TRAINED: "cyan", State.TRAINING: "magenta",
    State.QUARANTINED: "red", State.CONFLICT: "red", State.HELD: "yellow",
}  # fmt: skip
CAPTION: Final = (
    "Predictions over HTTP of unseen images of all tasks so far, mixed. Right-hand columns: how often the right task "
    f"was matched by the matcher that serves, by exact matching ({EXACT}) and with a single query ({BASELINE})."
)


class LineView:
    """One line per change."""

    def __init__(self, console: Console, begun: float) -> None:
        self._console, self._begun = console, begun
        self._last: dict[str, str] = {}

    def show_status(self, status: Mapping[str, Any]) -> None:
        """A line for each task that changed."""
        epochs = _epochs(status)
        for row in status["tasks"]:
            now = _progress(row, epochs)
            if self._last.get(row["name"]) != now:
                self._last[row["name"]] = now
                self.show_message(f"{row['name']}: {now}")

    def show_round(self, found: Round, forgotten: float) -> None:
        """The scores in one sentence."""
        served, single = found.served, found.single_query
        self.show_message(
            f"after {found.after}, {found.classes} classes, {served.asked} unseen images: accuracy "
            f"{served.accuracy:.1%}, forgetting {forgotten:.1%}, matching rate {served.matching_rate:.1%} "
            f"({served.matcher}; {EXACT} {found.exact.matching_rate:.1%}, {BASELINE} {single.matching_rate:.1%})"
        )

    def show_message(self, line: str) -> None:
        """The line, after the seconds since the start."""
        text = Text(f"{time.monotonic() - self._begun:6.1f} s  {line}")
        self._console.print(text, soft_wrap=True)


class LiveView:
    """One table with a row per task: its progress, and the scores of the service after it."""

    def __init__(self, live: Live, tasks: Sequence[DemoTask], begun: float) -> None:
        self._live, self._tasks, self._begun = live, tasks, begun
        self._status: Mapping[str, Any] = {"tasks": [], "progress": []}
        self._figures: dict[str, list[str]] = {}
        self._message = "Ray and the service are starting"

    def show_status(self, status: Mapping[str, Any]) -> None:
        """Redraw."""
        self._status = status
        self._draw()

    def show_round(self, found: Round, forgotten: float) -> None:
        """Add the scores to the row of the task."""
        self._figures[found.after] = _cells(found, forgotten)
        self._draw()

    def show_message(self, line: str) -> None:
        """The line above the table."""
        self._message = line
        self._draw()

    def _draw(self) -> None:
        passed = _clock(time.monotonic() - self._begun)
        head = Text(f"{passed} since the start; {self._message}", overflow="fold")
        self._live.update(Group(head, self._table()))

    def _table(self) -> Table:
        table = _empty_table()
        rows, epochs = {row["name"]: row for row in self._status["tasks"]}, _epochs(self._status)
        for task in self._tasks:
            row = rows.get(task.name)
            progress = (
                Text(_progress(row, epochs).partition(":")[0], style=COLOURS.get(row["state"], "")) if row else Text("")
            )
            table.add_row(Text(task.name), progress, *self._figures.get(task.name, [""] * 6))
        return table


def _empty_table() -> Table:
    """Fits into 80 columns."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, caption=CAPTION, caption_justify="left")
    table.add_column("task", no_wrap=True)
    table.add_column("progress", min_width=13)
    for name in ("accuracy", "forgot"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("matcher", no_wrap=True)
    for name in ("rate", EXACT, BASELINE):
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _cells(found: Round, forgotten: float) -> list[str]:
    """The scores of one round."""
    rates = [each.matching_rate for each in (found.served, found.exact, found.single_query)]
    return [f"{found.served.accuracy:.1%}", f"{forgotten:.1%}", found.served.matcher, *(f"{one:.1%}" for one in rates)]


def _epochs(status: Mapping[str, Any]) -> dict[str, str]:
    return {each["task"]: f"epoch {each['epoch']} of {each['epochs']}" for each in status["progress"]}


def _progress(row: Mapping[str, Any], epochs: Mapping[str, str]) -> str:
    state = row["state"]
    if state == State.TRAINING and row["name"] in epochs:
        return epochs[row["name"]]
    if state == State.SERVING:
        return f"serving in v{row['version']}"
    return WORDS.get(state) or f"{state}: {row['reason']}"


def _clock(seconds: float) -> str:
    return f"{int(seconds // 60)}:{int(seconds % 60):02}"


def summary(demo: Demo) -> list[str]:
    """The results in a few sentences."""
    last, seconds = demo.rounds[-1], demo.moments
    served, exact, single = last.served, last.exact, last.single_query
    took = seconds.get("all_served", seconds["first_served"])
    return [
        f"{plural(last.tasks, 'task')} with {plural(last.classes, 'class', 'classes')} served after {_clock(took)}, "
        "the first one after "
        f"{_clock(seconds['first_served'])}.",
        f"Of {served.asked} unseen images, {served.accuracy:.1%} were classified correctly; tasks lost "
        f"{mean_forgetting(demo.rounds, SERVED):.1%} of accuracy since they were learned.",
        f"The right task was matched for {served.matching_rate:.1%} ({served.matcher}, chosen by measurement), "
        f"{exact.matching_rate:.1%} with {EXACT} and {single.matching_rate:.1%} with the single-query baseline "
        f"{BASELINE}, whose accuracy is {single.accuracy:.1%}.",
        *(f"{one.name} is not served: {one.state}, {one.reason}" for one in demo.outcomes if one.state != "SERVING"),
    ]


def places(demo: Demo, document: Mapping[str, Any], results: str) -> list[tuple[str, str]]:
    """What to open or type next."""
    url, image = document["url"], demo.tasks[0].unseen[0]
    state = quote(document["state_dir"])
    found = [
        ("page", f"{url}/"),
        ("API", f"{url}/docs"),
        ("metrics", document["metrics_url"]),
        ("MLflow", mlflow_command(demo.daemon)),
        ("predict", f"curl --data-binary {quote(f'@{image.path}')} {url}/predict"),
        ("status", f"{command_name('mqmk-daemon')} status --state {state}"),
        ("report", f"{command_name('mqmk-daemon')} report --state {state}"),
        ("figures", results),
    ]
    return [(name, text) for name, text in found if text]
