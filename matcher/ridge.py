"""Which class a query without prompts belongs to, by ridge regression on statistics that every task adds once.

A query without prompts never changes, so its statistics stay valid: of its features f, each task t keeps the
sum of outer products G_t and for each of its classes the sum C_t. The regression over all tasks,

    W = (G_1 + ... + G_M + r I)^-1 (C_1, ..., C_M),

is solved once for each pool, on first use. It reads no data of earlier tasks and changes nothing they stored, and a
task that is dropped leaves no trace. The features are a fixed random expansion of the query, as in RanPAC (McDonnell et
al., 2023), which lets a linear rule bend.
"""

from dataclasses import dataclass
from functools import cache
from typing import Final

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from mqmk.matcher.errors import MatchError
from mqmk.matcher.keys import max_by_task
from mqmk.matcher.pool import PromptPool, cache_on_pool

WIDTH: Final = 1024
RIDGE: Final = 0.01  # r, in mean diagonal entries of the summed outer products


def features(query: Float[Tensor, "batch dim"], width: int = WIDTH) -> Float[Tensor, "batch width"]:
    """What the regression sees of a query."""
    return F.relu(F.normalize(query, dim=1) @ _directions(query.shape[1], width).to(query.device))


@cache
def _directions(dim: int, width: int) -> Float[Tensor, "dim width"]:
    """The same in every process and version: numpy keeps this old generator's numbers as they are."""
    return torch.from_numpy(np.random.RandomState(0).standard_normal((dim, width))).float()


@dataclass(frozen=True, eq=False)
class RidgeBank:
    """The solved regression: a row for each class of each task."""

    rows: Float[Tensor, "rows width"]
    row_task: Int[Tensor, " rows"]
    tasks: int

    def scores(self, query: Float[Tensor, "batch dim"]) -> Float[Tensor, "batch tasks"]:
        """The value of every task's best class: about 1 where it is certain, about 0 elsewhere."""
        values = features(query, self.rows.shape[1]) @ self.rows.T
        return max_by_task(values, self.row_task, self.tasks)


@cache_on_pool
def fit_ridge(pool: PromptPool) -> RidgeBank:
    """The regression over all tasks of a pool."""
    grams, sums = [], []
    for task in pool.tasks:
        if task.plain_gram is None or task.plain_sums is None:
            raise MatchError(f"task {task.name!r} has no statistics of plain queries, which ridge needs; use mqmk")
        grams.append(task.plain_gram)
        sums.append(task.plain_sums)
    if len({len(gram) for gram in grams}) > 1:
        raise MatchError(f"ridge needs features of one width, got {sorted({len(gram) for gram in grams})}; use mqmk")
    gram = torch.stack(grams).double().sum(dim=0)
    gram.diagonal().add_(RIDGE * gram.diagonal().mean())
    rows = torch.linalg.solve(gram, torch.cat(sums).double().T).T
    return RidgeBank(rows.float(), pool.row_task, len(pool.tasks))
