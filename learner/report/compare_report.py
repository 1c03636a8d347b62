"""The report of `bench compare`: a single HTML file that loads nothing and needs no script."""

import json
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from markupsafe import Markup

from mqmk.learner.report.charts import heat_map, line_chart
from mqmk.learner.report.render import render

FAMILIES: Final = {
    "statistics": "Statistics on frozen features",
    "prompts": "Prompt methods",
    "pool": "Our pool and its neighbours",
}
IN_EVERY_CHART: Final = ("ncm", "mqmk")
MAPS: Final = ("sqsk", "mqmk", "mqmk-ei", "cprompt", "hide-prompt", "esn")
LINES: Final = 8  # of one chart


def write_compare_report(path: Path, document: dict[str, Any]) -> None:
    """Write the page from the JSON document of a comparison. Lines are means over seeds, maps are of the first."""
    methods = document["methods"]
    steps = {name: row["runs"][0]["steps"] for name, row in methods.items()}
    tasks = max(len(each[-1]["task_accuracy"]) for each in steps.values())
    page = render(
        "compare_report.html.j2",
        heading=f"{len(methods)} methods on {tasks} tasks",
        vit=document["backbone"],
        seeds=document["settings"]["seeds"],
        note=document["note"],
        methods=methods,
        charts=[
            {"title": title, "charts": found}
            for family, title in FAMILIES.items()
            if (found := _charts(methods, family))
        ],
        maps=[
            heat_map(name, _task_names(tasks), steps[name][-1]["confusion"])
            for name in MAPS
            if name in steps and steps[name][-1]["confusion"]
        ],
        unmatched={name: _unmatched(row) for name, row in methods.items() if row["matching_rate"] is not None},
        most_passes=max(row["test_passes"] for row in methods.values()),
        settings=json.dumps(document["settings"], indent=2),
    )
    path.write_text(page, encoding="utf-8")


def _task_names(tasks: int) -> list[str]:
    return [f"task {number + 1}" for number in range(tasks)]


def _charts(methods: dict[str, Any], family: str) -> list[Markup]:
    """Accuracy and matching rate after each task; joint training has no history."""
    own = [name for name, row in methods.items() if row["family"] == family and not row["is_leaky"]]
    others = [name for name in IN_EVERY_CHART if name in methods and name not in own]
    found = []
    for first in range(0, len(own), LINES - len(others)):
        names = [*own[first : first + LINES - len(others)], *others]
        colours = {name: number for number, name in enumerate(names)}
        accuracy = {name: _mean_lines(methods[name], _mean_accuracy) for name in names}
        matching = {name: _mean_lines(methods[name], lambda step: step["matching_rate"]) for name in names}
        found.append(line_chart("Mean accuracy of the tasks seen", accuracy, colours))
        matching = {name: line for name, line in matching.items() if None not in line}
        if matching.keys() & own:
            found.append(line_chart("Matching rate", matching, colours))
    return found


def _mean_accuracy(step: dict[str, Any]) -> float:
    return fmean(value for value in step["task_accuracy"] if value is not None)


def _mean_lines(row: dict[str, Any], figure: Any) -> list[Any]:
    """The mean over seeds of a figure after each task; None where it was not measured."""
    by_step = zip(*(run["steps"] for run in row["runs"]), strict=True)
    values = [[figure(step) for step in steps] for steps in by_step]
    return [None if None in each else fmean(each) for each in values]


def _unmatched(row: dict[str, Any]) -> float | None:
    """The share of wrongly matched images that were answered correctly, over seeds."""
    found = [run["steps"][-1]["correct_unmatched"] for run in row["runs"]]
    measured = [value for value in found if value is not None]
    return fmean(measured) if measured else None
