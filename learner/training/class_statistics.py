"""Statistics of a task's queries: class means, and for the anchor query what the regression over all tasks needs."""

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from mqmk.matcher.regression import RANK, WIDTH, features

ITERATIONS: Final = 8
"""Of subspace iteration: by then the directions that are kept hold still."""


class ClassMeans:
    """The mean of the normalised queries of each class, batch after batch."""

    def __init__(self, classes: int, dim: int, device: torch.device) -> None:
        self._total = torch.zeros(classes, dim, device=device)
        self._count = torch.zeros(classes, 1, device=device)

    def add(self, query: Float[Tensor, "batch dim"], labels: Int[Tensor, " batch"]) -> None:
        """Add a batch of queries."""
        self._total.index_add_(0, labels, F.normalize(query, dim=1))
        self._count.index_add_(0, labels, torch.ones(len(labels), 1, device=self._count.device))

    def value(self) -> Float[Tensor, "classes dim"]:
        """The means; zero for a class without queries."""
        return self._total / self._count.clamp(min=1)

    def counts(self) -> tuple[int, ...]:
        """How many queries of each class there were."""
        return tuple(int(count) for count in self._count[:, 0].tolist())


@dataclass(frozen=True, eq=False)
class AnchorStatistics:
    """What the regression needs of a task, exact in half precision: that is how it is stored."""

    factor: Float[Tensor, "rank width"]
    residual: Float[Tensor, "1 width"]
    feature_means: Float[Tensor, "classes width"]


class AnchorStatisticsAccumulator:
    """The statistics of anchor queries, batch after batch; every class weighs the same."""

    def __init__(self, class_counts: tuple[int, ...], device: torch.device) -> None:
        """`class_counts`: how many images of each class will be added."""
        self._weights = 1 / torch.tensor(class_counts, device=device).clamp(min=1)
        self._gram = torch.zeros(WIDTH, WIDTH, dtype=torch.float64, device=device)
        self._means = torch.zeros(len(class_counts), WIDTH, dtype=torch.float64, device=device)

    def add(self, query: Float[Tensor, "batch dim"], labels: Int[Tensor, " batch"]) -> None:
        """Add a batch of queries."""
        seen, weights = features(query), self._weights[labels][:, None]
        self._gram += (seen * weights).T @ seen
        self._means.index_add_(0, labels, (seen * weights).double())

    def value(self) -> AnchorStatistics:
        """What a task keeps."""
        factor = _to_half(factorise(self._gram, RANK))
        residual = (self._gram.diagonal() - factor.double().square().sum(dim=0)).clamp(min=0)
        return AnchorStatistics(factor, _to_half(residual[None]), _to_half(self._means))


def _to_half(values: Tensor) -> Float[Tensor, "..."]:
    return values.half().float()


def factorise(gram: Float[Tensor, "width width"], rank: int) -> Float[Tensor, "rank width"]:
    """Its largest directions, as a factor of a matrix close to it: subspace iteration, the same every time."""
    start = np.random.RandomState(1).standard_normal((len(gram), min(rank + rank // 2, len(gram))))
    basis = torch.from_numpy(start).to(gram)
    for _ in range(ITERATIONS):
        basis = torch.linalg.qr(gram @ basis).Q
    values, vectors = torch.linalg.eigh(basis.T @ gram @ basis)
    largest = values.argsort(descending=True)[:rank]
    return values[largest].clamp(min=0).sqrt()[:, None] * (basis @ vectors[:, largest]).T
