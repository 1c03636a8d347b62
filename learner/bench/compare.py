"""Every method on the same stream of tasks, under one protocol: `mqmk-daemon bench compare`.

A method gets the training images of one task after another and nothing else. After each, it scores the test images of
all tasks so far, shuffled together; no test image takes part in training or in the choice of a learning rate. Forward
passes are counted in the ViT itself. What a method and seed gave is a file in the work folder, so a comparison that was
stopped goes on where it was. The file's name covers settings, backbone, the method's file and the shared parts.
"""

import hashlib
import inspect
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Final

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from mqmk.learner.bench import figures
from mqmk.learner.bench.estimate import Estimate, Pending
from mqmk.learner.bench.figures import keep_json, measure_pool, measure_sweep
from mqmk.learner.bench.methods import parts
from mqmk.learner.bench.methods.parts.forward import PassMeter
from mqmk.learner.bench.methods.parts.heads import keep_task
from mqmk.learner.bench.methods.parts.protocol import Answer, Method, MethodInfo, MethodSettings
from mqmk.learner.bench.methods.parts.remembering import Memory, RememberingViT
from mqmk.learner.bench.methods.parts.training import iterate
from mqmk.learner.data.streams import StreamSettings, count_images, read_joint, read_stream
from mqmk.learner.data.tasks import ImageSet, InMemory, Task
from mqmk.learner.evaluation import metrics
from mqmk.learner.evaluation.query_table import BATCH, HeldOut
from mqmk.learner.settings import TrainSettings
from mqmk.learner.training.stopping_slice import split_off
from mqmk.learner.training.train import count_epochs
from mqmk.matcher.durable import replace_file
from mqmk.matcher.images import normalise
from mqmk.matcher.pool import task_of_rows
from mqmk.matcher.prompted_vit import FrozenViT

SCHEMA: Final = 2
OTHER_SETTINGS: Final = "published figures: other weights, splits and epochs"


@dataclass(frozen=True)
class CompareSettings:
    """What is the same for every method."""

    stream: StreamSettings
    train: TrainSettings = field(default_factory=TrainSettings)
    seeds: int = 1
    rates: tuple[float, ...] = (1.0, 3.0, 10.0)
    """Learning rates to try on a part of the first seed's first task, in learning rates of the reference."""
    width: int = 2000
    replay: int = 64
    replay_epochs: int = 10
    figures: bool = False
    """Whether what the paper's figures show is measured, too, on the pool of the first seed."""
    lengths: tuple[int, ...] = ()
    """Lengths of an e-prompt that the figures compare, each a run of its own."""
    layers: tuple[tuple[int, ...], ...] = ()
    """Blocks of an e-prompt, likewise."""

    def for_method(self, seed: int, rate: float) -> MethodSettings:
        """What a method gets."""
        return MethodSettings(replace(self.train, seed=seed), rate, self.width, self.replay, self.replay_epochs)


@dataclass(frozen=True)
class TaskStep:
    """What was measured after one task, on the test images of all tasks so far."""

    task_accuracy: tuple[float | None, ...]
    """a(t, n) of every task t, by the method's own read-out."""
    task_accuracy_all: tuple[float | None, ...]
    """The same over all classes seen, as in the paper."""
    task_accuracy_matched: tuple[float | None, ...] | None
    """The same over the classes of the matched task; None where the method chooses none."""
    accuracy: float
    """Pooled over images."""
    task_of_answer: float
    """Share of images whose answered class belongs to their own task."""
    matching_rate: float | None
    """None where the method chooses no task."""
    correct_unmatched: float | None
    """Share of the images matched to a wrong task that were answered correctly."""
    confusion: tuple[tuple[int, ...], ...] | None
    """Rows: true task, columns: matched task."""
    test_passes: float
    """Plain forward passes an image."""
    train_forward: float
    train_backward: float
    """Plain passes an image of the task, forward and back, over all epochs."""
    trained: int
    kept: int
    train_seconds: float
    """With the seconds of a pool that another method trained."""
    test_seconds: float
    """Without what never changes and had been computed before."""


@dataclass(frozen=True)
class MethodRun:
    """One method and seed."""

    method: str
    seed: int
    rate: float
    """In learning rates of the reference; 1 where none was searched."""
    search_seconds: float
    steps: tuple[TaskStep, ...]
    """One after each task; of joint training only the last."""

    def figures(self) -> dict[str, float | None]:
        """The columns of the table."""
        last, history = self.steps[-1], [step.task_accuracy for step in self.steps]
        is_stream = len(history) == len(last.task_accuracy)
        return {
            "accuracy": metrics.average_accuracy(history),
            "accuracy_pooled": last.accuracy,
            "forgetting": metrics.forgetting(history) if is_stream else None,
            "forgetting_max": metrics.forgetting_from_best(history) if is_stream else None,
            "matching_rate": last.matching_rate,
            "task_of_answer": last.task_of_answer,
            "test_passes": last.test_passes,
            "train_passes": fmean(step.train_forward + step.train_backward for step in self.steps),
            "trained": float(max(step.trained for step in self.steps)),
            "kept": float(last.kept),
            "seconds": self.search_seconds + sum(step.train_seconds + step.test_seconds for step in self.steps),
        }


