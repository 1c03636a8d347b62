"""Does a new pool compute for its old tasks what the old pool did? Checked for every pool before it is served.

With the g-prompt frozen, a task that was not trained again must have the same bytes and give the same queries and
scores for a few fixed inputs. Tasks that were added or removed (forget, roll back) do not matter.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor

from mqmk.matcher.errors import PoolError
from mqmk.matcher.keys import trained_keys
from mqmk.matcher.pool import PromptPool, TaskPrompt
from mqmk.matcher.prompted_vit import FrozenViT, Stem

TOLERANCE: Final = 1e-5
INPUTS: Final = 2
MAX_TASKS: Final = 8  # tasks; the bytes of every task are compared, and a swap must stay cheap with a thousand of them


@dataclass(frozen=True, eq=False)
class Golden:
    """What a pool computed for the fixed inputs when it was loaded."""

    queries: Mapping[str, Float[Tensor, "inputs dim"]]
    scores: Mapping[str, Float[Tensor, " inputs"]]


def inputs(vit: FrozenViT) -> Float[Tensor, "inputs 3 height width"]:
    """Fixed images: waves of two frequencies, as bright as real images."""
    size = vit.info.image_size
    places = torch.linspace(0, 1, 3 * size * size).reshape(1, 3, size, size)
    images = torch.cat([(places * 40 * (number + 1)).sin() * 0.5 + 0.5 for number in range(INPUTS)])
    mean, std = (torch.tensor(values)[:, None, None] for values in (vit.info.mean, vit.info.std))
    return ((images - mean) / std).to(vit.device)


@torch.inference_mode()
def embed_inputs(vit: FrozenViT) -> Stem:
    """The part of the fixed inputs' forward passes that does not depend on the pool."""
    return vit.embed(inputs(vit))


@torch.inference_mode()
def record(
    vit: FrozenViT, pool: PromptPool, pause: Callable[[], None] = lambda: None, embedded: Stem | None = None
) -> Golden:
    """Compute the fixed inputs' queries and scores for some tasks of the pool, calling `pause` between passes.

    `embedded` is an earlier result of `embed_inputs`.
    """
    chosen = sorted(range(len(pool.tasks)), key=lambda task: sha256(pool.tasks[task].name.encode()).digest())
    if not chosen:
        return Golden({}, {})
    stem = vit.stem(embed_inputs(vit) if embedded is None else embedded, pool.g, pool.e_layers[0])
    bank = trained_keys(pool, None)
    queries, scores = {}, {}
    for task in chosen[:MAX_TASKS]:  # the same ones in every version, as far as both have them
        pause()
        name = pool.tasks[task].name
        queries[name] = vit.query(stem, pool.g, pool.e(task))
        scores[name] = bank.score(queries[name], task, 1)
        if not torch.isfinite(queries[name]).all():
            raise PoolError(f"task {name!r}: its queries are not finite")
    return Golden(queries, scores)


def compare(old: PromptPool, old_golden: Golden, new: PromptPool, new_golden: Golden) -> None:
    """Raise PoolError if a task that both pools have is not the same in both."""
    if not _is_comparable(old, new):
        return
    known = {task.name: task for task in new.tasks}
    for task in old.tasks:
        kept = known.get(task.name)
        if kept is None or (kept.manifest_sha256, kept.trained_at) != (task.manifest_sha256, task.trained_at):
            continue  # forgotten, or trained again
        if kept is not task:  # one that is shared by both pools cannot differ
            _check_same_bytes(task, kept)
        if task.name in old_golden.queries and task.name in new_golden.queries:
            _check_close(task.name, "queries", old_golden.queries[task.name], new_golden.queries[task.name])
            _check_close(task.name, "scores", old_golden.scores[task.name], new_golden.scores[task.name])


def _is_comparable(old: PromptPool, new: PromptPool) -> bool:
    """Whether old tasks may be expected to compute the same: they share the g-prompt and its layers."""
    same_layers = (old.g_layers, old.e_layers) == (new.g_layers, new.e_layers)
    return same_layers and torch.equal(old.g_prompt, new.g_prompt)


def _check_same_bytes(old: TaskPrompt, new: TaskPrompt) -> None:
    if old.classes != new.classes:
        raise PoolError(f"task {old.name!r}: its classes changed from {list(old.classes)} to {list(new.classes)}")
    before, after = old.tensors(), new.tensors()
    if changed := [name for name in before if name not in after or not torch.equal(before[name], after[name])]:
        raise PoolError(f"task {old.name!r}: {', '.join(changed)} changed, though the task was not trained again")


def _check_close(name: str, what: str, old: Tensor, new: Tensor) -> None:
    off = float((old - new).abs().max())
    if not off <= TOLERANCE * max(1.0, float(old.abs().max())):
        raise PoolError(f"task {name!r}: its {what} for the fixed inputs moved by {off:.1e}")
