"""The keys of every task in one matrix, and the match score of a query against them (equation 4 of the paper)."""

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from mqmk.matcher.errors import MatchError
from mqmk.matcher.pool import PromptPool, cache_on_pool, group_classes, task_of_rows


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
    def row_task(self) -> Int[Tensor, " rows"]:
        """The task of every key."""
        return task_of_rows(self.sizes).to(self.keys.device)

    def score(self, query: Float[Tensor, "batch dim"], task: int, top_keys: int) -> Float[Tensor, " batch"]:
        """S_t of one task."""
        return _sum_of_largest(F.normalize(query, dim=1) @ self.by_task[task].T, top_keys)

    def scores(self, query: Float[Tensor, "batch dim"], top_keys: int) -> Float[Tensor, "batch tasks"]:
        """S_t of every task for the same query."""
        cosines = F.normalize(query, dim=1) @ self.keys.T
        if top_keys == 1:  # one kernel, whatever the number of tasks
            return max_by_task(cosines, self.row_task, len(self.sizes))
        return torch.stack([_sum_of_largest(part, top_keys) for part in cosines.split(self.sizes, dim=1)], dim=1)


def max_by_task(
    values: Float[Tensor, "batch rows"], row_task: Int[Tensor, " rows"], tasks: int
) -> Float[Tensor, "batch tasks"]:
    """The largest value among the rows of each task."""
    lowest = torch.full((len(values), tasks), -torch.inf, device=values.device)
    return lowest.scatter_reduce(1, row_task.expand(len(values), -1), values, "amax")


def _sum_of_largest(cosines: Float[Tensor, "batch keys"], top_keys: int) -> Float[Tensor, " batch"]:
    """A task with fewer than K keys counts its mean cosine K times, or small tasks could never win."""
    if top_keys == 1:
        return cosines.amax(dim=1)
    return top_keys * cosines.topk(min(top_keys, cosines.shape[1]), dim=1).values.mean(dim=1)


@cache_on_pool
def trained_keys(pool: PromptPool, keys_per_task: int | None) -> KeyBank:
    """The keys of the prompted queries."""
    return _build_bank([_limit_keys(keys_per_task, task.keys, task.means, task.class_samples) for task in pool.tasks])


@cache_on_pool
def key_of_class(pool: PromptPool) -> tuple[Int[Tensor, " _"], ...]:
    """Which of a task's keys belongs to each of its classes: classes of a group share one, and so its exact cosine."""
    return tuple(group_classes(len(task.classes), len(task.keys)).to(task.keys.device) for task in pool.tasks)


@cache_on_pool
def plain_keys(pool: PromptPool, keys_per_task: int | None) -> KeyBank:
    """Keys for queries without prompts, which only the single-query baselines use; always in closed form."""
    by_task = []
    for task in pool.tasks:
        if task.plain_means is None:
            raise MatchError(f"task {task.name!r} has no means of plain queries, which sqsk and sqmk need; use mqmk")
        by_task.append(_limit_keys(keys_per_task, task.plain_means, task.plain_means, task.class_samples))
    return _build_bank(by_task)


def _build_bank(by_task: list[Float[Tensor, "_ dim"]]) -> KeyBank:
    return KeyBank(F.normalize(torch.cat(by_task), dim=1), tuple(len(keys) for keys in by_task))


def _limit_keys(
    number: int | None, keys: Float[Tensor, "keys dim"], means: Float[Tensor, "classes dim"], samples: tuple[int, ...]
) -> Float[Tensor, "_ dim"]:
    """A task's keys as they were trained or, where fewer are wanted, those of larger groups."""
    return keys if number is None or number >= len(keys) else merge_keys(means, samples, number)


def merge_keys(
    means: Float[Tensor, "classes dim"], class_samples: tuple[int, ...], number: int
) -> Float[Tensor, "number dim"]:
    """One key for each group of neighbouring classes: the mean of the normalised queries of all its images.

    That is the minimiser of the matching loss over the group, so larger classes weigh more. Classes whose sizes are
    not known (an empty tuple) weigh the same.
    """
    groups = group_classes(len(means), number).to(means.device)
    counts = torch.tensor(class_samples or (1,) * len(means), dtype=means.dtype, device=means.device)
    totals = torch.zeros(number, device=means.device).index_add(0, groups, counts)
    weights = counts / totals.clamp(min=1)[groups]
    return torch.zeros(number, means.shape[1], device=means.device).index_add(0, groups, means * weights[:, None])