@dataclass(frozen=True)
class Progress:
    """How far the comparison is, for display."""

    method: str
    seed: int
    tasks: int
    run: MethodRun
    """As far as it was measured."""
    is_known: bool = False
    """Whether it came from the work folder."""
    seconds_left: float | None = None
    """Until all methods and seeds are done, by what has been done so far."""


Draw = Callable[[Progress], None]


def compare(
    vit: FrozenViT,
    methods: Sequence[MethodInfo],
    settings: CompareSettings,
    work: Path,
    draw: Draw = lambda _: None,
) -> list[MethodRun]:
    """All methods, one seed after another; those that have a file in the work folder are not run again.

    Within a seed, what several methods compute alike is computed once. Learning rates are searched for on the first
    seed, and all seeds have them.
    """
    work.mkdir(parents=True, exist_ok=True)
    estimate = estimate_time(vit, methods, settings, work)
    found: dict[tuple[str, int], MethodRun] = {}
    for seed in range(settings.seeds):
        remembering = RememberingViT(vit, Memory())
        for info in methods:
            path = result_path(work, vit, info, settings, seed)
            run = read_run(path)
            if run:
                draw(Progress(info.name, seed, settings.stream.tasks, run, is_known=True))
            else:
                begun, searched = time.monotonic(), found.get((info.name, 0))

                def show(progress: Progress, since: float = begun) -> None:
                    left = max(0.0, estimate.seconds_left() - (time.monotonic() - since))
                    draw(replace(progress, seconds_left=left))

                run = run_method(remembering, info, settings, seed, show, searched.rate if searched else None)
                estimate.finish(info, seed, time.monotonic() - begun)
                replace_file(path, json.dumps({"schema": SCHEMA, **asdict(run)}).encode())
            found[info.name, seed] = run
        if settings.figures and seed == 0:
            measure_figures(remembering, settings, work)
    return [found[info.name, seed] for info in methods for seed in range(settings.seeds)]


def estimate_time(vit: FrozenViT, methods: Sequence[MethodInfo], settings: CompareSettings, work: Path) -> Estimate:
    """Of the runs that have no file in the work folder, in the order in which they run."""
    pending: list[Pending] = [
        (info, seed)
        for seed in range(settings.seeds)
        for info in methods
        if read_run(result_path(work, vit, info, settings, seed)) is None
    ]
    per_task = count_images(settings.stream)[0] / settings.stream.tasks
    epochs = count_epochs(settings.train, "task", math.ceil(per_task / settings.train.batch))
    return Estimate(vit, settings.stream, epochs, len(settings.rates), pending)


def result_path(work: Path, vit: FrozenViT, info: MethodInfo, settings: CompareSettings, seed: int) -> Path:
    """The file of a method and seed; other settings, another backbone or other code give another name."""
    return work / f"{info.name}-seed{seed}-{_digest(vit, settings, Path(inspect.getfile(info.create)))}.json"


def _digest(vit: FrozenViT, settings: CompareSettings, source: Path) -> str:
    """Of the settings that change a result, the backbone, a source file and the parts that methods share."""
    alike = replace(settings, seeds=1, figures=False, lengths=(), layers=())
    chosen = asdict(alike) | {"backbone": asdict(vit.info)}
    digest = hashlib.sha256(json.dumps(chosen, sort_keys=True, default=str).encode())
    shared = Path(inspect.getfile(parts)).parent.glob("*.py")
    for each in (source, *sorted(shared)):
        digest.update(each.read_bytes())
    return digest.hexdigest()[:12]


def measure_figures(vit: FrozenViT, settings: CompareSettings, work: Path) -> dict[str, Any]:
    """What the paper's figures show; what has a file in the work folder is not measured again."""
    digest, train = _digest(vit, settings, Path(inspect.getfile(figures))), replace(settings.train, seed=0)

    def sweep(name: str, **changed: Any) -> dict[str, Any]:
        path = work / f"figures-{name}-{digest}.json"
        return keep_json(path, lambda: measure_sweep(vit, settings.stream, replace(train, **changed)))

    pool = keep_json(
        work / f"figures-{digest}.json", lambda: measure_pool(vit, settings.stream, settings.for_method(0, 1.0))
    )
    blocks = {f"{layers[0]}-{layers[-1]}": layers for layers in settings.layers}
    return pool | {
        "e-prompt length": {str(each): sweep(f"length{each}", e_length=each) for each in settings.lengths},
        "e-prompt blocks": {name: sweep(f"blocks{name}", e_layers=each) for name, each in blocks.items()},
    }


