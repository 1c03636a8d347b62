"""What several methods of a comparison compute alike is computed once: plain queries, features that no longer change.

A row is known by the content of its image and by a name for what computed it. Methods get the same augmented images, so
even the plain queries of training steps are shared. What was reused counts as if it had been computed: costs are those
of a method alone.
"""

import hashlib
from collections.abc import Callable, Hashable, Sequence
from typing import Final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mqmk.learner.bench.methods.parts.forward import PassMeter
from mqmk.matcher.prompted_vit import FrozenViT

MOST_BYTES: Final = 2**30
"""When so much is kept, new rows are computed each time."""

Compute = Callable[[Int[Tensor, " missing"]], Tensor]


class Memory:
    """Rows by name and image; lives as long as the comparison of one seed."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._rows: dict[Hashable, tuple[Tensor, float]] = {}
        self._free = most_bytes
        self._hashed: tuple[Tensor, tuple[bytes, ...]] = (torch.zeros(0), ())
        self.others: dict[Hashable, object] = {}
        """Larger things that methods share, by names of their own."""

    def digests(self, images: Float[Tensor, "batch ..."]) -> tuple[bytes, ...]:
        """A hash of each image."""
        if self._hashed[0] is not images:
            pixels = images.detach().cpu().contiguous().numpy()
            self._hashed = images, tuple(hashlib.blake2b(each.data, digest_size=16).digest() for each in pixels)
        return self._hashed[1]

    def find(self, names: Sequence[Hashable]) -> list[int]:
        """The places of names that are not known."""
        return [place for place, name in enumerate(names) if name not in self._rows]

    def keep(self, names: Sequence[Hashable], rows: Tensor, passes: float) -> None:
        """Keep rows, each with the forward passes that it cost, while there is room."""
        for name, row in zip(names, rows, strict=True):
            size = row.numel() * row.element_size()
            if self._free >= size:
                self._rows[name] = row.clone(), passes
                self._free -= size

    def get(self, name: Hashable) -> tuple[Tensor, float]:
        """A row that is known, and what it cost."""
        return self._rows[name]


class RememberingViT(FrozenViT):
    """The same ViT with a memory; shares its weights with the one it was made from."""

    def __init__(self, vit: FrozenViT, memory: Memory) -> None:
        super().__init__(vit._vit, vit.info, vit.device)
        self.memory = memory


def memory_of(vit: FrozenViT) -> Memory | None:
    """None where every method computes for itself."""
    return vit.memory if isinstance(vit, RememberingViT) else None


@torch.no_grad()
def recall(vit: FrozenViT, images: Float[Tensor, "batch ..."], kinds: Sequence[Hashable], compute: Compute) -> Tensor:
    """A row for each image, of its own kind; only those that are not known are computed, by their places."""
    memory = memory_of(vit)
    if memory is None:
        return compute(torch.arange(len(images)))
    names = list(zip(kinds, memory.digests(images), strict=True))
    missing = memory.find(names)
    rows: list[Tensor | None] = [None] * len(names)
    if missing:
        with PassMeter(vit) as meter:
            found = compute(torch.tensor(missing))
        memory.keep([names[place] for place in missing], found, meter.forward / len(missing))
        for place, row in zip(missing, found, strict=True):
            rows[place] = row
    for place, name in enumerate(names):
        if rows[place] is None:
            rows[place], passes = memory.get(name)
            PassMeter.add(vit, passes)
    return torch.stack([row for row in rows if row is not None])


@torch.no_grad()
def early_query(vit: FrozenViT, images: Float[Tensor, "batch 3 height width"]) -> Float[Tensor, "batch dim"]:
    """The class token before the final norm, without prompts and without gradient."""
    return recall(vit, images, ["early"] * len(images), lambda some: vit.class_token(vit.embed(images[some])))
