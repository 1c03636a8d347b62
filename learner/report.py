"""What a benchmark of accuracy looks like on one page: a single HTML file that loads nothing and needs no script."""

import base64
import io
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from mqmk.learner.bench_accuracy import AccuracySettings, Run
from mqmk.learner.charts import bar, heat_map, line_chart, scatter, task_legend
from mqmk.learner.evaluate import Evaluation, Tally
from mqmk.learner.markup import Markup, cells, join, table, tag
from mqmk.learner.page import page, per_cent, section, tiles
from mqmk.learner.report_ablations import ablation_tables
from mqmk.matcher.classifiers import logits
from mqmk.matcher.matchers import MATCHERS
from mqmk.matcher.prompted_vit import FrozenViT

POINTS: Final = 600
SAMPLES: Final = 3
THUMBNAIL: Final = 40  # pixels
DETAILED: Final = ("mqmk", "mqmk-ei")
WORDS: Final = {
    "sqsk": "one query without prompts, one key for a task",
    "sqmk": "one query without prompts, one key for a class",
    "mqsk": "a query for every task, one key for a task",
    "mqmk": "a query for every task, one key for a class: exact matching",
    "mqmk-ei": "one query with the mean of all prompts, one key for a class",
    "cascade": "the cheap query of mqmk-ei draws up a shortlist, exact queries decide",
    "ridge": "one query without prompts, a ridge regression over all classes",
    "perfect": "the true task is given: an upper bound, not a method",
}
_PLAIN_FIRST = ("sqsk", "sqmk", "ridge")  # their first query is a whole pass without prompts, which shares nothing
_A_T, _F_T = Markup("A<sub>T</sub>"), Markup("F<sub>T</sub>")


def write_report(
    path: Path, settings: AccuracySettings, vit: FrozenViT, runs: Sequence[Run], document: dict[str, Any]
) -> None:
    """Write the page. Tables show the means of `document`; what concerns single pictures is of the first run."""
    first = runs[0].evaluation
    sections = [
        section("summary", "How well it was learned", _summary(runs, document)),
        section("lines", "After each task", _after_each_task(settings.matchers, runs)),
        section("confusion", "Which task was matched", _confusions(runs[0])),
        section("forgetting", "What was forgotten", _forgetting(settings.matchers, runs)),
        section("map", "Single against matched queries", _query_maps(first)),
        section("classes", "Class by class", _classes(first)),
        section("cost", "What an answer costs", _costs(vit, first, document)),
        section("settings", "Settings", _settings(document)),
    ]
    if document["ablations"]:
        sections.insert(-2, section("ablations", "One choice at a time", ablation_tables(document["ablations"])))
    links = [tag("a", title, href=f"#{name}") for name, title, _ in sections]
    labels, pictures = len(first.pool.labels), len(first.held_out.task)
    heading = f"{labels} classes in {len(first.pool.tasks)} tasks, {pictures:,} held-out pictures"
    about = f"Learned one task after another by prompts on the frozen ViT “{vit.info.name}”. {_seeds(runs)}"
    body = tag("main", tag("h1", heading), tag("p", about), tag("nav", *links), *(each for _, _, each in sections))
    path.write_text(page(heading, body), encoding="utf-8")


def _seeds(runs: Sequence[Run]) -> str:
    if len(runs) == 1:
        return "One seed."
    return f"Means over {len(runs)} seeds ± standard deviation; maps and single classes are of the first seed."


# 1. The table


