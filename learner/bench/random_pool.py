"""A pool of random prompts for speed measurements: its values do not change the time a prediction takes."""

from typing import Final

import torch

from mqmk.learner.settings import default_e_layers
from mqmk.matcher.pool import PromptPool, TaskPrompt
from mqmk.matcher.prompted_vit import FrozenViT
from mqmk.matcher.ridge import WIDTH

CLASSES: Final = 10  # of a task
E_LENGTH: Final = 20  # rows of an e-prompt


def random_pool(vit: FrozenViT, tasks: int, e_length: int = E_LENGTH, *, regression: bool = False) -> PromptPool:
    """The same pool every time; with `regression`, for the matcher `ridge`, too."""
    generator, e_layers = torch.Generator().manual_seed(0), default_e_layers(vit.depth)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    pool = PromptPool(vit.info, (0, 1), e_layers, normal(2, 2, 5, vit.dim))
    for number in range(tasks):
        e_prompt, rows = normal(len(e_layers), 2, e_length, vit.dim), normal(CLASSES, vit.dim)
        classes = tuple(f"class {number}.{place}" for place in range(CLASSES))
        statistics = (torch.eye(WIDTH), normal(CLASSES, WIDTH)) if regression else ()
        pool = pool.with_task(TaskPrompt(f"task {number}", classes, e_prompt, rows, rows, rows, rows, *statistics))
    return pool.to(vit.device)
