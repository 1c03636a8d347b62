"""The keys of every task in one matrix, and the match score of a query against them (equation 4 of the paper)."""

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from mqmk.matcher.errors import MatchError
from mqmk.matcher.pool import PromptPool, key_groups


@dataclass(frozen=True, eq=False)
class KeyBank:
    """Normalised keys of all tasks, those of one task side by side."""

    keys: Float[Tensor, "rows dim"]
    sizes: tuple[int, ...]

    @cached_property
    def by_task(self) -> tuple[Float[Tensor, "_ dim"], ...]:
        """The keys of each task, as views."""
        return self.keys.split(self.sizes)

    @cached_property
    def task_of_row(self) -> Int[Tensor, " rows"]:
        """The task of every key."""
        tasks = torch.arange(len(self.sizes)).repeat_interleave(torch.tensor(self.sizes))
        return tasks.to(self.keys.device)

    def score(self, query: Float[Tensor, "batch dim"], task: int, top_keys: int) -> Float[Tensor, " batch"]:
        """S_t of one task."""
        return _sum_of_largest(F.normalize(query, dim=1) @ self.by_task[task].T, top_keys)

    def scores(self, query: Float[Tensor, "batch dim"], top_keys: int) -> Float[Tensor, "batch tasks"]:
        """S_t of every task for one and the same query."""
        cosines = F.normalize(query, dim=1) @ self.keys.T
        if top_keys == 1:  # one kernel, whatever the number of tasks
            best = torch.full((len(query), len(self.sizes)), -torch.inf, device=query.device)
            return best.scatter_reduce(1, self.task_of_row.expand(len(query), -1), cosines, "amax")
        return torch.stack([_sum_of_largest(own, top_keys) for own in cosines.split(self.sizes, dim=1)], dim=1)


def _sum_of_largest(cosines: Float[Tensor, "batch keys"], top_keys: int) -> Float[Tensor, " batch"]:
    """A task with fewer than K keys counts its mean cosine K times, or small tasks could never win."""
    if top_keys == 1:
        return cosines.amax(dim=1)
    return top_keys * cosines.topk(min(top_keys, cosines.shape[1]), dim=1).values.mean(dim=1)


def trained_keys(pool: PromptPool, keys_per_task: int | None) -> KeyBank:
    """The keys of the prompted queries."""
    return _bank([task.keys for task in pool.tasks], keys_per_task)


def plain_keys(pool: PromptPool, keys_per_task: int | None) -> KeyBank:
    """Keys for queries without prompts, which only the single-query baselines use."""
    for task in pool.tasks:
        if task.plain_means is None:
            raise MatchError(f"task {task.name!r} has no means of plain queries, which sqsk and sqmk need; use mqmk")
    return _bank([task.plain_means for task in pool.tasks if task.plain_means is not None], keys_per_task)


def _bank(by_task: list[Float[Tensor, "_ dim"]], keys_per_task: int | None) -> KeyBank:
    if keys_per_task is not None:
        by_task = [grouped(keys, min(keys_per_task, len(keys))) for keys in by_task]
    return KeyBank(F.normalize(torch.cat(by_task), dim=1), tuple(len(keys) for keys in by_task))


def grouped(keys: Float[Tensor, "keys dim"], number: int) -> Float[Tensor, "number dim"]:
    """Fewer keys: those of neighbouring classes added up."""
    groups = key_groups(len(keys), number).to(keys.device)
    return torch.zeros(number, keys.shape[1], device=keys.device).index_add(0, groups, keys)
