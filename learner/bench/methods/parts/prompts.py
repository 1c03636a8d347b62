"""How rivals make prompts: random rows, blocks within the backbone, a prefix for each image, choice by cosine."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from mqmk.matcher.prompted_vit import FrozenViT, Prompt


def uniform(
    vit: FrozenViT, generator: torch.Generator, *shape: int, low: float = -1.0, high: float = 1.0
) -> Float[Tensor, "..."]:
    """Random numbers, the same on every device."""
    return torch.empty(*shape).uniform_(low, high, generator=generator).to(vit.device)


def limit_layers(vit: FrozenViT, first: int, last: int) -> tuple[int, ...]:
    """The published blocks, as far as the backbone has them."""
    return tuple(range(first, min(last + 1, vit.depth))) or (vit.depth - 1,)


def prefix_per_image(layers: tuple[int, ...], rows: Float[Tensor, "batch layers 2 length dim"]) -> Prompt:
    """A prefix of its own for each image."""
    return Prompt(layers, rows.unbind(0))


def split_rows(rows: Float[Tensor, "*batch rows dim"]) -> Float[Tensor, "*batch 2 half dim"]:
    """The first half of a prompt's rows go to the keys, the other half to the values."""
    return torch.stack(rows.chunk(2, dim=-2), dim=-3)


@dataclass(frozen=True, eq=False)
class Choice:
    """The keys with the largest cosines, for each image its own."""

    cosines: Float[Tensor, "batch chosen"]
    index: Int[Tensor, "batch chosen"]


def choose(query: Float[Tensor, "batch dim"], keys: Float[Tensor, "keys dim"], number: int) -> Choice:
    """The best keys of each query; the gradient goes to the keys."""
    cosines = F.normalize(query.detach(), dim=1) @ F.normalize(keys, dim=1).T
    index = cosines.topk(min(number, len(keys)), dim=1).indices
    return Choice(cosines.gather(1, index), index)


def owner_of(usage: Float[Tensor, "tasks prompts"]) -> Int[Tensor, " prompts"]:
    """The task whose own choices fell on a prompt with the largest share."""
    return (usage / usage.sum(dim=1, keepdim=True).clamp(min=1)).argmax(dim=0)


def match_by_owner(
    choice: Choice, usage: Float[Tensor, "tasks prompts"], scores: Float[Tensor, "batch tasks"]
) -> Float[Tensor, "batch tasks"]:
    """Add the cosines of the chosen prompts to their owners' scores."""
    return scores.scatter_add(1, owner_of(usage)[choice.index], choice.cosines.detach())


def orthogonal_rows(
    known: Float[Tensor, "known dim"], number: int, generator: torch.Generator
) -> Float[Tensor, "number dim"]:
    """New unit rows, orthogonal to all known ones and to each other as long as there is room; then random ones."""
    random = torch.randn(number, known.shape[1], generator=generator, dtype=torch.float64)
    basis = torch.zeros(known.shape[1], 0, dtype=torch.float64)
    if len(known):
        left, sizes, _ = torch.linalg.svd(known.cpu().double().T, full_matrices=False)
        basis = left[:, sizes > 1e-6 * sizes.max()]
    rows = []
    for row in random:
        rest = row - basis @ (basis.T @ row)
        rest = rest - basis @ (basis.T @ rest)  # once more: rounding of the first projection
        free = basis.shape[1] < len(row)
        rows.append(F.normalize(rest if free else row, dim=0))
        basis = torch.cat([basis, rows[-1][:, None]], dim=1) if free else basis
    return torch.stack(rows).float().to(known.device)
