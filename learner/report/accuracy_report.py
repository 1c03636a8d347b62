"""The report of an accuracy benchmark: a single HTML file that loads nothing and needs no script."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import torch
from jaxtyping import Int
from markupsafe import Markup
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from mqmk.learner.bench.accuracy import AccuracySettings, Run
from mqmk.learner.evaluation.evaluate import Evaluation, Tally
from mqmk.learner.evaluation.metrics import accuracy_drop, mean_of_measured
from mqmk.learner.evaluation.projection import project_2d
from mqmk.learner.report.charts import heat_map, line_chart, scatter, task_legend
from mqmk.learner.report.render import render
from mqmk.learner.report.thumbnails import thumbnail_url
from mqmk.matcher.classifiers import logits
from mqmk.matcher.matcher_info import EXACT, MATCHER_INFO
from mqmk.matcher.prompted_vit import FrozenViT

POINTS: Final = 600
SAMPLES: Final = 3
THUMBNAIL: Final = 40  # pixels
DETAILED: Final = (EXACT, "mqmk-ei")


def write_report(
    path: Path, settings: AccuracySettings, vit: FrozenViT, runs: Sequence[Run], document: dict[str, Any]
) -> None:
    """Write the page. Tables show the means of `document`; what concerns single images is of the first run."""
    first, matchers = runs[0].evaluation, document["matchers"]
    tasks = [task.name for task in first.pool.tasks]
    labels, images, e_layer = len(first.pool.labels), len(first.held_out.task), first.pool.e_layers[0]
    page = render(
        "accuracy_report.html.j2",
        heading=f"{labels} classes in {len(tasks)} tasks, {images:,} held-out images",
        vit=vit.info.name,
        seeds=len(runs),
        tasks=tasks,
        **{name: document[name] for name in ("matchers", "plain_ncm", "joint", "train_seconds", "ablations")},
        matcher_info=MATCHER_INFO,
        main_matcher=EXACT if EXACT in matchers else next(iter(matchers)),
        lines=_after_each_task(settings.matchers, runs),
        confusion_maps=[heat_map(name, tasks, first.tally(name).confusion) for name in DETAILED],
        forgetting=_forgetting(settings.matchers, runs),
        query_maps=_query_maps(first, tasks),
        classes=_classes(first),
        passes={name: plain_passes(name, row["queries"], vit, e_layer) for name, row in matchers.items()},
        settings=json.dumps(document["settings"], indent=2, ensure_ascii=False, default=str),
    )
    path.write_text(page, encoding="utf-8")


def _after_each_task(matchers: Sequence[str], runs: Sequence[Run]) -> list[Markup]:
    def lines(rate: Callable[[Tally], float]) -> dict[str, list[float]]:
        steps = range(len(runs[0].tallies))
        return {name: [fmean(rate(run.tallies[step][name]) for run in runs) for step in steps] for name in matchers}

    order = [*MATCHER_INFO]
    colours = {name: order.index(name) for name in matchers}
    accuracy = lines(lambda tally: mean_of_measured(tally.task_accuracy_task))
    return [
        line_chart("Mean accuracy of the tasks seen", accuracy, colours),
        line_chart("Matching rate", lines(lambda tally: tally.matching_rate), colours),
    ]


def _forgetting(matchers: Sequence[str], runs: Sequence[Run]) -> dict[str, Any]:
    """a(t, t), a(t, T) and their difference, for each matcher at each place in the stream."""
    shown = [name for name in DETAILED if name in matchers] or [matchers[0]]

    def figures(name: str, task: int) -> tuple[float | None, float | None, float | None]:
        pairs = [(run.tallies[task][name], run.tallies[-1][name]) for run in runs]
        rates = [(then.task_accuracy_task[task], now.task_accuracy_task[task]) for then, now in pairs]
        return (
            _mean(then for then, _ in rates),
            _mean(now for _, now in rates),
            _mean(accuracy_drop(*pair) for pair in rates),
        )

    tasks = range(len(runs[0].evaluation.pool.tasks))
    rows = [[value for name in shown for value in figures(name, task)] for task in tasks]
    return {"matchers": shown, "rows": rows, "means": [_mean(column) for column in zip(*rows, strict=True)]}


def _mean(values: Iterable[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return fmean(found) if found else None


def _query_maps(evaluation: Evaluation, names: Sequence[str]) -> dict[str, Any]:
    """Queries projected to two dimensions."""
    images = len(evaluation.held_out.task)
    some = torch.randperm(images, generator=torch.Generator().manual_seed(0))[:POINTS]
    task = evaluation.held_out.task[some]
    queries = {
        "Single queries": evaluation.table.plain,
        "Matched queries": evaluation.match(EXACT).query,
        "Enhanced queries": evaluation.table.enhanced,
        "Perfectly matched queries": evaluation.match("perfect").query,
    }
    maps = []
    for title, query in queries.items():
        points = F.normalize(query[some], dim=1)
        alike = (points @ points.T).fill_diagonal_(-torch.inf).argmax(dim=1)
        same = (task[alike] == task).float().mean().item() if len(some) > 1 else 0.0
        maps.append(scatter(f"{title}: {same:.0%} beside their own task", project_2d(points), task, names))
    return {"points": len(some), "maps": maps, "legend": task_legend(names)}


def _classes(evaluation: Evaluation) -> list[dict[str, Any]]:
    """The tasks, each with a row for every class: its rates, its most common mistake, and samples."""
    found = evaluation.match(EXACT)
    answers = logits(evaluation.pool, found, "fc", "task").argmax(dim=1)
    right, matched = evaluation.is_correct(found, "fc", "task"), evaluation.is_matched(found)
    labels, held_out = evaluation.pool.labels, evaluation.held_out

    def rates(images: Int[Tensor, " images"]) -> dict[str, float | None]:
        both = {"matched": matched, "right": right}
        return {name: good[images].float().mean().item() if len(images) else None for name, good in both.items()}

    def sample(image: int) -> dict[str, Any]:
        source = _data_url(held_out.pixels[image])
        return {"source": source, "answer": labels[answers[image]][1], "right": bool(right[image])}

    def row(name: str, own: Int[Tensor, " images"]) -> dict[str, Any]:
        wrong = Counter(labels[answers[image]][1] for image in own[~right[own]].tolist())
        samples = [sample(image) for image in own[:SAMPLES].tolist()]
        return {"name": name, "images": len(own), "mistaken": wrong.most_common(1), "samples": samples, **rates(own)}

    tasks = []
    for number, task in enumerate(evaluation.pool.tasks):
        here = (held_out.task == number).nonzero()[:, 0]
        rows = [row(name, here[held_out.label[here] == place]) for place, name in enumerate(task.classes)]
        tasks.append({"name": task.name, "rows": rows, **rates(here)})
    return tasks


def _data_url(pixels: Tensor) -> str:
    return thumbnail_url(Image.fromarray(pixels.permute(1, 2, 0).numpy()), THUMBNAIL)  # [3, h, w] -> [h, w, 3]


def plain_passes(matcher: str, queries: float, vit: FrozenViT, first_e_layer: int) -> float:
    """The cost of these queries in plain forward passes, by multiplications; prompt rows and patches are left out."""
    tokens, dim = vit.tokens, vit.dim
    projection, block = 3 * tokens * dim**2, 12 * tokens * dim**2 + 2 * tokens**2 * dim
    last = 2 * tokens * dim**2 + 2 * tokens * dim + 10 * dim**2  # keys and values of all tokens, one token's rest
    whole = (vit.depth - 1) * block + last
    shared = first_e_layer * block + (projection if first_e_layer < vit.depth - 1 else 2 * tokens * dim**2)
    own = whole - shared
    if MATCHER_INFO[matcher].uses_plain_query:
        return (whole + shared + (queries - 1) * own) / whole
    return (shared + queries * own) / whole
