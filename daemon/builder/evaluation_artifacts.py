"""Evaluation artifacts of a run: tables as CSV, and one page that `mlflow ui` can show.

They stay small however many tasks there are: what a person reads is the worst of them.
"""

import csv
import io
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from markupsafe import Markup

from mqmk.learner.evaluation.sample_evaluation import SampleTally
from mqmk.learner.report.charts import heat_map
from mqmk.learner.report.render import render

FOLDER: Final = "evaluation"
MAP_TASKS: Final = 20
"""More do not fit into a map that can be read."""
TABLE_TASKS: Final = 100
TABLE_PAIRS: Final = 300
_RATES: Final = ("matching_rate", "accuracy", "recall_at_3", "agreement")


def evaluation_files(
    tallies: Mapping[str, SampleTally], detailed: Sequence[str], tasks: Sequence[str]
) -> dict[str, bytes]:
    """Files by name, from the tally of each matcher on held-out images of the named tasks.

    Single tasks and pairs are listed for the `detailed` matchers only.
    """
    matchers = [
        (name, row.images, *(getattr(row, rate) for rate in _RATES), row.num_queries) for name, row in tallies.items()
    ]
    details = {name: tallies[name] for name in detailed}
    by_task = [
        (name, tasks[task], share.images, share.matching_rate, share.accuracy)
        for name, row in details.items()
        for task, share in sorted(row.tasks.items(), key=lambda item: item[1].accuracy)[:TABLE_TASKS]
    ]
    confusion = [
        (name, tasks[true], tasks[matched], images)
        for name, row in details.items()
        for (true, matched), images in sorted(row.confusion.items(), key=lambda item: -item[1])[:TABLE_PAIRS]
    ]
    page = render(
        "evaluation.html.j2",
        __package__,
        heading=f"{len(tasks)} tasks on held-out images",
        tallies=tallies,
        maps=[_confusion_map(name, row, tasks) for name, row in details.items()],
        is_cut=any(len(row.tasks) > MAP_TASKS for row in details.values()),
        most=MAP_TASKS,
    )
    return {
        f"{FOLDER}/matchers.csv": _csv(("matcher", "images", *_RATES, "queries"), matchers),
        f"{FOLDER}/tasks.csv": _csv(("matcher", "task", "images", "matching_rate", "accuracy"), by_task),
        f"{FOLDER}/confusion.csv": _csv(("matcher", "task", "matched", "images"), confusion),
        f"{FOLDER}/evaluation.html": page.encode(),
    }


def _confusion_map(matcher: str, tally: SampleTally, tasks: Sequence[str]) -> Markup:
    """Of the tasks whose images, or whose name, were mistaken most often."""
    mistaken: Counter[int] = Counter()
    for (true, matched), images in tally.confusion.items():
        mistaken.update({true: images, matched: images} if true != matched else {true: 0})
    shown = sorted(sorted(mistaken, key=lambda task: (-mistaken[task], task))[:MAP_TASKS])
    counts = [[tally.confusion.get((true, matched), 0) for matched in shown] for true in shown]
    return heat_map(matcher, [tasks[task] for task in shown], counts)


def _csv(header: Sequence[str], rows: Iterable[Sequence[object]]) -> bytes:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows([f"{cell:.6g}" if isinstance(cell, float) else cell for cell in row] for row in rows)
    return text.getvalue().encode()
