"""Where a matcher's queries come from: the frozen ViT computes them on demand, and shares what tasks have in common."""

from collections.abc import Iterator
from functools import cached_property
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mqmk.matcher.pool import PromptPool
from mqmk.matcher.prompted_vit import FrozenViT, Stem

_TOKENS_PER_PASS = {"cpu": 1024, "cuda": 65536}  # larger passes leave a CPU's caches and gain nothing


@runtime_checkable
class Queries(Protocol):
    """The queries of a batch of images, as a matcher needs them."""

    def plain(self) -> Float[Tensor, "batch dim"]:
        """Without prompts."""

    def enhanced(self) -> Float[Tensor, "batch dim"]:
        """Q+, with the mean of all e-prompts."""

    def anchor(self) -> Float[Tensor, "batch dim"]:
        """With the anchor prompt."""

    def by_task(self) -> Iterator[Float[Tensor, "batch dim"]]:
        """Q_t of every image for one task after another."""

    def task_queries(self, image: Int[Tensor, " rows"], task: Int[Tensor, " rows"]) -> Float[Tensor, "rows dim"]:
        """Q_t for pairs of image and task."""


class LiveQueries:
    """Queries computed on demand; the part that all tasks share is computed once."""

    def __init__(
        self, vit: FrozenViT, pool: PromptPool, images: Float[Tensor, "batch 3 height width"] | Stem, rows_per_pass: int
    ) -> None:
        """`images` may be embedded already."""
        self._vit, self._pool, self._images, self._rows_per_pass = vit, pool, images, rows_per_pass

    @cached_property
    def _embedded(self) -> Stem:
        return self._images if isinstance(self._images, Stem) else self._vit.embed(self._images)

    @cached_property
    def _stem(self) -> Stem:
        return self._vit.stem(self._embedded, self._pool.g, self._pool.e_layers[0])

    def plain(self) -> Float[Tensor, "batch dim"]:
        return self._vit.query(self._embedded)

    def enhanced(self) -> Float[Tensor, "batch dim"]:
        return self._vit.query(self._stem, self._pool.g, self._pool.mean_e)

    def anchor(self) -> Float[Tensor, "batch dim"]:
        return self._vit.query(self._stem, self._pool.g, self._pool.anchor_prompt)

    def by_task(self) -> Iterator[Float[Tensor, "batch dim"]]:
        batch = len(self._images)
        for tasks in torch.arange(len(self._pool.tasks)).split(max(1, self._rows_per_pass // batch)):
            if len(tasks) == 1:  # one prompt serves the batch: nothing is copied
                yield self._vit.query(self._stem, self._pool.g, self._pool.e(int(tasks)))
            else:
                image = torch.arange(batch).repeat(len(tasks))
                yield from self.task_queries(image, tasks.repeat_interleave(batch)).split(batch)

    def task_queries(self, image: Int[Tensor, " rows"], task: Int[Tensor, " rows"]) -> Float[Tensor, "rows dim"]:
        parts = torch.arange(len(image)).split(self._rows_per_pass)
        return torch.cat([self._rows(image[part], task[part]) for part in parts])

    def _rows(self, image: Int[Tensor, " rows"], task: Int[Tensor, " rows"]) -> Float[Tensor, "rows dim"]:
        whole_batch = len(image) == len(self._stem) and bool((image.cpu() == torch.arange(len(image))).all())
        stem = self._stem if whole_batch else self._stem.rows(image)
        return self._vit.query(stem, self._pool.g, self._pool.e_rows(task))


def rows_per_pass(vit: FrozenViT, tokens_per_pass: int | None) -> int:
    """How many pairs of image and task fit into one forward pass."""
    return max(1, (tokens_per_pass or _TOKENS_PER_PASS.get(vit.device.type, 1024)) // vit.tokens)
