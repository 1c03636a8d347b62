"""The HTML report about a state directory: tasks, versions, matching, forgetting.

All figures were measured on held-out images when a version was built and are read from the ledger; nothing is
recomputed. The daemon may run or not.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Final

from markupsafe import Markup

from mqmk.daemon.config.sections import Config
from mqmk.daemon.errors import DaemonError
from mqmk.daemon.ledger.ledger import IN_POOL, Ledger, TaskRow, VersionRow
from mqmk.daemon.status.figures import Share, task_figures, version_figures
from mqmk.daemon.status.snapshot import Snapshot
from mqmk.daemon.words import plural, summarize
from mqmk.learner.report.charts import heat_map, line_chart
from mqmk.learner.report.render import render

MAX_TASKS: Final = 40
"""A confusion map of more tasks is not readable."""


@dataclass(frozen=True)
class TaskHistory:
    """A task of the current version: its figures when it was learned, and now."""

    row: TaskRow
    then: Mapping[str, float]
    now: Mapping[str, float]

    @property
    def lost(self) -> float | None:
        """Accuracy lost since then; negative if it improved. None without held-out images."""
        return self.then["accuracy"] - self.now["accuracy"] if self.then and self.now else None


@dataclass(frozen=True)
class History:
    """What the report shows."""

    overview: Mapping[str, Any]
    versions: Sequence[VersionRow]
    """Each with figures over all tasks only."""
    current: VersionRow
    kept: Sequence[TaskHistory]
    names: Mapping[int, str]
    """Of every task, also of forgotten ones."""

    def changed_by(self, version: VersionRow) -> str:
        """The tasks that a version adds, or the one that it leaves out."""
        return summarize([self.names[each.task] for each in version.tasks])

    @property
    def measured(self) -> list[VersionRow]:
        """The versions that were evaluated on held-out images."""
        return [each for each in self.versions if each.evaluation.get("held_out")]

    @property
    def forgetting(self) -> float | None:
        """The accuracy that tasks lost since they were learned, on average."""
        lost = [each.lost for each in self.kept if each.lost is not None]
        return fmean(lost) if lost else None


def read_history(config: Config, ledger: Ledger) -> History:
    """Read the ledger; DaemonError before the first version."""
    found = Snapshot(config, ledger)
    number = found.current_version()
    if number is None:
        raise DaemonError(f"{config.state.dir}: nothing has been learned yet; `mqmk-daemon status` shows the progress")
    current, then = ledger.version(number), ledger.figures_when_learned()
    now = current.evaluation.get("tasks", {})
    kept = [TaskHistory(row, then.get(row.id, {}), now.get(row.name, {})) for row in ledger.tasks(*IN_POOL)]
    kept.sort(key=lambda each: each.row.version or 0)
    return History(found.status(), ledger.summarized_versions(), current, kept, ledger.names())


def render_report(history: History) -> str:
    """The page as HTML."""
    classes = sum(len(each["classes"]) for each in history.overview["tasks"] if each["state"] in IN_POOL)
    counts, sizes = history.current.evaluation.get("confusion", {}), _count_tasks(history.versions)
    names = [each.row.name for each in history.kept if each.row.name in counts]
    return render(
        "status_report.html.j2",
        __package__,
        heading=f"{plural(classes, 'class', 'classes')} in {plural(len(history.kept), 'task')}",
        history=history,
        figures=version_figures(history.current.evaluation),
        tasks=[(each, *_shares(each)) for each in history.overview["tasks"]],
        versions=[(each, version_figures(each.evaluation), sizes[each.version]) for each in history.versions],
        charts=_charts(history.measured),
        confusion_map=_confusion_map(history.current, names) if 0 < len(names) <= MAX_TASKS else None,
        mistakes=_mistakes(history.current.evaluation) if len(names) > MAX_TASKS else None,
        worst_classes=_worst_classes(history.current.evaluation),
        mistaken_classes=history.current.evaluation.get("mistaken_classes", []),
        plural=plural,
    )


def _count_tasks(versions: Sequence[VersionRow]) -> dict[int, int]:
    """Version -> how many tasks it contains."""
    counts: dict[int, int] = {}
    for each in versions:
        changed = len(each.tasks) if each.kind == "learn" else -len(each.tasks)
        counts[each.version] = counts.get(each.parent or 0, 0) + changed
    return counts


def _shares(task: Mapping[str, Any]) -> list[Share | None]:
    """Matching rate and accuracy of a task in the current version."""
    rates = [task[name] for name in ("matching_rate", "accuracy")]
    return [None if rate is None else Share(rate, task["images"]) for rate in rates]


def _charts(measured: Sequence[VersionRow]) -> list[Markup]:
    if not measured:
        return []
    numbers, figures = [each.version for each in measured], [version_figures(each.evaluation) for each in measured]
    served = {
        "accuracy": [each.accuracy.value if each.accuracy else 0.0 for each in figures],
        "matching": [each.matching.value if each.matching else 0.0 for each in figures],
    }
    charts = [line_chart("What is served", served, {"accuracy": 0, "matching": 3}, "pool version", numbers)]
    matchers = [each.evaluation["matchers"] for each in measured]
    names = [name for name in matchers[-1] if all(name in each for each in matchers)]
    rates = {name: [each[name]["rate"] for each in matchers] for name in names}
    colours = {name: place for place, name in enumerate(names)}
    if rates:
        charts.append(line_chart("Matching rate of each matcher", rates, colours, "pool version", numbers))
    return charts


def _confusion_map(current: VersionRow, names: Sequence[str]) -> Markup:
    counts = current.evaluation["confusion"]
    matrix = [[counts[true].get(matched, 0) for matched in names] for true in names]
    return heat_map(str(current.evaluation["matcher"]), names, matrix)


def _mistakes(evaluation: Mapping[str, Any]) -> list[tuple[int, str, str, float]]:
    """The most frequent confusions, for pools with too many tasks for a map."""
    counts: Mapping[str, Mapping[str, int]] = evaluation["confusion"]
    pairs = [(n, true, other) for true, row in counts.items() for other, n in row.items() if other != true]
    worst = sorted(pairs, reverse=True)[:MAX_TASKS]
    images = {name: task_figures(evaluation, name).images or sum(row.values()) for name, row in counts.items()}
    return [(n, true, other, n / images[true]) for n, true, other in worst]


def _worst_classes(evaluation: Mapping[str, Any]) -> list[tuple[str, Share, int]]:
    """Label, accuracy and how many images were right: of the least accurate classes, which is all that is recorded."""
    found = evaluation.get("classes", {})
    return [(label, Share(row["right"] / row["images"], row["images"]), row["right"]) for label, row in found.items()]
