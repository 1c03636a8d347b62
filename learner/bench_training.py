"""How fast a training step is, side by side with the two-pass step of the published codes, in one run.

The two-pass step asks a plain query first (to select a prompt, without gradient), then trains with every token of every
block. Ours needs one pass: the task is known in training, and the matching loss uses the same features. Rounds and
ratios are those of `bench_speed`: every way in turn, quick ones repeated, and the median of the ratios within a round.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from mqmk.learner.bench_speed import Timing, whole_pass
from mqmk.learner.settings import TrainSettings
from mqmk.learner.tasks import InMemory, Task
from mqmk.learner.train import Learning, empty_pool
from mqmk.matcher.backbone import RANDOM, load_backbone
from mqmk.matcher.pool import TaskPrompt
from mqmk.matcher.promises import Bar, at_least
from mqmk.matcher.prompted_vit import FrozenViT, Prompt

TURN: Final = 0.6  # seconds for which a quick step is repeated in each round


@dataclass(frozen=True)
class TrainingRow:
    """One way to train."""

    backbone: str
    step: str
    images_per_second: float
    ratio_to_two_pass: float


def measure_training(backbone: str, batch: int, rounds: int) -> tuple[list[TrainingRow], list[Bar]]:
    """Images a second of each step, and the two promises."""
    vit = load_backbone(backbone, weights=RANDOM)
    ways = {
        "two passes": _two_passes(vit, batch),
        "one pass": _one_pass(vit, batch, frozen_g=False),
        "one pass, g-prompt frozen": _one_pass(vit, batch, frozen_g=True),
        "the same with half the patches": _one_pass(vit, batch, frozen_g=True, patches=0.5),
    }
    timings = _time_in_turn(ways, rounds)
    rows = [
        TrainingRow(
            backbone,
            name,
            round(batch / min(timing.seconds), 2),
            round(1 / timing.over(timings["two passes"]), 3),
        )
        for name, timing in timings.items()
    ]
    bars = [
        at_least(f"{backbone}: training step, times a two-pass step", 1.5, rows[1].ratio_to_two_pass),
        at_least(f"{backbone}: training step with frozen g-prompt, times", 1.7, rows[2].ratio_to_two_pass),
    ]
    return rows, bars


def _time_in_turn(ways: Mapping[str, Callable[[], None]], rounds: int) -> dict[str, Timing]:
    """Every way in turn, round after round; the first round only warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            least, begun = float("inf"), time.perf_counter()
            while least == float("inf") or (number and time.perf_counter() - begun < TURN):
                started = time.perf_counter()
                way()
                least = min(least, time.perf_counter() - started)
            if number:
                seconds[name].append(least)
    return {name: Timing(tuple(found), 0.0) for name, found in seconds.items()}


def _learning(vit: FrozenViT, batch: int, frozen_g: bool, patches: float = 1.0) -> tuple[Learning, Tensor, Tensor]:
    settings = TrainSettings(keys="learned", batch=batch, patches=patches)
    size = vit.info.image_size
    pictures = InMemory(torch.randint(0, 256, (batch, 3, size, size), dtype=torch.uint8), torch.arange(batch) % 10)
    task = Task("bench", tuple(str(i) for i in range(10)), pictures, pictures)
    pool = empty_pool(vit, settings)
    if frozen_g:
        rows = torch.randn(10, vit.dim)
        e_prompt = torch.randn(len(pool.e_layers), 2, settings.e_length, vit.dim)
        pool = pool.with_task(TaskPrompt("first", task.classes, e_prompt, rows, rows, rows)).to(vit.device)
    return Learning(task, vit, pool, settings), torch.randn(batch, 3, size, size, device=vit.device), pictures.labels


def _one_pass(vit: FrozenViT, batch: int, frozen_g: bool, patches: float = 1.0) -> Callable[[], None]:
    learning, images, labels = _learning(vit, batch, frozen_g, patches)

    def step() -> None:
        learning.optimiser.zero_grad()
        learning.loss(images, labels.to(vit.device)).backward()
        learning.optimiser.step()

    return step


def _two_passes(vit: FrozenViT, batch: int) -> Callable[[], None]:
    learning, images, labels = _learning(vit, batch, frozen_g=False)
    g, e = Prompt(learning.pool.g_layers, (learning.g_prompt,)), Prompt(learning.pool.e_layers, (learning.e_prompt,))
    head_scale = learning.pool.head_scale

    def step() -> None:
        learning.optimiser.zero_grad()
        with torch.no_grad():
            selecting = F.normalize(whole_pass(vit, images), dim=1)
        query = F.normalize(whole_pass(vit, images, g, e), dim=1)
        loss = F.cross_entropy(head_scale * query @ F.normalize(learning.head, dim=1).T, labels.to(vit.device))
        loss = loss + (1 - F.cosine_similarity(selecting, learning.keys[labels])).mean()
        loss.backward()
        learning.optimiser.step()

    return step