def _summary(runs: Sequence[Run], document: Mapping[str, Any]) -> Markup:
    rows = document["matchers"]
    columns: dict[str, tuple[str, Callable[[float], str]]] = {
        "matching_rate": ("matching rate", per_cent),
        "accuracy_task": (join(_A_T, " of matched task"), per_cent),
        "accuracy_all": (join(_A_T, " of all classes"), per_cent),
        "forgetting": (_F_T, per_cent),
        "recall_at_3": ("recall@3", per_cent),
        "queries": ("queries", lambda value: f"{value:.1f}"),
    }

    def cell(name: str, key: str) -> Markup:
        spread = tag("small", f" ± {100 * rows[name][f'{key}_spread']:.1f}") if len(runs) > 1 else None
        return join(columns[key][1](rows[name][key]), None if key == "queries" else spread)

    lines = [cells("td", name, *(cell(name, key) for key in columns)) for name in rows]
    others = {"no prompts + nearest class mean": document["plain_ncm"], "joint": document["joint"]}
    for name, accuracy in others.items():
        if accuracy is not None:
            lines.append(cells("td", name, "–", "–", per_cent(accuracy), "–", "–", "1.0"))
    explained = (
        " is the mean accuracy over tasks after the last one, once choosing among the classes of the matched task "
        "and once among all classes; forgetting is what was lost since each task was learned. “joint” learns all "
        "classes at once, from data that a stream of tasks never has together."
    )
    found = table(cells("th", "matcher", *(title for title, _ in columns.values())), lines)
    return join(_tiles(document), tag("p", _A_T, explained), found, _glossary(rows))


def _tiles(document: Mapping[str, Any]) -> Markup:
    rows = document["matchers"]
    name = _main(rows)
    shown: dict[str, str] = {
        join("accuracy ", _A_T, f" ({name})"): per_cent(rows[name]["accuracy_task"]),
        f"matching rate ({name})": per_cent(rows[name]["matching_rate"]),
        join("forgetting ", _F_T, f" ({name})"): per_cent(rows[name]["forgetting"]),
        "without prompts": per_cent(document["plain_ncm"]),
        "minutes of training": f"{document['train_seconds'] / 60:.1f}",
    }
    if document["joint"] is not None:
        shown["all classes at once (joint)"] = per_cent(document["joint"])
    return tiles(shown)


def _main(names: Sequence[str] | Mapping[str, Any]) -> str:
    return "mqmk" if "mqmk" in names else next(iter(names))


def _glossary(names: Mapping[str, Any]) -> Markup:
    rows = [cells("td", name, WORDS.get(name, "")) for name in names]
    return tag(
        "details", tag("summary", "What the matchers do"), table(cells("th", "matcher", "how"), rows, class_="words")
    )


# 2. After each task


def _after_each_task(matchers: Sequence[str], runs: Sequence[Run]) -> Markup:
    def lines(rate: Callable[[Tally], float]) -> dict[str, list[float]]:
        steps = range(len(runs[0].tallies))
        return {name: [fmean(rate(run.tallies[step][name]) for run in runs) for step in steps] for name in matchers}

    order = [*MATCHERS]
    colours = {name: order.index(name) for name in matchers}
    accuracy = line_chart("Mean accuracy of the tasks seen", lines(lambda t: fmean(t.task_accuracy_task)), colours)
    matching = line_chart("Matching rate", lines(lambda t: t.matching_rate), colours)
    about = "Every point is measured on the held-out pictures of all tasks so far. The scale need not begin at 0 %."
    return join(tag("p", about), tag("div", accuracy, matching, class_="pair"))


# 3. and 4. Tasks


def _confusions(run: Run) -> Markup:
    names = _task_names(run.evaluation)
    maps = [heat_map(name, names, run.evaluation.tally(name).confusion) for name in DETAILED]
    about = "Rows are true tasks, columns matched tasks, numbers per cent of the row's pictures; empty means none."
    return join(tag("p", about), tag("div", *maps, class_="pair" if len(names) <= 11 else None))


