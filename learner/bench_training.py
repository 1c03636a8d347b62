"""How fast a training step is, side by side with the two-pass step of the published codes, in one run.

The two-pass step asks a plain query first (to select a prompt, without gradient), then trains with every token of every
block. Ours needs one pass: the task is known in training, and the matching loss uses the same features.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from mqmk.learner.bench_speed import Bar, at_least, whole_pass
from mqmk.learner.settings import TrainSettings
from mqmk.learner.tasks import InMemory, Task
from mqmk.learner.train import Learning, empty_pool
from mqmk.matcher.backbone import RANDOM, load_backbone
from mqmk.matcher.pool import TaskPrompt
from mqmk.matcher.prompted_vit import FrozenViT, Prompt


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
    }
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(rounds + 1):
        for name, way in ways.items():
            begun = time.perf_counter()
            way()
            best[name] = min(best[name], time.perf_counter() - begun)
    rows = [
        TrainingRow(backbone, name, round(batch / seconds, 2), round(best["two passes"] / seconds, 3))
        for name, seconds in best.items()
    ]
    bars = [
        at_least(f"{backbone}: training step, times a two-pass step", 1.5, rows[1].ratio_to_two_pass),
        at_least(f"{backbone}: training step with frozen g-prompt, times", 1.7, rows[2].ratio_to_two_pass),
    ]
    return rows, bars


def _learning(vit: FrozenViT, batch: int, frozen_g: bool) -> tuple[Learning, Tensor, Tensor]:
    settings = TrainSettings(keys="learned", batch=batch)
    size = vit.info.image_size
    pictures = InMemory(torch.randint(0, 256, (batch, 3, size, size), dtype=torch.uint8), torch.arange(batch) % 10)
    task = Task("bench", tuple(str(i) for i in range(10)), pictures, pictures)
    pool = empty_pool(vit, settings)
    if frozen_g:
        rows = torch.randn(10, vit.dim)
        e_prompt = torch.randn(len(pool.e_layers), 2, settings.e_length, vit.dim)
        pool = pool.with_task(TaskPrompt("first", task.classes, e_prompt, rows, rows, rows)).to(vit.device)
    return Learning(task, vit, pool, settings), torch.randn(batch, 3, size, size, device=vit.device), pictures.labels


def _one_pass(vit: FrozenViT, batch: int, frozen_g: bool) -> Callable[[], None]:
    learning, images, labels = _learning(vit, batch, frozen_g)

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