def read_run(path: Path) -> MethodRun | None:
    """What was measured before; None if there is nothing, or it was written by another release."""
    if not path.exists():
        return None
    found: dict[str, Any] = json.loads(path.read_text())
    if found.pop("schema", None) != SCHEMA:
        return None
    steps = tuple(TaskStep(**{name: _to_tuples(value) for name, value in step.items()}) for step in found.pop("steps"))
    return MethodRun(steps=steps, **found)


def _to_tuples(value: Any) -> Any:
    return tuple(_to_tuples(each) for each in value) if isinstance(value, list) else value


def run_method(
    vit: FrozenViT,
    info: MethodInfo,
    settings: CompareSettings,
    seed: int,
    draw: Draw = lambda _: None,
    rate: float | None = None,
) -> MethodRun:
    """Learn all tasks with one method, evaluating after each; with a rate that is given, none is searched for."""
    method: Method | None = None
    run = MethodRun(info.name, seed, 1.0, 0.0, ())
    sizes: list[int] = []
    held_out = HeldOut.empty(vit.info.image_size)
    for tasks, lesson in _lessons(settings.stream, vit, info, seed):
        for task in tasks:
            held_out = held_out.with_task(len(sizes), task.held_out)
            sizes.append(len(task.classes))
        if method is None:
            begun = time.monotonic()
            rate = search_rate(vit, info, settings, seed, lesson) if rate is None else rate
            run = replace(run, rate=rate, search_seconds=time.monotonic() - begun)
            method = info.create(vit, settings.for_method(seed, rate))
        step = learn_and_measure(vit, info, method, lesson, held_out, sizes, seed)
        run = replace(run, steps=(*run.steps, step))
        draw(Progress(info.name, seed, settings.stream.tasks, run))
    return run


def _lessons(
    stream: StreamSettings, vit: FrozenViT, info: MethodInfo, seed: int
) -> Iterator[tuple[Sequence[Task], Task]]:
    """The tasks whose test images are added, and what is learned at once: a task, or all classes as one."""
    tasks = read_stream(stream, vit.info, seed)
    if info.is_joint:
        yield list(tasks), without_test_images(read_joint(stream, vit.info, seed), vit)
        return
    for task in tasks:
        yield [task], without_test_images(task, vit)


def without_test_images(task: Task, vit: FrozenViT) -> Task:
    """What a method gets to see of a task."""
    size = vit.info.image_size
    nothing = InMemory(torch.zeros(0, 3, size, size, dtype=torch.uint8), torch.zeros(0, dtype=torch.int64))
    return replace(task, held_out=nothing)


def search_rate(vit: FrozenViT, info: MethodInfo, settings: CompareSettings, seed: int, first: Task) -> float:
    """The learning rate with the best accuracy on a tenth of the first task's training images, learned without it."""
    if not info.searches_rate or len(settings.rates) == 1:
        return settings.rates[0] if info.searches_rate else 1.0
    rest, tenth = split_off(first.training)
    if tenth is None:
        return settings.rates[0]

    def accuracy(rate: float) -> float:
        method = info.create(vit, settings.for_method(seed, rate))
        method.learn(replace(first, training=rest))
        return _accuracy(vit, method, tenth)

    return max(settings.rates, key=accuracy)  # of equals the first


@torch.no_grad()
def _accuracy(vit: FrozenViT, method: Method, images: ImageSet) -> float:
    correct = 0
    for pixels, labels in iterate(vit, images, BATCH):
        correct += int((method.predict(pixels).scores.argmax(dim=1) == labels).sum())
    return correct / len(images)


