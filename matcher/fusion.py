"""How much each witness counts: the regression over all classes, and the key and head row of a class for its own query.

    F_c = regression r_c + key cos(Q_t, key_c) + head cos(Q_t, head_c)        classes of tasks whose query was computed
    F_c = regression r_c + unscored                                           all other classes

and the probability of class c is softmax(F). Where the regression alone is certain, F_c = anchor r_c for all classes,
and no further query is computed. The weights are a handful of numbers for a whole version, fitted on held-out images
when it is built (`learner/evaluation/fusion_fit.py`); `matching["fusion"]` of the pool has them.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from mqmk.matcher.keys import key_of_class, max_by_task, trained_keys
from mqmk.matcher.pool import PromptPool, cache_on_pool


@dataclass(frozen=True)
class Pairs:
    """Images with tasks whose own query was computed for them."""

    image: Int[Tensor, " pairs"]
    task: Int[Tensor, " pairs"]

    @classmethod
    def of_shortlist(
        cls,
        pool: PromptPool,
        values: Float[Tensor, "batch rows"],
        size: int,
        image: Int[Tensor, " some"] | None = None,
    ) -> "Pairs":
        """The tasks of the best classes by the regression, for some images or for all."""
        image = torch.arange(len(values), device=values.device) if image is None else image
        best = (
            max_by_task(values[image], pool.row_task, len(pool.tasks)).topk(min(size, len(pool.tasks)), dim=1).indices
        )
        return cls(image.repeat_interleave(best.shape[1]), best.flatten())


@dataclass(frozen=True, eq=False)
class ClassEvidence:
    """What exact queries say about the classes of their tasks; NaN for all other classes."""

    key: Float[Tensor, "batch rows"]
    """Cosine of Q_t and the class's key."""
    head: Float[Tensor, "batch rows"]
    """Cosine of Q_t and the class's head row."""

    @classmethod
    def empty(cls, like: Float[Tensor, "batch rows"]) -> "ClassEvidence":
        """Before any exact query."""
        return cls(torch.full_like(like, torch.nan), torch.full_like(like, torch.nan))

    def add(self, pool: PromptPool, pairs: Pairs, query: Float[Tensor, "pairs dim"]) -> None:
        """Note what the queries of some pairs say."""
        query, bank = F.normalize(query, dim=1), trained_keys(pool, None)
        for task in pairs.task.unique().tolist():
            here, rows = pairs.task == task, pool.rows_of_task[task]
            image = pairs.image[here]
            self.key[image, rows] = (query[here] @ bank.by_task[task].T)[:, key_of_class(pool)[task]]
            self.head[image, rows] = query[here] @ pool.head[rows].T


@dataclass(frozen=True)
class Fusion:
    """The weights; those here are used by a pool without held-out images."""

    anchor: float = 12.0
    regression: float = 8.0
    key: float = 8.0
    head: float = 8.0
    unscored: float = 6.0
    """What key and head would add to a class whose task got no query."""
    accept: float = 0.95
    """The regression is certain where it gives its best class this probability."""

    def is_certain(self, values: Float[Tensor, "batch rows"]) -> Bool[Tensor, " batch"]:
        """For which images the regression needs no other witness."""
        return (self.anchor * values).softmax(dim=1).amax(dim=1) >= self.accept

    def class_logits(self, values: Float[Tensor, "batch rows"], evidence: ClassEvidence) -> Float[Tensor, "batch rows"]:
        """F of every class; of an image without any exact query by the regression alone."""
        local = (self.key * evidence.key + self.head * evidence.head).nan_to_num(nan=self.unscored)
        is_alone = evidence.key.isnan().all(dim=1, keepdim=True)
        return torch.where(is_alone, self.anchor * values, self.regression * values + local)


@cache_on_pool
def read_fusion(pool: PromptPool) -> Fusion:
    """The weights of a pool."""
    return Fusion(**pool.matching.get("fusion", {}))
