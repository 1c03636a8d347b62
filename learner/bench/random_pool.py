"""A pool of random prompts for speed measurements: its values do not change the time a prediction takes."""

from typing import Final

import torch

from mqmk.learner.settings import default_e_layers
from mqmk.matcher.pool import PromptPool, TaskPrompt
from mqmk.matcher.prompted_vit import FrozenViT
from mqmk.matcher.regression import RANK, WIDTH

CLASSES: Final = 10  # of a task
E_LENGTH: Final = 20  # rows of an e-prompt
ANCHOR_LENGTH: Final = 60


def random_pool(vit: FrozenViT, tasks: int, e_length: int = E_LENGTH) -> PromptPool:
    """The same pool every time."""
    generator, e_layers = torch.Generator().manual_seed(0), default_e_layers(vit.depth)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    pool = PromptPool(
        vit.info, (0, 1), e_layers, normal(2, 2, 5, vit.dim), anchor=normal(len(e_layers), 2, ANCHOR_LENGTH, vit.dim)
    )
    for number in range(tasks):
        e_prompt, rows = normal(len(e_layers), 2, e_length, vit.dim), normal(CLASSES, vit.dim)
        classes = tuple(f"class {number}.{place}" for place in range(CLASSES))
        statistics = normal(RANK, WIDTH).half().float(), torch.ones(1, WIDTH), normal(CLASSES, WIDTH).half().float()
        pool = pool.with_task(TaskPrompt(f"task {number}", classes, e_prompt, rows, rows, rows, rows, *statistics))
    return pool.to(vit.device)