def learn_and_measure(
    vit: FrozenViT,
    info: MethodInfo,
    method: Method,
    task: Task,
    held_out: HeldOut,
    sizes: Sequence[int],
    seed: int,
) -> TaskStep:
    """Learn one task, then score all test images. `sizes` are the classes of each task whose images are held out."""
    begun = time.monotonic()
    with PassMeter(vit) as training:
        method.learn(task)
    learned = time.monotonic()
    with PassMeter(vit) as testing:
        answers = predict_all(vit, method, held_out, seed, mixed=not info.is_leaky)
    row_task, images = task_of_rows(sizes), len(task.training)
    starts = torch.tensor([0, *sizes]).cumsum(0)
    true_row = starts[held_out.task] + held_out.label
    answered = answers.scores.argmax(dim=1)
    correct = answered == true_row

    def by_task(good: Bool[Tensor, " images"]) -> tuple[float | None, ...]:
        return tuple(_share(good[held_out.task == number]) for number in range(len(sizes)))

    matched = None if info.is_joint else answers.matched_task  # one task with all classes cannot be mistaken
    is_matched = None if matched is None else matched == held_out.task
    scores = answers.scores if answers.all_scores is None else answers.all_scores
    within = None if matched is None else keep_task(scores, row_task, matched)
    return TaskStep(
        task_accuracy=by_task(correct),
        task_accuracy_all=by_task(scores.argmax(dim=1) == true_row),
        task_accuracy_matched=None if within is None else by_task(within.argmax(dim=1) == true_row),
        accuracy=_share(correct) or 0.0,
        task_of_answer=_share(row_task[answered] == held_out.task) or 0.0,
        matching_rate=None if is_matched is None else _share(is_matched),
        correct_unmatched=None if is_matched is None else _share(correct[~is_matched]),
        confusion=None if matched is None else _count_pairs(held_out.task, matched, len(sizes)),
        test_passes=testing.forward / max(1, len(held_out.task)),
        train_forward=training.forward / images,
        train_backward=training.backward / images,
        trained=method.trained,
        kept=sum(tensor.numel() for tensor in method.kept().values()),
        train_seconds=learned - begun + training.known_seconds,
        test_seconds=time.monotonic() - learned,
    )


@torch.no_grad()
def predict_all(vit: FrozenViT, method: Method, held_out: HeldOut, seed: int, mixed: bool = True) -> Answer:
    """The answers for all images, in their own order, from batches that mix the tasks.

    Not mixed: batches of one task, as codes with the batch bug are tested.
    """
    images = len(held_out.task)
    if mixed:
        batches = torch.randperm(images, generator=torch.Generator().manual_seed(seed)).split(BATCH)
    else:
        by_task = [(held_out.task == task).nonzero()[:, 0] for task in held_out.task.unique().tolist()]
        batches = tuple(part for own in by_task for part in own.split(BATCH))
    order = torch.cat(batches).argsort()
    found = [method.predict(normalise(held_out.pixels[part].to(vit.device), vit.info)) for part in batches]
    scores = torch.cat([answer.scores.cpu() for answer in found])[order]
    matched = [answer.matched_task.cpu() for answer in found if answer.matched_task is not None]
    everything = [answer.all_scores.cpu() for answer in found if answer.all_scores is not None]
    return Answer(
        scores,
        torch.cat(matched)[order] if matched else None,
        torch.cat(everything)[order] if everything else None,
    )


def _share(good: Bool[Tensor, " images"]) -> float | None:
    return good.float().mean().item() if len(good) else None


def _count_pairs(
    true: Int[Tensor, " images"], matched: Int[Tensor, " images"], tasks: int
) -> tuple[tuple[int, ...], ...]:
    pairs = torch.bincount(true * tasks + matched, minlength=tasks * tasks)
    return tuple(tuple(row) for row in pairs.reshape(tasks, tasks).tolist())


def to_json(
    settings: CompareSettings,
    vit: FrozenViT,
    methods: Sequence[MethodInfo],
    runs: Sequence[MethodRun],
    figures_of_pool: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """What `--json` writes: means over seeds, the whole history of every run, published figures with their source."""
    rows: dict[str, Any] = {}
    for info in methods:
        own = [run for run in runs if run.method == info.name]
        if not own:
            continue
        figures = [run.figures() for run in own]
        columns = {name: [each[name] for each in figures] for name in figures[0]}
        rows[info.name] = {
            **{name: _mean(values) for name, values in columns.items()},
            "spread": {name: _standard_deviation(values) for name, values in columns.items()},
            "family": info.family,
            "description": info.description,
            "deviations": info.deviations,
            "is_leaky": info.is_leaky,
            "rounds": info.rounds,
            "published": asdict(info.published) if info.published else None,
            "runs": [asdict(run) for run in own],
        }
    document = {
        "schema": SCHEMA,
        "settings": asdict(settings),
        "backbone": asdict(vit.info),
        "note": OTHER_SETTINGS,
        "methods": rows,
        "figures": figures_of_pool,
    }
    plain: dict[str, Any] = json.loads(json.dumps(document, default=str))
    return plain


def _mean(values: Sequence[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return fmean(found) if found else None


def _standard_deviation(values: Sequence[float | None]) -> float | None:
    """Of a sample of seeds; one seed has none."""
    found = [value for value in values if value is not None]
    return stdev(found) if len(found) > 1 else None
