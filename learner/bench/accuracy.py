"""How well a stream of tasks is learned: the paper's tables for one's own folder, `mqmk-daemon bench accuracy`.

One run learns the tasks one after another and, after each, evaluates every matcher on the held-out images of all
tasks seen so far. What only changes how keys are used (keys per task, top-K, classifier) is evaluated on the same
trained pool; what changes training (`sweep_prompts`) is a run of its own.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from torch.nn import functional as F

from mqmk.learner.data.streams import StreamSettings, read_joint, read_stream
from mqmk.learner.data.tasks import Task
from mqmk.learner.evaluation import metrics
from mqmk.learner.evaluation.ablations import Ablations, ablation_figures, mean_figures
from mqmk.learner.evaluation.evaluate import Evaluation, Tally
from mqmk.learner.evaluation.query_table import HeldOut, QueryTable, extend
from mqmk.learner.settings import TrainSettings
from mqmk.learner.training.train import Progress, empty_pool, train_task
from mqmk.matcher.matcher_info import EXACT, MATCHER_INFO
from mqmk.matcher.prompted_vit import FrozenViT


@dataclass(frozen=True)
class AccuracySettings:
    """What is run."""

    stream: StreamSettings
    train: TrainSettings = field(default_factory=TrainSettings)
    matchers: tuple[str, ...] = tuple(MATCHER_INFO)
    seeds: int = 1
    joint: bool = False
    ablations: bool = False
    lengths: tuple[int, ...] = ()
    """Lengths of an e-prompt to try beside the chosen one, each a run of its own."""
    layers: tuple[tuple[int, ...], ...] = ()
    """Blocks of an e-prompt to try, likewise."""


@dataclass(frozen=True, eq=False)
class Run:
    """One seed: what was measured after each task, and the last pool with all queries."""

    tallies: tuple[dict[str, Tally], ...]
    """One entry after each task, by matcher."""
    evaluation: Evaluation
    plain_ncm: float
    """Accuracy without any prompt: nearest class mean of plain queries over all classes."""
    joint_accuracy: float | None
    train_seconds: float
    evaluate_seconds: float

    def figures(self, matcher: str) -> dict[str, float]:
        """The columns of the table for one matcher."""
        last = self.tallies[-1][matcher]
        history = [row[matcher].task_accuracy_task for row in self.tallies]
        return {
            "accuracy": last.accuracy,
            "matching_rate": last.matching_rate,
            "calibration_error": last.calibration_error,
            "accuracy_all": metrics.mean_of_measured(last.task_accuracy_all),
            "accuracy_task": metrics.average_accuracy(history),
            "accuracy_pooled": last.accuracy_task,
            "forgetting": metrics.forgetting(history),
            "forgetting_max": metrics.forgetting_from_best(history),
            "recall_at_3": last.recall_at_3,
            "agreement": last.agreement,
            "queries": last.num_queries,
        }


@dataclass(frozen=True, eq=False)
class Step:
    """The progress of a benchmark, for display."""

    seed: int
    task: int
    tasks: int
    progress: Progress | None
    tallies: dict[str, Tally] | None


def run_stream(
    vit: FrozenViT, settings: AccuracySettings, seed: int, on_step: Callable[[Step], None] = lambda _: None
) -> Run:
    """Learn all tasks of one seed, evaluating after each."""
    train = replace(settings.train, seed=seed)
    pool, table, held_out = empty_pool(vit, train), QueryTable.empty(vit.dim), HeldOut.empty(vit.info.image_size)
    tallies: list[dict[str, Tally]] = []
    seconds = {"train": 0.0, "evaluate": 0.0}
    for number, task in enumerate(read_stream(settings.stream, vit.info, seed)):

        def draw(progress: Progress | None = None, found: dict[str, Tally] | None = None, at: int = number) -> None:
            on_step(Step(seed, at, settings.stream.tasks, progress, found))

        begun = time.monotonic()
        pool = train_task(task, vit, pool, train, on_epoch=draw).added_to(pool)
        trained = time.monotonic()
        held_out = held_out.with_task(number, task.held_out)
        table = extend(table, vit, pool, held_out, seed)
        evaluation = Evaluation(pool.to(torch.device("cpu")), table, held_out)
        tallies.append({name: evaluation.tally(name) for name in settings.matchers})
        seconds["train"] += trained - begun
        seconds["evaluate"] += time.monotonic() - trained
        draw(found=tallies[-1])
    joint = _joint_accuracy(read_joint(settings.stream, vit.info, seed), vit, train) if settings.joint else None
    return Run(tuple(tallies), evaluation, _plain_ncm(evaluation), joint, seconds["train"], seconds["evaluate"])


def sweep_prompts(
    vit: FrozenViT, settings: AccuracySettings, on_step: Callable[[Step], None] = lambda _: None
) -> Ablations:
    """What length and depth of the e-prompts change, by exact matching: runs with one choice changed at a time."""

    def measure(**changed: Any) -> dict[str, float]:
        other = replace(settings, train=replace(settings.train, **changed), matchers=(EXACT,), joint=False)
        runs = [run_stream(vit, other, seed, on_step) for seed in range(settings.seeds)]
        return mean_figures([run.tallies[-1][EXACT] for run in runs])

    found = {
        "e-prompt length": {str(length): measure(e_length=length) for length in settings.lengths},
        "e-prompt blocks": {f"{layers[0]}-{layers[-1]}": measure(e_layers=layers) for layers in settings.layers},
    }
    return {choice: values for choice, values in found.items() if values}


def _plain_ncm(evaluation: Evaluation) -> float:
    means = torch.cat([task.plain_means for task in evaluation.pool.tasks if task.plain_means is not None])
    answers = (evaluation.table.plain @ F.normalize(means, dim=1).T).argmax(dim=1)
    return (answers == evaluation.true_row).float().mean().item()


def _joint_accuracy(joint: Task, vit: FrozenViT, settings: TrainSettings) -> float:
    """The upper row of the paper's tables: all classes at once, as one task."""
    accuracy: list[float | None] = []
    train_task(joint, vit, empty_pool(vit, settings), replace(settings, plain_means=False),
               on_epoch=lambda progress: accuracy.append(progress.held_out_accuracy))  # fmt: skip
    return accuracy[-1] or 0.0


