"""Which held-out images a version is measured on: a sample of bounded size, the same for the same images.

It is stratified by class and chosen by content: the first image of every class in the order of their ids, then the
second of every class, and so on. One more task therefore replaces few images of the others.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import torch
from jaxtyping import Int, Int64, Shaped, UInt8
from torch import Tensor

from mqmk.learner.evaluation.query_table import content_digest

ID_BYTES: Final = 16


def image_ids(pixels: UInt8[Tensor, "images 3 height width"]) -> UInt8[Tensor, "images bytes"]:
    """A hash of each image's pixels."""
    digests = b"".join(bytes.fromhex(content_digest("image", image)) for image in pixels)
    return torch.frombuffer(bytearray(digests), dtype=torch.uint8).reshape(-1, ID_BYTES) if digests else _no_ids()


def _no_ids() -> UInt8[Tensor, "0 bytes"]:
    return torch.zeros(0, ID_BYTES, dtype=torch.uint8)


@dataclass(frozen=True, eq=False)
class TaskImages:
    """The held-out images of one task without their pixels."""

    ids: Shaped[np.ndarray, " images"]
    labels: Int64[np.ndarray, " images"]
    """Place of the class within its task."""

    @classmethod
    def of(cls, ids: UInt8[Tensor, "images bytes"], labels: Int[Tensor, " images"]) -> "TaskImages":
        """From the tensors of a file."""
        return cls(ids.contiguous().numpy().view(f"S{ID_BYTES}")[:, 0], labels.numpy())

    @classmethod
    def empty(cls) -> "TaskImages":
        """Of a task that brought none, or lost them."""
        return cls.of(_no_ids(), torch.zeros(0, dtype=torch.int64))

    @cached_property
    def rank(self) -> Int64[np.ndarray, " images"]:
        """The place of each image within its class, in the order of ids."""
        order = np.lexsort((self.ids, self.labels))
        labels = self.labels[order]
        first = np.searchsorted(labels, labels)  # where the image's class begins
        rank = np.empty(len(order), dtype=np.int64)
        rank[order] = np.arange(len(order)) - first
        return rank


@dataclass(frozen=True, eq=False)
class Sample:
    """Held-out images of several tasks, mixed."""

    task: Int[Tensor, " images"]
    label: Int[Tensor, " images"]
    place: Int[Tensor, " images"]
    """Of the image among all those of its task."""
    ids: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.ids)


def choose_sample(tasks: Sequence[TaskImages], max_images: int | None = None) -> Sample:
    """Rank by rank of every class until there are enough; in the last rank the lowest ids win."""
    rank = np.concatenate([np.zeros(0, dtype=np.int64), *(task.rank for task in tasks)])
    wanted = len(rank) if max_images is None else min(max_images, len(rank))
    last = int(np.searchsorted(np.bincount(rank).cumsum(), wanted)) if len(rank) else 0
    number = np.repeat(np.arange(len(tasks)), [len(task.ids) for task in tasks])
    place = np.concatenate([np.zeros(0, dtype=np.int64), *(np.arange(len(task.ids)) for task in tasks)])
    some = rank <= last
    ids = np.concatenate([TaskImages.empty().ids, *(task.ids[task.rank <= last] for task in tasks)])
    label = np.concatenate([np.zeros(0, dtype=np.int64), *(task.labels[task.rank <= last] for task in tasks)])
    order = np.lexsort((ids, rank[some]))[:wanted]
    names = tuple(bytes(each).ljust(ID_BYTES, b"\0").hex() for each in ids[order])  # numpy drops zeros at the end
    columns = [torch.from_numpy(each[order]) for each in (number[some], label, place[some])]
    return Sample(columns[0], columns[1], columns[2], names)
