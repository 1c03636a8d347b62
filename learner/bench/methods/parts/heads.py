"""Heads over the classes of the tasks learned so far; cross-entropy is always over the current task's rows only."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from mqmk.matcher.pool import task_of_rows
from mqmk.matcher.prompted_vit import FrozenViT


@dataclass(frozen=True, eq=False)
class LinearHead:
    """The rows of one task, with bias. Rows of other tasks are other heads, so training one leaves them alone."""

    weight: Float[Tensor, "classes dim"]
    bias: Float[Tensor, " classes"]

    @classmethod
    def new(cls, vit: FrozenViT, classes: int, generator: torch.Generator) -> "LinearHead":
        """Small random rows."""
        weight = torch.empty(classes, vit.dim).normal_(0, 0.02, generator=generator)
        return cls(weight.to(vit.device), torch.zeros(classes, device=vit.device))

    @property
    def tensors(self) -> list[Tensor]:
        """What is trained."""
        return [self.weight, self.bias]

    def __call__(self, features: Float[Tensor, "batch dim"]) -> Float[Tensor, "batch classes"]:
        return features @ self.weight.T + self.bias


def score_all(heads: Sequence[LinearHead], features: Float[Tensor, "batch dim"]) -> Float[Tensor, "batch classes"]:
    """Over all classes seen so far."""
    return torch.cat([head(features) for head in heads], dim=1)


def kept_heads(heads: Sequence[LinearHead]) -> dict[str, Tensor]:
    """As `Method.kept` names them."""
    return {
        f"task{number}/{name}": tensor
        for number, head in enumerate(heads)
        for name, tensor in (("head", head.weight), ("bias", head.bias))
    }


def cosines(features: Float[Tensor, "batch dim"], rows: Float[Tensor, "rows dim"]) -> Float[Tensor, "batch rows"]:
    """Between every feature and every row."""
    return F.normalize(features, dim=1) @ F.normalize(rows, dim=1).T


def row_tasks(sizes: Sequence[int], device: torch.device) -> Int[Tensor, " rows"]:
    """The task of every class, however unequal the tasks are."""
    return task_of_rows(sizes).to(device)


def keep_task(
    scores: Float[Tensor, "batch rows"], row_task: Int[Tensor, " rows"], task: Int[Tensor, " batch"]
) -> Float[Tensor, "batch rows"]:
    """The scores of one task's classes for each image; the others cannot win."""
    return scores.masked_fill(row_task != task[:, None], -torch.inf)