def to_json(
    settings: AccuracySettings, vit: FrozenViT, runs: Sequence[Run], seconds: float, sweeps: Ablations | None = None
) -> dict[str, Any]:
    """What `--json` prints: means over seeds with their standard deviation, and all that was measured after each task.

    `history[matcher][seed][n]` has a(t, n) for both read-outs, matching rates and the confusion of tasks.
    """
    ablations = ablation_figures([run.evaluation for run in runs]) if settings.ablations else {}
    rows: dict[str, dict[str, float | None]] = {}
    for name in settings.matchers:
        figures = [run.figures(name) for run in runs]
        rows[name] = {key: fmean(each[key] for each in figures) for key in figures[0]}
        rows[name] |= {f"{key}_spread": _standard_deviation([each[key] for each in figures]) for key in figures[0]}
    joint = [run.joint_accuracy for run in runs if run.joint_accuracy is not None]
    return {
        "settings": _to_plain_json(asdict(settings) | {"backbone": asdict(vit.info)}),
        "matchers": rows,
        "history": {
            name: _to_plain_json([[asdict(row[name]) for row in run.tallies] for run in runs])
            for name in settings.matchers
        },
        "plain_ncm": fmean(run.plain_ncm for run in runs),
        "joint": fmean(joint) if joint else None,
        "ablations": ablations | (sweeps or {}),
        "seconds": seconds,
        "train_seconds": sum(run.train_seconds for run in runs),
        "evaluate_seconds": sum(run.evaluate_seconds for run in runs),
    }


def _standard_deviation(values: Sequence[float]) -> float | None:
    """Of a sample of seeds; one seed has none."""
    return stdev(values) if len(values) > 1 else None


def _to_plain_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _to_plain_json(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_to_plain_json(each) for each in value]
    return str(value) if isinstance(value, Path) else value
