"""What an evaluation looks like among the artifacts of a run: tables as CSV, and one page that `mlflow ui` can show."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from typing import Final

from mqmk.learner.charts import bar, heat_map
from mqmk.learner.evaluate import Tally
from mqmk.learner.markup import Markup, cells, join, table, tag

FOLDER: Final = "evaluation"
_RATES: Final = ("matching_rate", "accuracy_all", "accuracy_task", "recall_at_3", "agreement")
_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'"


def evaluation_files(tallies: Mapping[str, Tally], tasks: Sequence[str]) -> dict[str, bytes]:
    """Files by name, from what each matcher did on held-out pictures of the named tasks."""
    matchers = [(name, *(getattr(row, rate) for rate in _RATES), row.queries) for name, row in tallies.items()]
    by_task = [
        (name, *rates)
        for name, row in tallies.items()
        for rates in zip(tasks, row.task_matching, row.task_accuracy_all, row.task_accuracy_task, strict=True)
    ]
    return {
        f"{FOLDER}/matchers.csv": _csv(("matcher", *_RATES, "queries"), matchers),
        f"{FOLDER}/tasks.csv": _csv(("matcher", "task", "matching_rate", "accuracy_all", "accuracy_task"), by_task),
        f"{FOLDER}/evaluation.html": _page(tallies, tasks),
    }


def _csv(header: Sequence[str], rows: Iterable[Sequence[object]]) -> bytes:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows([f"{cell:.6g}" if isinstance(cell, float) else cell for cell in row] for row in rows)
    return text.getvalue().encode()


def _page(tallies: Mapping[str, Tally], tasks: Sequence[str]) -> bytes:
    title = f"{len(tasks)} tasks on held-out pictures"
    maps = [heat_map(name, tasks, row.confusion) for name, row in tallies.items()]
    about = "Rows are true tasks, columns matched tasks, numbers per cent of the row's pictures."
    body = tag(
        "main", tag("h1", title), _matchers(tallies), tag("h2", "Which task was matched"), tag("p", about), *maps
    )
    style = Markup(files("mqmk.learner").joinpath("report.css").read_text(encoding="utf-8"))
    policy = tag("meta", http_equiv="Content-Security-Policy", content=_POLICY)
    head = tag("head", tag("meta", charset="utf-8"), policy, tag("title", title), tag("style", style))
    return f"<!doctype html>\n{tag('html', head, tag('body', body), lang='en')}\n".encode()


def _matchers(tallies: Mapping[str, Tally]) -> Markup:
    header = cells("th", "matcher", "matching rate", "", "accuracy, all classes", "accuracy, matched task", "queries")
    rows = [
        cells(
            "td",
            name,
            _per_cent(row.matching_rate),
            bar(row.matching_rate),
            _per_cent(row.accuracy_all),
            _per_cent(row.accuracy_task),
            f"{row.queries:.1f}",
        )
        for name, row in tallies.items()
    ]
    return join(table(header, rows))


def _per_cent(share: float) -> str:
    return f"{100 * share:.1f} %"
