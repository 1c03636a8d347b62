"""Statistics of a task's queries: class means, and for queries without prompts their second-order statistics."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from mqmk.matcher.ridge import WIDTH, features


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
class PlainStatistics:
    """What sqsk, sqmk and ridge need of a task."""

    means: Float[Tensor, "classes dim"]
    gram: Float[Tensor, "width width"] | None
    sums: Float[Tensor, "classes width"] | None


class PlainStatisticsAccumulator:
    """The statistics of queries without prompts, batch after batch."""

    def __init__(self, classes: int, dim: int, device: torch.device, regression: bool) -> None:
        self._means = ClassMeans(classes, dim, device)
        self._gram = torch.zeros(WIDTH, WIDTH, device=device) if regression else None
        self._sums = torch.zeros(classes, WIDTH, device=device) if regression else None

    def add(self, query: Float[Tensor, "batch dim"], labels: Int[Tensor, " batch"]) -> None:
        """Add a batch of queries."""
        self._means.add(query, labels)
        if self._gram is not None and self._sums is not None:
            seen = features(query)
            self._gram.addmm_(seen.T, seen)
            self._sums.index_add_(0, labels, seen)

    def value(self) -> PlainStatistics:
        """Means and, for the regression, the sum of outer products and the sum of each class."""
        return PlainStatistics(self._means.value(), self._gram, self._sums)
