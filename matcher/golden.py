"""Golden replay: are the tasks that two pools share the same in both, by their tensors and by what they compute?"""

from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor

from mqmk.matcher.keys import trained_keys
from mqmk.matcher.pool import PromptPool, TaskPrompt
from mqmk.matcher.prompted_vit import FrozenViT

TOLERANCE: Final = 1e-5
TASKS_REPLAYED: Final = 16  # the tensors of all tasks are compared; queries cost a forward pass each


@torch.inference_mode()
def changed(
    vit: FrozenViT, old: PromptPool, new: PromptPool, images: Float[Tensor, "batch 3 height width"]
) -> str | None:
    """What is different about a task that both pools have; None if nothing is. A task of one pool only is no matter."""
    if not torch.equal(old.g_prompt, new.g_prompt) and old.tasks and new.tasks:
        return "the g-prompt changed, and with it every query"
    places = {task.name: number for number, task in enumerate(new.tasks)}
    shared = [(number, places[task.name]) for number, task in enumerate(old.tasks) if task.name in places]
    for before, after in shared:
        if difference := _tensors_differ(old.tasks[before], new.tasks[after]):
            return difference
    for before, after in shared[-TASKS_REPLAYED:]:
        if difference := _answers_differ(vit, old, before, new, after, images):
            return difference
    return None


def _tensors_differ(old: TaskPrompt, new: TaskPrompt) -> str | None:
    if old.classes != new.classes:
        return f"task {old.name} has other classes"
    ours, theirs = old.tensors(), new.tensors()
    if ours.keys() != theirs.keys():
        return f"task {old.name} has other tensors: {', '.join(sorted(ours.keys() ^ theirs.keys()))}"
    for name, tensor in ours.items():
        if not torch.equal(tensor, theirs[name]):
            return f"task {old.name}: {name} is not byte for byte what it was"
    return None


def _answers_differ(
    vit: FrozenViT, old: PromptPool, before: int, new: PromptPool, after: int, images: Tensor
) -> str | None:
    queries, scores = [], []
    for pool, place in ((old, before), (new, after)):
        stem = vit.stem(vit.embed(images), pool.g, pool.e_layers[0])
        queries.append(vit.query(stem, pool.g, pool.e(place)))
        scores.append(trained_keys(pool, None).score(queries[-1], place, 1))
    worst = max((a - b).abs().max().item() for a, b in (queries, scores))
    if worst > TOLERANCE:
        return f"task {old.tasks[before].name} computes something else: queries or scores differ by {worst:.2g}"
    return None
