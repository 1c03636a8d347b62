"""The report of `bench compare`: a single HTML file that loads nothing and needs no script."""

import json
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import torch
from markupsafe import Markup

from mqmk.learner.report.charts import heat_map, line_chart, scatter, task_legend
from mqmk.learner.report.render import render

FAMILIES: Final = {
    "statistics": "Statistics on frozen features",
    "prompts": "Prompt methods",
    "pool": "Our pool and its neighbours",
}
IN_EVERY_CHART: Final = ("ncm", "mqmk")
MAPS: Final = ("sqsk", "mqmk", "mqmk-ei", "cprompt", "hide-prompt", "esn")
LINES: Final = 8  # of one chart
WATCHED: Final = 1  # the task that the paper follows over time, its second

FIGURES: Final = {
    "lines": "accuracy and matching rate over time",
    "maps": "selection maps of SQSK and MQMK",
    "prompts": "accuracy with false and true prompts, and of false ones replaced",
    "task-over-time": "accuracy of task 2 over time",
    "queries": "t-SNE of plain, matched, enhanced and perfectly matched queries",
    "depth-length": "depth and length of e-prompts",
    "keys-per-task": "keys of different granularity",
    "top-k": "top-K aggregation",
    "classifiers": "classifiers",
    "perfect": "joint training and perfect match",
    "cost": "cost, sequential and parallel inference, parameters",
    "published": "published figures beside ours",
}
"""Section of the page -> what the paper shows there."""
QUERIES: Final = {
    "plain": "Single queries",
    "matched": "Matched queries",
    "enhanced": "Enhanced queries",
    "perfect": "Perfectly matched queries",
}
CHOICES: Final = {"keys-per-task": "keys per task", "top-k": "top-K", "classifiers": "classifier"}


def write_compare_report(path: Path, document: dict[str, Any]) -> None:
    """Write the page from the JSON document of a comparison. Lines are means over seeds, maps are of the first."""
    methods = document["methods"]
    steps = {name: row["runs"][0]["steps"] for name, row in methods.items()}
    tasks = max(len(each[-1]["task_accuracy"]) for each in steps.values())
    figures: dict[str, Any] | None = document["figures"]
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
        watched=min(WATCHED, tasks - 1) + 1,
        task_charts=_task_charts(methods, min(WATCHED, tasks - 1)),
        figures=figures,
        query_maps=[_query_maps(kind) for kind in figures["queries"].values()] if figures else [],
        sweeps=_sweeps(figures) if figures else [],
        choices={name: figures["ablations"][choice] for name, choice in CHOICES.items()} if figures else {},
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


def _task_charts(methods: dict[str, Any], task: int) -> list[Markup]:
    """a(t, n) of one task after each task from its own on."""
    streams = [name for name, row in methods.items() if len(row["runs"][0]["steps"]) > task and not row["is_leaky"]]
    found = []
    for first in range(0, len(streams), LINES):
        names = streams[first : first + LINES]
        colours = {name: number for number, name in enumerate(names)}
        lines = {name: _mean_lines(methods[name], lambda step: _of_task(step, task))[task:] for name in names}
        lines = {name: line for name, line in lines.items() if None not in line}
        places = range(task + 1, task + 1 + max(map(len, lines.values()), default=0))
        if lines:
            found.append(line_chart(f"Accuracy of task {task + 1}", lines, colours, places=places))
    return found


def _of_task(step: dict[str, Any], task: int) -> float | None:
    known: list[float | None] = step["task_accuracy"]
    return known[task] if task < len(known) else None


def _query_maps(kind: dict[str, Any]) -> dict[str, Any]:
    """Four maps with one legend."""
    names, shapes, group = kind["names"], kind["shapes"], torch.tensor(kind["group"])
    maps = [scatter(title, torch.tensor(kind["maps"][name]), group, names, shapes) for name, title in QUERIES.items()]
    return {"maps": maps, "legend": task_legend(names, shapes), "points": len(group)}


def _sweeps(figures: dict[str, Any]) -> list[dict[str, Any]]:
    """What other lengths and blocks of e-prompts give."""
    found = []
    for choice in ("e-prompt length", "e-prompt blocks"):
        if values := figures[choice]:
            rows = [(value, name, row) for value, by_matcher in values.items() for name, row in by_matcher.items()]
            names = [*next(iter(values.values()))]
            lines = {name: [by_matcher[name]["accuracy_all"] for by_matcher in values.values()] for name in names}
            colours = {name: number for number, name in enumerate(names)}
            chart = line_chart("Accuracy over all classes", lines, colours, choice, [*values])
            found.append({"choice": choice, "rows": rows, "chart": chart})
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
