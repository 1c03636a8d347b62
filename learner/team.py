"""Several processes that learn one task together: each takes its share of every batch, gradients are added up.

The gradient of a batch is the same sum whoever computed its parts, so a team learns what one worker would, up to the
random crops that each of its members draws.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, distributed

Part = TypeVar("Part")


@dataclass(frozen=True)
class Team:
    """This process's place among those that train; alone by default."""

    rank: int = 0
    size: int = 1

    def mine(self, parts: Sequence[Part]) -> Sequence[Part]:
        """The parts of a batch that this process computes."""
        return parts[self.rank :: self.size]

    def add_up(self, parameters: Iterable[Tensor]) -> None:
        """Make the gradients those of the whole batch, in every process."""
        if self.size == 1:
            return
        for parameter in parameters:
            if parameter.grad is None:  # this process had no part of a small batch
                parameter.grad = torch.zeros_like(parameter)
            distributed.all_reduce(parameter.grad)

    def total(self, value: float) -> float:
        """The sum of a number over the team."""
        if self.size == 1:
            return value
        whole = torch.tensor(value, dtype=torch.float64)
        distributed.all_reduce(whole)
        return float(whole)


ALONE = Team()
