"""How one task is learned: the whole training loop in `train_task`.

Loss = cross-entropy over this task's classes only + mean(1 - cos(stop_grad(Q_t), k_ty)), one forward and one backward
a step. With keys in closed form the second term needs no training: for fixed queries its minimiser is the mean of the
normalised queries of a class (or of the classes that share a key), so one pass after the last epoch gives exact keys.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import islice
from typing import Final

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from mqmk.learner.data.tasks import Batch, ImageSet, Task
from mqmk.learner.settings import TrainSettings, check_settings, check_training, default_e_layers
from mqmk.learner.training.augment import augment
from mqmk.learner.training.class_statistics import AnchorStatisticsAccumulator, ClassMeans
from mqmk.learner.training.patches import drop_patches
from mqmk.learner.training.process_group import SINGLE_PROCESS, ProcessGroup
from mqmk.learner.training.stopping_slice import split_off
from mqmk.learner.training.train_state import GOALS, Goal, TrainState
from mqmk.matcher.images import normalise
from mqmk.matcher.keys import merge_keys
from mqmk.matcher.pool import PromptPool, TaskPrompt
from mqmk.matcher.prompted_vit import FrozenViT, Prompt, Stem

TOKENS_IN_MEMORY: Final = {"cpu": 4096, "cuda": 65536}
MOST_REPORTS: Final = 20
"""Of a goal: a small task has hundreds of epochs, and each report is an event in a ledger."""


@dataclass(frozen=True)
class Progress:
    """A running training after an epoch."""

    task: str
    epoch: int
    """Of all goals: those of the anchor prompt come first."""
    epochs: int
    loss: float
    images_per_second: float
    seconds_left: float
    held_out_accuracy: float | None
    """After the last epoch."""


@dataclass(frozen=True, eq=False)
class Trained:
    """What learning a task produced."""

    prompt: TaskPrompt
    g_prompt: Float[Tensor, "layers 2 length dim"]
    anchor: Float[Tensor, "e_layers 2 rows dim"] | None

    def added_to(self, pool: PromptPool) -> PromptPool:
        """The pool with this task."""
        return replace(pool, g_prompt=self.g_prompt, anchor=self.anchor).with_task(self.prompt)


def train_task(
    task: Task,
    vit: FrozenViT,
    pool: PromptPool,
    settings: TrainSettings,
    *,
    resume: bytes | None = None,
    on_checkpoint: Callable[[bytes], None] | None = None,
    on_epoch: Callable[[Progress], None] = lambda _: None,
    group: ProcessGroup = SINGLE_PROCESS,
) -> Trained:
    """Learn one task. Reads no data of any other task and changes nothing that other tasks compute.

    Every few epochs `on_checkpoint` gets the whole state, then `on_epoch` the progress. A killed run continues from
    its last checkpoint, given as `resume`, and ends with the same tensors; a checkpoint of another run is ignored.
    """
    check_training(settings, vit.depth, len(task.classes), len(task.training))
    pool = pool.to(vit.device)
    state = TrainState(task, vit, pool, settings)
    if resume:
        state.load_checkpoint(resume)
    training, stopping = (task.training, None) if settings.patience is None else split_off(task.training)
    steps = math.ceil(len(task.training) / settings.batch)
    goals: tuple[Goal, ...] = ("task",) if state.anchor_head is None else GOALS
    plan = {goal: count_epochs(settings, goal, steps) for goal in goals}
    parts = max(settings.accumulate, math.ceil(settings.batch * vit.tokens / tokens_in_memory(vit.device)))

    for goal in state.goals:
        state.begin(goal)
        optimiser = torch.optim.Adam(state.trained_tensors(), lr=settings.learning_rate)
        state.restore_optimiser(optimiser)
        start, images_seen, total_loss = time.monotonic(), 0, torch.zeros((), dtype=torch.float64, device=vit.device)

        while not _is_done(state, settings, plan[goal]):
            seed = settings.seed * 100_003 + state.epoch  # of the epoch alone: a resumed run draws the same numbers
            generator = torch.Generator().manual_seed(seed + 7_919 * group.rank)  # torch reads 32 bits of a seed
            for step, batch in enumerate(training.batches(settings.batch, seed, settings.balanced)):
                for param_group in optimiser.param_groups:
                    param_group["lr"] = scheduled_lr(settings, (state.epoch + step / steps) / plan[goal])
                optimiser.zero_grad()
                for part in group.my_parts(batch.split(parts * group.size)):  # gradient accumulation
                    images = augment(_prepare(part, vit), settings.augmentation, generator)
                    labels = part.labels.to(vit.device)
                    query = compute_query(vit, state, drop_patches(vit, vit.embed(images), settings.patches, generator))
                    learns_keys = settings.keys == "learned" and goal == "task"
                    keys = state.keys[state.key_of_class[labels]] if learns_keys else None
                    loss = task_loss(query, labels, state.head_rows, pool.logit_scale, keys)
                    (loss * len(part) / len(batch)).backward()
                    total_loss += loss.detach() * len(part)
                group.all_reduce_grads(state.trained_tensors())
                torch.nn.utils.clip_grad_norm_(state.trained_tensors(), settings.clip)
                optimiser.step()
            state.epoch += 1
            images_seen += len(training)

            # early stopping, by images that are neither trained on nor held out
            stops = stopping is not None and goal == "task"
            accuracy = measure_accuracy(vit, state, stopping, settings.batch, group) if stops and stopping else None
            is_best = accuracy is None or accuracy > state.best_accuracy
            state.epochs_without_gain = 0 if is_best else state.epochs_without_gain + 1
            if is_best:
                state.best, state.best_accuracy = state.copy_tensors(), -1.0 if accuracy is None else accuracy
            done, held_out_accuracy = _is_done(state, settings, plan[goal]), None
            if done:
                state.load_tensors(state.best)
            if not done and state.epoch % math.ceil(plan[goal] / MOST_REPORTS):
                continue
            if done and goal == "task" and len(task.held_out):
                held_out_accuracy = measure_accuracy(vit, state, task.held_out, settings.batch, group)

            if on_checkpoint:
                on_checkpoint(state.to_checkpoint(optimiser))
            before = sum(plan[each] for each in goals[: goals.index(goal)])
            rate = images_seen / (time.monotonic() - start)
            left = sum(plan.values()) - before - (plan[goal] if done else state.epoch)
            on_epoch(
                Progress(
                    task=task.name,
                    epoch=before + state.epoch,
                    epochs=sum(plan.values()),
                    loss=float(group.all_reduce_sum(total_loss)) / images_seen,
                    images_per_second=rate,
                    seconds_left=left * len(training) / rate,
                    held_out_accuracy=held_out_accuracy,
                )
            )
            start, images_seen, total_loss = time.monotonic(), 0, torch.zeros_like(total_loss)
    return _finish(task, vit, state, settings)


def count_epochs(settings: TrainSettings, goal: Goal, steps_per_epoch: int) -> int:
    """How many passes over the images give the least number of steps, unless their number is set."""
    steps = settings.steps if goal == "task" else settings.anchor_steps
    return settings.epochs or max(1, math.ceil(steps / steps_per_epoch))


def tokens_in_memory(device: torch.device) -> int:
    """How many tokens a step may hold activations of, so that memory does not depend on batch and image size."""
    return TOKENS_IN_MEMORY.get(device.type, TOKENS_IN_MEMORY["cpu"])


def cosine_lr(lr: float, progress: float) -> float:
    """The learning rate after a share of the training: from `lr` down to 0 along half a cosine."""
    return lr * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))


def scheduled_lr(settings: TrainSettings, progress: float) -> float:
    """The learning rate after a share of the training."""
    constant = settings.schedule == "constant"
    return settings.learning_rate if constant else cosine_lr(settings.learning_rate, progress)


def task_loss(
    query: Float[Tensor, "batch dim"],
    labels: Int[Tensor, " batch"],
    head_rows: Float[Tensor, "classes dim"],
    logit_scale: float,
    keys: Float[Tensor, "batch dim"] | None = None,
) -> Float[Tensor, ""]:
    """Classification over this task's classes and, where each image's key is given, matching on the same query."""
    query = F.normalize(query, dim=1)
    loss = F.cross_entropy(logit_scale * query @ head_rows.T, labels)
    return loss if keys is None else loss + (1 - F.cosine_similarity(query.detach(), keys)).mean()


def compute_query(vit: FrozenViT, state: TrainState, embedded: Stem) -> Float[Tensor, "batch dim"]:
    """Q_t with the prompts in training; no gradient below the first trained layer."""
    g_prompt, e_prompt = state.prompts
    with torch.set_grad_enabled(state.trains_g and torch.is_grad_enabled()):
        stem = vit.stem(embedded, g_prompt, state.e_layers[0])
    return vit.query(stem, g_prompt, e_prompt)


@torch.no_grad()
def measure_accuracy(vit: FrozenViT, state: TrainState, images: ImageSet, batch: int, group: ProcessGroup) -> float:
    """Each process measures its share, and all get the same sum: they stop at the same epoch."""
    correct = torch.zeros((), dtype=torch.float64, device=vit.device)
    for part in islice(images.batches(batch, seed=None), group.rank, None, group.size):
        query = compute_query(vit, state, vit.embed(_prepare(part, vit)))
        predicted = (query @ state.head_rows.T).argmax(dim=1)
        correct += (predicted == part.labels.to(predicted.device)).sum()
    return float(group.all_reduce_sum(correct)) / len(images)


def _is_done(state: TrainState, settings: TrainSettings, epochs: int) -> bool:
    stalled = settings.patience is not None and state.epochs_without_gain >= settings.patience
    return stalled or state.epoch >= epochs


def _prepare(batch: Batch, vit: FrozenViT) -> Float[Tensor, "batch 3 height width"]:
    return normalise(batch.training_pixels.to(vit.device), vit.info)


@torch.no_grad()
def _finish(task: Task, vit: FrozenViT, state: TrainState, settings: TrainSettings) -> Trained:
    """Keys, means and statistics in closed form, from one pass over the training images without augmentation."""
    shape = len(task.classes), vit.dim, vit.device
    prompted, plain = ClassMeans(*shape), ClassMeans(*shape) if settings.plain_means else None
    counts = (*task.training.class_counts, *[0] * len(task.classes))[: len(task.classes)]
    statistics = None if state.anchor is None else AnchorStatisticsAccumulator(counts, vit.device)
    g_prompt, e_prompt = state.prompts
    for batch in task.training.batches(settings.batch, seed=None):
        embedded, labels = vit.embed(_prepare(batch, vit)), batch.labels.to(vit.device)
        stem = vit.stem(embedded, g_prompt, state.e_layers[0])
        prompted.add(vit.query(stem, g_prompt, e_prompt), labels)
        if statistics and state.anchor is not None:
            statistics.add(vit.query(stem, g_prompt, Prompt(state.e_layers, (state.anchor,))), labels)
        if plain:
            plain.add(vit.query(embedded), labels)
    means, tensors = prompted.value(), state.copy_tensors()
    prompt = TaskPrompt(
        name=task.name,
        classes=task.classes,
        e_prompt=tensors["e_prompt"],
        keys=tensors["keys"] if settings.keys == "learned" else merge_keys(means, prompted.counts(), len(state.keys)),
        head=tensors["head"],
        means=means,
        plain_means=plain.value() if plain else None,
        **(vars(statistics.value()) if statistics else {}),
        manifest_sha256=task.manifest_sha256,
        samples=len(task.training),
        class_samples=prompted.counts(),
        trained_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    return Trained(prompt, tensors["g_prompt"], tensors.get("anchor"))


def empty_pool(vit: FrozenViT, settings: TrainSettings) -> PromptPool:
    """The pool before any task: a random g-prompt in the first two blocks, room for e-prompts in the later ones."""
    check_settings(settings, vit.depth)
    e_layers = settings.e_layers or default_e_layers(vit.depth)
    generator = torch.Generator().manual_seed(settings.seed)
    g_prompt = torch.empty(2, 2, settings.g_length, vit.dim)
    g_prompt.uniform_(-settings.spread, settings.spread, generator=generator)
    scale = 1.0 if settings.head == "free" else settings.head_scale
    return PromptPool(vit.info, (0, 1), e_layers, g_prompt.to(vit.device), logit_scale=scale, head_kind=settings.head)
