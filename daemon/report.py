"""What a state directory looks like on one page: tasks, versions, how well each was matched, what was forgotten.

Everything was measured on held-out pictures when a version was built, and is read from the ledger; nothing is computed
anew, and the daemon may run or not.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Final

from mqmk.daemon.config import Config
from mqmk.daemon.errors import DaemonError
from mqmk.daemon.ledger import Ledger, State, TaskRow, VersionRow
from mqmk.daemon.overview import Overview
from mqmk.learner.charts import bar, heat_map, line_chart
from mqmk.learner.markup import Content, Markup, cells, join, table, tag
from mqmk.learner.page import page, per_cent, section, tiles

NONE: Final = "–"
MOST_TASKS: Final = 40
"""More do not fit into a map that can be read."""


@dataclass(frozen=True)
class Kept:
    """A task of the current version: how well it did when it was learned, and how well it does now."""

    row: TaskRow
    then: Mapping[str, float]
    now: Mapping[str, float]

    @property
    def lost(self) -> float | None:
        """Of its accuracy; negative if it was gained. None without held-out pictures."""
        return self.then["accuracy"] - self.now["accuracy"] if self.then and self.now else None


@dataclass(frozen=True)
class History:
    """What the ledger says, put together."""

    overview: Mapping[str, Any]
    versions: Sequence[VersionRow]
    current: VersionRow
    kept: Sequence[Kept]
    names: Mapping[int, str]
    """Of every task that ever was."""

    @property
    def measured(self) -> list[VersionRow]:
        """The versions that were evaluated on held-out pictures."""
        return [each for each in self.versions if each.evaluation.get("held_out")]

    @property
    def forgetting(self) -> float | None:
        """What tasks lost since they were learned, on average."""
        lost = [each.lost for each in self.kept if each.lost is not None]
        return fmean(lost) if lost else None


def history_of(config: Config, ledger: Ledger) -> History:
    """Read it; DaemonError before the first version."""
    found = Overview(config, ledger)
    number = found.current_version()
    if number is None:
        raise DaemonError(f"{config.state.dir}: nothing has been learned yet; `mqmk-daemon status` says what happens")
    versions = {row.version: row for row in ledger.versions()}
    current = ledger.version(number)
    kept = []
    for row in ledger.tasks(State.PUBLISHED, State.SERVING):
        first = versions[row.version].evaluation if row.version in versions else {}
        figures = [each.get("tasks", {}).get(row.name, {}) for each in (first, current.evaluation)]
        kept.append(Kept(row, figures[0], figures[1]))
    kept.sort(key=lambda each: each.row.version or 0)
    names = {row.id: row.name for row in ledger.tasks()}
    return History(found.status(), [*versions.values()], current, kept, names)


def report_page(history: History) -> str:
    """The page."""
    sections = [
        section("tasks", "Tasks", _tasks(history)),
        section("versions", "Versions", _versions(history)),
        section("confusion", "Which task was matched", _confusion(history)),
        section("forgetting", "What was forgotten", _forgetting(history.kept)),
        section("matchers", "Matchers", _matchers(history.current.evaluation)),
    ]
    links = [tag("a", title, href=f"#{name}") for name, title, _ in sections]
    classes = sum(len(each.row.report["samples"]) if each.row.report else 0 for each in history.kept)
    heading = f"{classes} classes in {len(history.kept)} tasks"
    about = (
        f"Version {history.current.version} of {history.overview['state_dir']}, which is {history.overview['state']}. "
        "Rates are of held-out pictures, measured when a version was built."
    )
    body = (tag("h1", heading), tag("p", about), _tiles(history), tag("nav", *links), *(each for *_, each in sections))
    return page(heading, tag("main", *body))


def _tiles(history: History) -> Markup:
    measured = history.current.evaluation
    shown = {
        "current version": str(history.current.version),
        "accuracy, mean over tasks": _rate(measured.get("accuracy")),
        f"matching rate ({measured.get('matcher') or NONE})": _rate(measured.get("matching_rate")),
        "forgetting": _rate(history.forgetting),
        "held-out pictures": f"{measured.get('held_out', 0):,}",
    }
    return tiles(shown)


def _tasks(history: History) -> Markup:
    """All of them, also those that are not served, with the reason."""
    header = cells("th", "task", "state", "version", "samples", "matched", "accuracy", "classes", "why")
    rows = [
        cells(
            "td", each["name"], each["state"], str(each["version"] or NONE), str(each["samples"] or NONE),
            _rate(each["matching_rate"]), _rate(each["accuracy"]), _listed(each["classes"]), each["reason"] or "",
        )
        for each in history.overview["tasks"]
    ]  # fmt: skip
    return table(header, rows, class_="words")


def _listed(classes: Sequence[str]) -> Content:
    """Many classes open on request."""
    names = ", ".join(classes)
    return names if len(classes) <= 5 else tag("details", tag("summary", f"{len(classes)} classes"), names)


def _versions(history: History) -> Markup:
    header = cells("th", "version", "made by", "tasks", "held-out pictures", "matcher", "matching rate", "accuracy")
    rows = [
        cells(
            "td", f"{row.version}{' (current)' if row.version == history.current.version else ''}",
            f"{row.kind} {history.names.get(row.task or 0, '')}", str(len(row.evaluation.get("tasks", {}))),
            str(row.evaluation.get("held_out", 0)), row.evaluation.get("matcher") or NONE,
            _rate(row.evaluation.get("matching_rate")), _rate(row.evaluation.get("accuracy")),
        )
        for row in history.versions
    ]  # fmt: skip
    return join(_charts(history.measured), table(header, rows))


def _charts(measured: Sequence[VersionRow]) -> Markup | None:
    if not measured:
        return None
    numbers = [each.version for each in measured]
    served = {name: [each.evaluation[key] for each in measured] for name, key in _SERVED.items()}
    first = line_chart("What is served", served, {"accuracy": 0, "matching": 3}, "pool version", numbers)
    names = [name for name in measured[-1].evaluation["matchers"] if all(_has(each, name) for each in measured)]
    rates = {name: [each.evaluation["matchers"][name]["rate"] for each in measured] for name in names}
    colours = {name: place for place, name in enumerate(names)}
    second = line_chart("Matching rate of each matcher", rates, colours, "pool version", numbers) if rates else None
    return tag("div", first, second, class_="pair")


_SERVED: Final = {"accuracy": "accuracy", "matching": "matching_rate"}


def _has(row: VersionRow, matcher: str) -> bool:
    return matcher in row.evaluation["matchers"]


def _confusion(history: History) -> Markup:
    counts = history.current.evaluation.get("confusion", {})
    names = [each.row.name for each in history.kept if each.row.name in counts]
    if not names:
        return tag("p", "No held-out pictures, so nothing was measured.")
    if len(names) > MOST_TASKS:
        return _confused_pairs(counts)
    about = "Rows are true tasks, columns matched tasks, numbers per cent of the row's pictures; empty means none."
    matrix = [[counts[true].get(matched, 0) for matched in names] for true in names]
    return join(tag("p", about), heat_map(str(history.current.evaluation["matcher"]), names, matrix))


def _confused_pairs(counts: Mapping[str, Mapping[str, int]]) -> Markup:
    """What many tasks get instead of a map: whom they were taken for most often."""
    pairs = [(n, true, other) for true, row in counts.items() for other, n in row.items() if other != true]
    worst = sorted(pairs, reverse=True)[:MOST_TASKS]
    rows = [cells("td", true, other, str(n), per_cent(n / sum(counts[true].values()))) for n, true, other in worst]
    about = f"The {len(rows)} most frequent mistakes."
    return join(tag("p", about), table(cells("th", "true task", "matched task", "pictures", "of its own"), rows))


def _forgetting(kept: Sequence[Kept]) -> Markup:
    header = cells("th", "task", "learned as version", "accuracy then", "accuracy now", "lost", "matched then", "now")
    rows = [
        cells(
            "td", each.row.name, str(each.row.version), _rate(each.then.get("accuracy")),
            _rate(each.now.get("accuracy")), _rate(each.lost), _rate(each.then.get("matching_rate")),
            _rate(each.now.get("matching_rate")),
        )
        for each in kept
    ]  # fmt: skip
    about = "What a task computes never changes; an answer changes only where a later task wins the match."
    return join(tag("p", about), table(header, rows))


def _matchers(evaluation: Mapping[str, Any]) -> Markup:
    header = cells("th", "matcher", "matching rate", "", "as exact matching", "accuracy", "queries a picture")
    rows = [
        cells(
            "td", name, _rate(row["rate"]), bar(row["rate"]), _rate(row["agreement"]), _rate(row["accuracy"]),
            f"{row['cost']:.1f}",
        )
        for name, row in evaluation.get("matchers", {}).items()
    ]  # fmt: skip
    return table(header, rows)


def _rate(value: float | None) -> str:
    return NONE if value is None else per_cent(value)
