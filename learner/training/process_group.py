"""Several processes that train one task together: each computes its parts of every batch, gradients are summed.

The gradient of a batch is the same sum whoever computed its parts, so a group learns what one process would, up to the
random crops that each of its members draws.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, distributed

Part = TypeVar("Part")


@dataclass(frozen=True)
class ProcessGroup:
    """This process's rank in torch's default process group; by default, no group is needed."""

    rank: int = 0
    size: int = 1

    def my_parts(self, parts: Sequence[Part]) -> Sequence[Part]:
        """The parts of a batch that this process computes."""
        return parts[self.rank :: self.size]

    def all_reduce_grads(self, parameters: Iterable[Tensor]) -> None:
        """Make the gradients those of the whole batch, in every process."""
        if self.size == 1:
            return
        for parameter in parameters:
            if parameter.grad is None:  # this process had no part of a small batch
                parameter.grad = torch.zeros_like(parameter)
            distributed.all_reduce(parameter.grad)

    def all_reduce_sum(self, value: Tensor) -> Tensor:
        """The sum of a tensor over all processes. It must be on the device of the backend, as gradients are: NCCL
        knows no CPU."""
        if self.size > 1:
            distributed.all_reduce(value)
        return value


SINGLE_PROCESS = ProcessGroup()
