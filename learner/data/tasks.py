"""A task as the learner sees it: its classes, and its images as pixels of the backbone's size.

`ImageSet` is one side of a task (training or held out). It is held in memory where it fits and read again from its
source in every epoch where it does not, so a task of a million images costs no more memory than a small one.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Final, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Int, UInt8
from PIL import Image
from torch import Tensor

from mqmk.learner.data.random_crop import random_crop
from mqmk.matcher.images import crop_to_size
from mqmk.matcher.prompted_vit import BackboneInfo

MEMORY_FOR_IMAGES: Final = 2**29  # bytes of decoded pixels that one side of a task may keep


@dataclass(frozen=True)
class Batch:
    """Some images with their labels."""

    pixels: UInt8[Tensor, "batch 3 height width"]
    labels: Int[Tensor, " batch"]
    crops: UInt8[Tensor, "batch 3 height width"] | None = None
    """Random crops of the original images, where training sees those."""

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def training_pixels(self) -> UInt8[Tensor, "batch 3 height width"]:
        """What training sees; `pixels` are what an image is recognised by."""
        return self.pixels if self.crops is None else self.crops

    def rows(self, index: Tensor) -> "Batch":
        """Some of the images."""
        return Batch(self.pixels[index], self.labels[index], None if self.crops is None else self.crops[index])

    def split(self, parts: int) -> list["Batch"]:
        """Smaller batches that together are this one."""
        return [self.rows(part) for part in torch.arange(len(self)).chunk(parts)]


@runtime_checkable
class ImageSet(Protocol):
    """One side of a task."""

    @property
    def class_counts(self) -> tuple[int, ...]:
        """How many images of each class there are; classes at the end may be left out if they have none."""

    def __len__(self) -> int:
        """How many images there are."""

    def batches(self, size: int, seed: int | None, balanced: bool = False) -> Iterator[Batch]:
        """Every image once, in the order that the seed gives; None keeps the order of the source.

        Balanced: about as many images, but each class equally often, so those of rare classes come again.
        """


@dataclass(frozen=True, eq=False)
class InMemory:
    """Images that fit into memory."""

    pixels: UInt8[Tensor, "images 3 height width"]
    labels: Int[Tensor, " images"]

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def class_counts(self) -> tuple[int, ...]:
        return tuple(torch.bincount(self.labels).tolist())

    def batches(self, size: int, seed: int | None, balanced: bool = False) -> Iterator[Batch]:
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        if balanced:
            weights = 1 / torch.bincount(self.labels)[self.labels].float()
            order = weights.multinomial(len(self), replacement=True, generator=generator)
        else:
            order = torch.arange(len(self)) if generator is None else torch.randperm(len(self), generator=generator)
        for part in order.split(size):
            yield Batch(self.pixels[part], self.labels[part])


Decoded = tuple[Image.Image, int]


@dataclass(frozen=True, eq=False)
class Streamed:
    """Images that are read again in every epoch; `read` shuffles them through a bounded buffer."""

    class_counts: tuple[int, ...]
    read: Callable[[int | None], Iterable[Decoded]]
    info: BackboneInfo
    least_area: float | None = None
    """The smallest random crop of an original image, as a share of it; None trains on the centre crop."""

    def __len__(self) -> int:
        return sum(self.class_counts)

    def batches(self, size: int, seed: int | None, balanced: bool = False) -> Iterator[Batch]:
        stream, rng = iter(self.read(seed)), random.Random(seed)
        if balanced:
            stream = self._balance(stream, rng)
        least = None if seed is None else self.least_area

        def crop(image: Image.Image) -> Image.Image | None:
            return None if least is None else random_crop(image, self.info.image_size, least, rng)

        small = ((crop_to_size(image, self.info), label, crop(image)) for image, label in stream)
        while part := list(islice(small, size)):  # each cropped as it comes: a batch of photographs would be gigabytes
            crops = [found for _, _, found in part if found is not None]
            whole = stack_batch([(image, label) for image, label, _ in part])
            yield replace(whole, crops=stack_images(crops)) if crops else whole

    def _balance(self, stream: Iterator[Decoded], rng: random.Random) -> Iterator[Decoded]:
        """Repeat or drop images at random so that every class is expected equally often."""
        fair = len(self) / len(self.class_counts)
        for image, label in stream:
            wanted = fair / self.class_counts[label]
            for _ in range(int(wanted) + (rng.random() < wanted % 1)):
                yield image, label


@dataclass(frozen=True, eq=False)
class Task:
    """A labelled data set with its own classes, ready to be learned."""

    name: str
    classes: tuple[str, ...]
    training: ImageSet
    held_out: ImageSet
    manifest_sha256: str = ""


def stack_batch(part: list[Decoded]) -> Batch:
    """Images of the backbone's size."""
    return Batch(stack_images([image for image, _ in part]), torch.tensor([label for _, label in part]))


def stack_images(images: Sequence[Image.Image]) -> UInt8[Tensor, "images 3 height width"]:
    """Images of one size as pixels."""
    pixels = np.stack([np.asarray(image) for image in images])  # [images, h, w, 3]
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous()


def load_images(
    class_counts: tuple[int, ...],
    read: Callable[[int | None], Iterable[Decoded]],
    info: BackboneInfo,
    least_area: float | None = None,
) -> ImageSet:
    """In memory where the decoded pixels fit, streamed where they do not or where training crops the originals."""
    streamed = Streamed(class_counts, read, info, least_area)
    if least_area is not None or len(streamed) * 3 * info.image_size**2 > MEMORY_FOR_IMAGES:
        return streamed
    parts = list(streamed.batches(256, seed=None))
    if not parts:
        size = info.image_size
        return InMemory(torch.zeros(0, 3, size, size, dtype=torch.uint8), torch.zeros(0, dtype=torch.int64))
    return InMemory(torch.cat([part.pixels for part in parts]), torch.cat([part.labels for part in parts]))
