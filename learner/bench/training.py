"""How fast a training step is, side by side with the two-pass step of published code, in one run.

The two-pass step computes a plain query first (to select a prompt, without gradient), then trains with every token of
every block. Ours needs one pass: the task is known in training, and the matching loss uses the same features. Rounds
and ratios are those of `bench speed`: every step in turn, quick ones repeated, the median of the ratios within a round.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from mqmk.learner.bench.criteria import Criterion, at_least
from mqmk.learner.bench.random_pool import random_pool
from mqmk.learner.bench.speed import whole_pass
from mqmk.learner.bench.timing import time_in_turns
from mqmk.learner.data.tasks import InMemory, Task
from mqmk.learner.settings import TrainSettings
from mqmk.learner.training.patches import drop_patches
from mqmk.learner.training.train import compute_query, empty_pool, task_loss
from mqmk.learner.training.train_state import TrainState
from mqmk.matcher.backbone import RANDOM, load_backbone
from mqmk.matcher.prompted_vit import FrozenViT

TURN: Final = 0.6  # seconds for which a quick step is repeated in each round


@dataclass(frozen=True)
class TrainingRow:
    """One way to train."""

    backbone: str
    step: str
    images_per_second: float
    ratio_to_two_pass: float


def measure_training(backbone: str, batch: int, rounds: int) -> tuple[list[TrainingRow], list[Criterion]]:
    """Images a second of each step, and the two criteria."""
    vit = load_backbone(backbone, weights=RANDOM)
    steps = {
        "two passes": _two_passes(vit, batch),
        "one pass": _one_pass(vit, batch, frozen_g=False),
        "one pass, g-prompt frozen": _one_pass(vit, batch, frozen_g=True),
        "the same with half the patches": _one_pass(vit, batch, frozen_g=True, patches=0.5),
    }
    for step in steps.values():
        step()  # warm up
    timings = time_in_turns(steps, rounds, TURN)
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


@dataclass(frozen=True, eq=False)
class _Setup:
    """A task to take steps on."""

    state: TrainState
    optimiser: torch.optim.Optimizer
    logit_scale: float
    images: Tensor
    labels: Tensor


def _set_up(vit: FrozenViT, batch: int, frozen_g: bool) -> _Setup:
    settings = TrainSettings(keys="learned", batch=batch, anchor_steps=0)
    size = vit.info.image_size
    images = InMemory(torch.randint(0, 256, (batch, 3, size, size), dtype=torch.uint8), torch.arange(batch) % 10)
    task = Task("bench", tuple(str(i) for i in range(10)), images, images)
    pool = random_pool(vit, 1, settings.e_length) if frozen_g else empty_pool(vit, settings)
    state = TrainState(task, vit, pool, settings)
    pixels = torch.randn(batch, 3, size, size, device=vit.device)
    return _Setup(
        state, torch.optim.Adam(state.trained_tensors()), pool.logit_scale, pixels, images.labels.to(vit.device)
    )


def _one_pass(vit: FrozenViT, batch: int, frozen_g: bool, patches: float = 1.0) -> Callable[[], None]:
    setup = _set_up(vit, batch, frozen_g)
    state, labels = setup.state, setup.labels

    def step() -> None:
        setup.optimiser.zero_grad()
        query = compute_query(vit, state, drop_patches(vit, vit.embed(setup.images), patches, None))
        task_loss(query, labels, state.head_rows, setup.logit_scale, state.keys[state.key_of_class[labels]]).backward()
        setup.optimiser.step()

    return step


def _two_passes(vit: FrozenViT, batch: int) -> Callable[[], None]:
    setup = _set_up(vit, batch, frozen_g=False)
    state, labels = setup.state, setup.labels

    def step() -> None:
        setup.optimiser.zero_grad()
        with torch.no_grad():
            selecting = F.normalize(whole_pass(vit, setup.images), dim=1)
        query = whole_pass(vit, setup.images, *state.prompts)
        loss = task_loss(query, labels, state.head_rows, setup.logit_scale)
        loss = loss + (1 - F.cosine_similarity(selecting, state.keys[labels])).mean()
        loss.backward()
        setup.optimiser.step()

    return step
