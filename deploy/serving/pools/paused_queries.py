"""Queries for work beside requests: a warm-up that leaves the processor to them between passes."""

from collections.abc import Callable, Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mqmk.matcher.queries import Queries


class PausedQueries:
    """Queries of another source, one pass at a time with a pause before each."""

    def __init__(self, queries: Queries, pause: Callable[[], None]) -> None:
        self._queries, self._pause = queries, pause

    def plain(self) -> Float[Tensor, "batch dim"]:
        self._pause()
        return self._queries.plain()

    def enhanced(self) -> Float[Tensor, "batch dim"]:
        self._pause()
        return self._queries.enhanced()

    def anchor(self) -> Float[Tensor, "batch dim"]:
        self._pause()
        return self._queries.anchor()

    def by_task(self) -> Iterator[Float[Tensor, "batch dim"]]:
        self._pause()
        for query in self._queries.by_task():
            yield query
            self._pause()

    def task_queries(self, image: Int[Tensor, " rows"], task: Int[Tensor, " rows"]) -> Float[Tensor, "rows dim"]:
        found = []
        for row in range(len(image)):
            self._pause()
            found.append(self._queries.task_queries(image[row : row + 1], task[row : row + 1]))
        return torch.cat(found)