def _forgetting(matchers: Sequence[str], runs: Sequence[Run]) -> Markup:
    """a(t, t), a(t, T) and their difference, at each place in the stream."""
    shown = [name for name in DETAILED if name in matchers] or [matchers[0]]
    names = _task_names(runs[0].evaluation)

    def figures(name: str, task: int) -> tuple[float, float]:
        then = fmean(run.tallies[task][name].task_accuracy_task[task] for run in runs)
        return then, fmean(run.tallies[-1][name].task_accuracy_task[task] for run in runs)

    found = {name: [figures(name, task) for task in range(len(names))] for name in shown}
    rows = []
    for task, title in enumerate(names):
        pairs = [found[name][task] for name in shown]
        numbers = [per_cent(value) for then, now in pairs for value in (then, now, then - now)]
        rows.append(cells("td", f"{task + 1} {title}", *numbers))
    means = [
        per_cent(fmean(values))
        for name in shown
        for values in ([a for a, _ in found[name]], [b for _, b in found[name]], [a - b for a, b in found[name]])
    ]
    groups = [tag("th", name, colspan=3, scope="colgroup") for name in shown]
    header = join(
        tag("tr", tag("th", "task", rowspan=2, scope="col"), *groups),
        tag("tr", *(tag("th", text, scope="col") for _ in shown for text in ("a(t, t)", "a(t, T)", "difference"))),
    )
    about = "Accuracy on a task just after it was learned, after the last task, and what was lost (negative: gained)."
    return join(tag("p", about), table(header, rows, cells("td", "mean", *means)))


def _task_names(evaluation: Evaluation) -> list[str]:
    return [task.name for task in evaluation.pool.tasks]


# 5. Queries on a plane


def _query_maps(evaluation: Evaluation) -> Markup:
    images = len(evaluation.held_out.task)
    some = torch.randperm(images, generator=torch.Generator().manual_seed(0))[:POINTS]
    task, names = evaluation.held_out.task[some], _task_names(evaluation)
    queries = {
        "Single queries": evaluation.table.plain,
        "Matched queries": evaluation.match("mqmk").query,
    }
    maps = []
    for title, query in queries.items():
        points = F.normalize(query[some], dim=1)
        alike = (points @ points.T).fill_diagonal_(-torch.inf).argmax(dim=1)
        same = (task[alike] == task).float().mean().item() if len(some) > 1 else 0.0
        maps.append(scatter(f"{title}: {same:.0%} beside their own task", on_a_plane(points), task, names))
    about = (
        f"{len(some)} held-out pictures, coloured by their true task: queries without prompts, and queries with the "
        "prompt of the task that mqmk matched. Only who lies near whom has a meaning; the "
        "percentages count nearest neighbours by cosine before the points were laid flat."
    )
    return join(tag("p", about), tag("div", *maps, class_="pair"), task_legend(names))


def on_a_plane(points: Float[Tensor, "points dim"]) -> Float[Tensor, "points 2"]:
    """t-SNE where scikit-learn is installed (MLflow brings it) and there are enough points, else PCA."""
    centred = points - points.mean(dim=0)
    try:
        manifold = import_module("sklearn.manifold")
    except ImportError:
        manifold = None
    if manifold is None or len(points) < 10:
        return centred @ torch.linalg.svd(centred, full_matrices=False).Vh[:2].T
    perplexity = min(30.0, (len(points) - 1) / 3)
    tsne = manifold.TSNE(perplexity=perplexity, init="pca", learning_rate="auto", random_state=0, n_jobs=1)
    return torch.from_numpy(tsne.fit_transform(centred.numpy())).float()


# 6. Classes


