"""What the paper's figures show beyond one number a method, measured on the pool of the first seed.

True and false prompts, keys per task, top-K, classifiers, maps of queries, and inference with one prompt at a time or
all at once need no training beyond the pool that the methods share. Depth and length of e-prompts are runs of their
own. Everything is plain JSON, kept in the work folder, so that a page can be drawn again.
"""

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from jaxtyping import Bool
from torch import Tensor
from torch.nn import functional as F

from mqmk.learner.bench.accuracy import AccuracySettings, run_stream
from mqmk.learner.bench.methods.parts.protocol import MethodSettings
from mqmk.learner.bench.methods.parts.trained_pool import TrainedPool
from mqmk.learner.data.streams import StreamSettings, read_stream
from mqmk.learner.evaluation.ablations import ablation_figures, mean_figures
from mqmk.learner.evaluation.evaluate import Evaluation
from mqmk.learner.evaluation.projection import project_2d
from mqmk.learner.evaluation.query_table import HeldOut, QueryTable, extend
from mqmk.learner.settings import TrainSettings
from mqmk.matcher.classifiers import READOUTS
from mqmk.matcher.durable import replace_file
from mqmk.matcher.images import normalise
from mqmk.matcher.matcher_info import EXACT
from mqmk.matcher.matchers import MatchSettings, match_images
from mqmk.matcher.pool import PromptPool
from mqmk.matcher.prompted_vit import FrozenViT

COMPARED: Final = ("sqsk", EXACT)
POINTS: Final = 600
TASKS_OF_CLASSES, CLASSES_OF_TASK = 3, 3  # of the map by class
TIMED: Final = 8  # images


def keep_json(path: Path, compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What the file has, or what is computed and then in the file."""
    if not path.exists():
        replace_file(path, json.dumps(compute()).encode())
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def measure_pool(vit: FrozenViT, stream: StreamSettings, settings: MethodSettings) -> dict[str, Any]:
    """The figures of the shared pool after the last task."""
    evaluation, pool = evaluate_pool(vit, stream, settings)
    return {
        "prompt_choice": {name: compare_prompts(evaluation, name) for name in COMPARED},
        "ablations": ablation_figures([evaluation]),
        "perfect": mean_figures([evaluation.tally("perfect")]),
        "queries": map_queries(evaluation),
        "inference": {name: time_inference(vit, pool, evaluation.held_out, name) for name in (*COMPARED, "mqmk-ei")},
    }


def evaluate_pool(vit: FrozenViT, stream: StreamSettings, settings: MethodSettings) -> tuple[Evaluation, PromptPool]:
    """The pool of all tasks, on the backbone's device, and its evaluation; known training is not done again."""
    trained, held_out = TrainedPool(vit, settings, plain_means=True), HeldOut.empty(vit.info.image_size)
    for number, task in enumerate(read_stream(stream, vit.info, settings.train.seed)):
        trained.learn(task)
        held_out = held_out.with_task(number, task.held_out)
    table = extend(QueryTable.empty(vit.dim), vit, trained.pool, held_out, settings.train.seed)
    return Evaluation(trained.pool.to(torch.device("cpu")), table, held_out), trained.pool


def compare_prompts(evaluation: Evaluation, matcher: str) -> dict[str, Any]:
    """Accuracy with a false and with a true prompt, and of the former with the true prompt in its place."""
    found, perfect = evaluation.match(matcher), evaluation.match("perfect")
    matched = evaluation.is_matched(found)

    def figures(readout: str) -> dict[str, float | None]:
        given, true = (evaluation.is_correct(each, "fc", readout) for each in (found, perfect))
        return {
            "false": _share(given[~matched]),
            "true": _share(given[matched]),
            "false_to_true": _share(true[~matched]),
            "perfect": _share(true),
        }

    return {"images": len(matched), "false_images": int((~matched).sum()), **{way: figures(way) for way in READOUTS}}


def _share(good: Bool[Tensor, " images"]) -> float | None:
    return good.float().mean().item() if len(good) else None


def map_queries(evaluation: Evaluation) -> dict[str, Any]:
    """Queries without prompts, of the matched task, enhanced, and of the true task, on a plane: by task, by class."""
    held_out, tasks = evaluation.held_out, evaluation.pool.tasks
    some = torch.randperm(len(held_out.task), generator=torch.Generator().manual_seed(0))[:POINTS]
    few = (held_out.task < TASKS_OF_CLASSES) & (held_out.label < CLASSES_OF_TASK)
    few_places = few.nonzero()[:, 0]
    pairs = [
        (number, label, task.classes[label])
        for number, task in enumerate(tasks[:TASKS_OF_CLASSES])
        for label in range(min(CLASSES_OF_TASK, len(task.classes)))
    ]
    place = {(number, label): row for row, (number, label, _) in enumerate(pairs)}
    classes = zip(held_out.task[few_places].tolist(), held_out.label[few_places].tolist(), strict=True)
    return {
        "by_task": {
            "maps": _project(evaluation, some),
            "group": held_out.task[some].tolist(),
            "names": [task.name for task in tasks],
            "shapes": list(range(len(tasks))),
        },
        "by_class": {
            "maps": _project(evaluation, few_places),
            "group": [place[pair] for pair in classes],
            "names": [f"{name} (task {number + 1})" for number, _, name in pairs],
            "shapes": [number for number, _, _ in pairs],
        },
    }


def _project(evaluation: Evaluation, images: Tensor) -> dict[str, list[list[float]]]:
    queries = {
        "plain": evaluation.table.plain,
        "matched": evaluation.match(EXACT).query,
        "enhanced": evaluation.table.enhanced,
        "perfect": evaluation.match("perfect").query,
    }
    return {
        name: [[round(x, 2), round(y, 2)] for x, y in project_2d(F.normalize(query[images], dim=1)).tolist()]
        for name, query in queries.items()
    }


@torch.inference_mode()
def time_inference(vit: FrozenViT, pool: PromptPool, held_out: HeldOut, matcher: str) -> dict[str, float]:
    """Milliseconds an image: queries of one prompt after another, and of all prompts in one pass."""
    images = normalise(held_out.pixels[:TIMED].to(vit.device), vit.info)
    at_once = vit.tokens * len(images)

    def measure(tokens: int) -> float:
        seconds = []
        for _ in range(3):
            begun = time.monotonic()
            match_images(matcher, vit, pool, images, MatchSettings(tokens_per_pass=tokens)).task.sum().item()
            seconds.append(time.monotonic() - begun)
        return 1000 * min(seconds) / len(images)

    return {"sequential_ms": measure(at_once), "parallel_ms": measure(at_once * len(pool.tasks))}


def measure_sweep(vit: FrozenViT, stream: StreamSettings, train: TrainSettings) -> dict[str, Any]:
    """SQSK and MQMK with other e-prompts: one run over the stream."""
    run = run_stream(vit, AccuracySettings(stream, replace(train, plain_means=True), COMPARED), train.seed)
    return {name: mean_figures([run.tallies[-1][name]]) for name in COMPARED}
