"""Which class an image belongs to, by one ridge regression over all classes on a query that never changes.

The anchor query is that of the anchor prompt, which is trained with the pool's first task and then frozen, so what a
task keeps of it stays valid: of its features h the mean M_c of each class c, and their mean outer product G_t, as a
factor of low rank and what the diagonal lacks. The regression over all tasks,

    W = (G_1 + ... + G_M + r I)^-1 (M_1, ..., M_C),

is solved once for each pool, on first use. It reads no data of earlier tasks and changes nothing they stored, and a
task that is dropped leaves no trace. The features are a fixed random expansion of the query, as in RanPAC (McDonnell et
al., 2023), which lets a linear rule bend. Every class weighs the same, however many images it has.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from mqmk.matcher.errors import MatchError
from mqmk.matcher.pool import PromptPool, TaskPrompt, cache_on_pool

WIDTH: Final = 2048
"""Features of a query."""
RANK: Final = 64
"""Rows of a task's factor."""
PENALTY: Final = 0.05
"""r, in mean diagonal entries of the summed outer products."""


def features(query: Float[Tensor, "batch dim"], width: int = WIDTH) -> Float[Tensor, "batch width"]:
    """What the regression sees of a query."""
    return F.relu(F.normalize(query, dim=1) @ _directions(query.shape[1], width).to(query.device))


@cache
def _directions(dim: int, width: int) -> Float[Tensor, "dim width"]:
    """The same in every process and version: numpy keeps this old generator's numbers as they are."""
    return torch.from_numpy(np.random.RandomState(0).standard_normal((dim, width))).float()


@dataclass(frozen=True, eq=False)
class Regression:
    """The solved regression: a row for each class of each task."""

    rows: Float[Tensor, "rows width"]

    def values(self, query: Float[Tensor, "batch dim"]) -> Float[Tensor, "batch rows"]:
        """The value of every class: about 1 where it is certain, about 0 elsewhere."""
        return features(query, self.rows.shape[1]) @ self.rows.T


@cache_on_pool
def fit_regression(pool: PromptPool) -> Regression:
    """The regression over all tasks of a pool."""
    gram = _sum_grams(pool.tasks).clone()
    gram.diagonal().add_(PENALTY * gram.diagonal().mean())
    means = torch.cat([task.feature_means for task in pool.tasks if task.feature_means is not None])
    solved = torch.cholesky_solve(means.T.double(), torch.linalg.cholesky(gram))
    return Regression(solved.T.float().contiguous())


def _sum_grams(tasks: Sequence[TaskPrompt]) -> Float[Tensor, "width width"]:
    """The outer products of all tasks, added one after another.

    The last sum is kept, so that one more task costs one addition; what it gives does not depend on what was kept.
    """
    global _last_sum
    done, total = _last_sum
    if not done or len(done) > len(tasks) or any(old is not new.factor for old, new in zip(done, tasks, strict=False)):
        done, total = (), torch.zeros((), dtype=torch.float64)
    for task in tasks[len(done) :]:
        total = total + _outer_product(task)
    _last_sum = tuple(task.factor for task in tasks), total
    return total


_last_sum: tuple[tuple[Tensor | None, ...], Tensor] = (), torch.zeros(())


def _outer_product(task: TaskPrompt) -> Float[Tensor, "width width"]:
    if task.factor is None or task.residual is None:
        raise MatchError(
            f"task {task.name!r} has no statistics of the anchor query: an older release learned it; use mqmk"
        )
    factor = task.factor.double()
    gram = factor.T @ factor
    gram.diagonal().add_(task.residual[0])
    return gram