def _classes(evaluation: Evaluation) -> Markup:
    found = evaluation.match("mqmk")
    answers = logits(evaluation.pool, found, "fc", "task").argmax(dim=1)
    right = evaluation.rightly(found, "fc", "task")
    matched = found.task == evaluation.held_out.task
    labels = evaluation.pool.labels
    parts = []
    for number, task in enumerate(evaluation.pool.tasks):
        rows = []
        for place, name in enumerate(task.classes):
            own = ((evaluation.held_out.task == number) & (evaluation.held_out.label == place)).nonzero()[:, 0]
            wrong = Counter(labels[answers[image]][1] for image in own[~right[own]].tolist())
            samples = [
                _picture(evaluation.held_out.pixels[image], labels[answers[image]][1], bool(right[image]))
                for image in own[:SAMPLES].tolist()
            ]
            mistaken = " ".join(f"{other} ({count})" for other, count in wrong.most_common(1)) or "–"
            rates = [per_cent(good[own].float().mean().item()) if len(own) else "–" for good in (matched, right)]
            rows.append(cells("td", name, str(len(own)), *rates, mistaken, join(*samples)))
        here = evaluation.held_out.task == number
        rates = [f"{good[here].float().mean().item():.0%}" if here.any() else "–" for good in (matched, right)]
        summary = tag("summary", f"{number + 1} {task.name}", tag("small", f"matched {rates[0]}, right {rates[1]}"))
        header = cells("th", "class", "held out", "matched", "right", "most often confused with", "samples")
        parts.append(tag("details", summary, table(header, rows, class_="classes"), open=number == 0))
    about = "By mqmk, answering among the classes of the matched task. A coloured frame: answered wrongly."
    return join(tag("p", about), *parts)


def _picture(pixels: Tensor, answer: str, right: bool) -> Markup:
    image = Image.fromarray(pixels.permute(1, 2, 0).numpy())  # [3, h, w] -> [h, w, 3]
    image.thumbnail((THUMBNAIL, THUMBNAIL))
    if bool((pixels[0] == pixels[1]).all() and (pixels[1] == pixels[2]).all()):
        image = image.convert("L")  # a third of the bytes
    buffer = io.BytesIO()
    image.save(buffer, "PNG", optimize=True)
    source = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")
    hint = f"answered: {answer}"
    return tag("img", src=source, alt=hint, title=hint, class_=None if right else "wrong")


# 7. Cost


def _costs(vit: FrozenViT, evaluation: Evaluation, document: Mapping[str, Any]) -> Markup:
    queries = {name: row["queries"] for name, row in document["matchers"].items()}
    passes = {name: plain_passes(name, count, vit, evaluation.pool.e_layers[0]) for name, count in queries.items()}
    most = max(passes.values())
    rows = [
        cells("td", name, f"{queries[name]:.1f}", f"{passes[name]:.2f}", bar(passes[name] / most)) for name in queries
    ]
    about = (
        f"For one picture with {len(evaluation.pool.tasks)} tasks. A query is cheaper than a forward pass of the plain "
        "ViT because the layers below the first e-prompt are shared and the last block computes the class token only. "
        "Estimated from multiplications; “mqmk-daemon bench speed” measures."
    )
    return join(
        tag("p", about), table(cells("th", "matcher", "queries", "plain passes (estimate)", ""), rows, class_="words")
    )


def plain_passes(matcher: str, queries: float, vit: FrozenViT, first_e_layer: int) -> float:
    """Multiplications of so many queries in units of a plain forward pass; prompt rows and patches are left out."""
    tokens, dim = vit.tokens, vit.dim
    projection, block = 3 * tokens * dim**2, 12 * tokens * dim**2 + 2 * tokens**2 * dim
    last = 2 * tokens * dim**2 + 2 * tokens * dim + 10 * dim**2  # keys and values of all tokens, one token's rest
    whole = (vit.depth - 1) * block + last
    shared = first_e_layer * block + (projection if first_e_layer < vit.depth - 1 else 2 * tokens * dim**2)
    own = whole - shared
    if matcher in _PLAIN_FIRST:
        return (whole + shared + (queries - 1) * own) / whole
    return (shared + queries * own) / whole


def _settings(document: Mapping[str, Any]) -> Markup:
    shown = json.dumps(document["settings"], indent=2, ensure_ascii=False, default=str)
    return tag("details", tag("summary", "Everything that was set"), tag("pre", shown))
