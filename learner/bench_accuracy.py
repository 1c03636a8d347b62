"""How well a stream of tasks is learned: the paper's tables for one's own folder, `mqmk-daemon bench accuracy`.

One run learns the tasks one after another and, after each, evaluates every matcher on the held-out pictures of all
tasks seen so far. What only changes how keys are used (keys per task, top-K, classifier) is evaluated on the same
trained pool; what changes training is a run of its own.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import torch
from torch.nn import functional as F

from mqmk.learner import metrics
from mqmk.learner.ablations import ablation_figures
from mqmk.learner.evaluate import Evaluation, HeldOut, Tally, extend, first_table
from mqmk.learner.settings import TrainSettings
from mqmk.learner.streams import StreamSettings, read_stream
from mqmk.learner.tasks import InMemory, Task
from mqmk.learner.train import Progress, empty_pool, train_task
from mqmk.matcher.matchers import MATCHERS
from mqmk.matcher.prompted_vit import FrozenViT


@dataclass(frozen=True)
class AccuracySettings:
    """What is run."""

    stream: StreamSettings
    train: TrainSettings = field(default_factory=TrainSettings)
    matchers: tuple[str, ...] = tuple(MATCHERS)
    seeds: int = 1
    joint: bool = False
    ablations: bool = False


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
            "matching_rate": last.matching_rate,
            "accuracy_all": fmean(last.task_accuracy_all),
            "accuracy_task": metrics.average_accuracy(history),
            "accuracy_pooled": last.accuracy_task,
            "forgetting": metrics.forgetting(history),
            "forgetting_max": metrics.forgetting_from_best(history),
            "recall_at_3": last.recall_at_3,
            "agreement": last.agreement,
            "queries": last.queries,
        }


@dataclass(frozen=True, eq=False)
class Step:
    """Where a benchmark is, for whoever draws it."""

    seed: int
    task: int
    tasks: int
    progress: Progress | None
    tallies: dict[str, Tally] | None


def run_stream(
    vit: FrozenViT, settings: AccuracySettings, seed: int, report: Callable[[Step], None] = lambda _: None
) -> Run:
    """Learn all tasks of one seed, evaluating after each."""
    train = replace(settings.train, seed=seed)
    pool, table, held_out = empty_pool(vit, train), first_table(vit), HeldOut.nothing(vit.info.image_size)
    tallies: list[dict[str, Tally]] = []
    learned: list[Task] = []
    seconds = {"train": 0.0, "evaluate": 0.0}
    for number, task in enumerate(read_stream(settings.stream, vit.info, seed)):

        def draw(progress: Progress | None = None, found: dict[str, Tally] | None = None, at: int = number) -> None:
            report(Step(seed, at, settings.stream.tasks, progress, found))

        begun = time.monotonic()
        pool = train_task(task, vit, pool, train, report=draw, regression="ridge" in settings.matchers).added_to(pool)
        trained = time.monotonic()
        held_out = held_out.with_task(number, task.held_out)
        if train.g_prompt == "always":  # then every earlier query has changed with it
            table = first_table(vit)
        table = extend(table, vit, pool, held_out, seed)
        evaluation = Evaluation(pool.to(torch.device("cpu")), table, held_out)
        tallies.append({name: evaluation.tally(name) for name in settings.matchers})
        seconds["train"] += trained - begun
        seconds["evaluate"] += time.monotonic() - trained
        draw(found=tallies[-1])
        learned.append(task)
    joint = _joint_accuracy(learned, vit, train) if settings.joint else None
    return Run(tuple(tallies), evaluation, _plain_ncm(evaluation), joint, seconds["train"], seconds["evaluate"])


def _plain_ncm(evaluation: Evaluation) -> float:
    means = torch.cat([task.plain_means for task in evaluation.pool.tasks if task.plain_means is not None])
    answers = (evaluation.table.plain @ F.normalize(means, dim=1).T).argmax(dim=1)
    return (answers == evaluation.true_row).float().mean().item()


def _joint_accuracy(tasks: Sequence[Task], vit: FrozenViT, settings: TrainSettings) -> float:
    """The upper row of the paper's tables: all classes at once, as one task."""

    def together(side: str) -> InMemory:
        parts, offset = [], 0
        for task in tasks:
            batches = list(getattr(task, side).batches(256, seed=None))
            parts += [(batch.pixels, batch.labels + offset) for batch in batches]
            offset += len(task.classes)
        return InMemory(torch.cat([p for p, _ in parts]), torch.cat([labels for _, labels in parts]))

    classes = tuple(name for task in tasks for name in task.classes)
    everything = Task("joint", classes, together("training"), together("held_out"))
    accuracy: list[float | None] = []
    train_task(everything, vit, empty_pool(vit, settings), replace(settings, plain_means=False),
               report=lambda progress: accuracy.append(progress.held_out_accuracy))  # fmt: skip
    return accuracy[-1] or 0.0


def as_document(settings: AccuracySettings, vit: FrozenViT, runs: Sequence[Run], seconds: float) -> dict[str, Any]:
    """What `--json` prints: means over seeds, with their spread."""
    rows = {}
    for name in settings.matchers:
        figures = [run.figures(name) for run in runs]
        rows[name] = {key: fmean(each[key] for each in figures) for key in figures[0]}
        rows[name] |= {f"{key}_spread": pstdev(each[key] for each in figures) for key in figures[0]}
    joint = [run.joint_accuracy for run in runs if run.joint_accuracy is not None]
    return {
        "settings": _plain(asdict(settings) | {"backbone": asdict(vit.info)}),
        "matchers": rows,
        "plain_ncm": fmean(run.plain_ncm for run in runs),
        "joint": fmean(joint) if joint else None,
        "ablations": ablation_figures([run.evaluation for run in runs]) if settings.ablations else {},
        "seconds": seconds,
        "train_seconds": sum(run.train_seconds for run in runs),
        "evaluate_seconds": sum(run.evaluate_seconds for run in runs),
    }


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, Path) else value
