"""The training loop that all rivals share: epochs over one task's images, each with the reference's optimiser."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mqmk.learner.bench.methods.parts.forward import final_norm
from mqmk.learner.bench.methods.parts.remembering import early_query
from mqmk.learner.data.tasks import ImageSet
from mqmk.learner.settings import TrainSettings
from mqmk.learner.training.augment import augment
from mqmk.learner.training.train import count_epochs
from mqmk.matcher.images import normalise
from mqmk.matcher.prompted_vit import FrozenViT

Images = Float[Tensor, "batch 3 height width"]
Loss = Callable[[Tensor, Tensor], Tensor]
Schedule = Callable[[int, int], float]
"""The share of the learning rate in an epoch, of so many."""

SLOW: Final = 0.1  # of the learning rate, for parts that the reference trains at a tenth


def constant(_epoch: int, _epochs: int) -> float:
    """The same rate throughout."""
    return 1.0


def cosine(epoch: int, epochs: int) -> float:
    """From the rate down to 0 along half a cosine."""
    return 0.5 * (1 + math.cos(math.pi * epoch / epochs))


def quarter_cosine(epoch: int, epochs: int) -> float:
    """CODA's: down to nearly 0 in the last epoch."""
    return math.cos(0.495 * math.pi * epoch / max(1, epochs - 1))


@dataclass(frozen=True)
class Recipe:
    """How a reference trains; a fresh optimiser for every task."""

    optimiser: Literal["adam", "sgd"]
    lr: float
    schedule: Schedule = constant
    clip: float | None = None
    weight_decay: float = 0.0

    def build(self, trained: Sequence[Tensor], slow: Sequence[Tensor]) -> torch.optim.Optimizer:
        """The optimiser; `slow` tensors learn at a tenth of the rate."""
        groups = [{"params": list(part), "lr": lr} for part, lr in ((trained, self.lr), (slow, SLOW * self.lr)) if part]
        if self.optimiser == "adam":
            return torch.optim.Adam(groups, weight_decay=self.weight_decay)
        return torch.optim.SGD(groups, momentum=0.9, weight_decay=self.weight_decay)


def fit(
    vit: FrozenViT,
    images: ImageSet,
    settings: TrainSettings,
    recipe: Recipe,
    trained: Sequence[Tensor],
    loss: Loss,
    slow: Sequence[Tensor] = (),
) -> int:
    """Train tensors in place; `loss` gets augmented images and labels. Returns how many numbers were trained."""

    def read(epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        seed = settings.seed * 100_003 + epoch
        generator = torch.Generator().manual_seed(seed)
        for batch in images.batches(settings.batch, seed):
            pixels = normalise(batch.training_pixels.to(vit.device), vit.info)
            yield augment(pixels, settings.augmentation, generator), batch.labels.to(vit.device)

    return _run_epochs(_count_epochs(settings, images), read, recipe, trained, loss, slow)


def _count_epochs(settings: TrainSettings, images: ImageSet) -> int:
    return count_epochs(settings, "task", math.ceil(len(images) / settings.batch))


def fit_features(
    features: Float[Tensor, "images ..."],
    labels: Int[Tensor, " images"],
    recipe: Recipe,
    trained: Sequence[Tensor],
    loss: Loss,
    *,
    epochs: int,
    batch: int,
    seed: int,
) -> int:
    """The same on features that were computed once."""

    def read(epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(seed * 100_003 + epoch)
        for part in torch.randperm(len(labels), generator=generator).split(batch):
            yield features[part], labels[part]

    return _run_epochs(epochs, read, recipe, trained, loss, ())


def _run_epochs(
    epochs: int,
    read: Callable[[int], Iterator[tuple[Tensor, Tensor]]],
    recipe: Recipe,
    trained: Sequence[Tensor],
    loss: Loss,
    slow: Sequence[Tensor],
) -> int:
    everything = [*trained, *slow]
    for tensor in everything:
        tensor.requires_grad_()
    optimiser = recipe.build(trained, slow)
    rates = [group["lr"] for group in optimiser.param_groups]
    for epoch in range(epochs):
        for group, rate in zip(optimiser.param_groups, rates, strict=True):
            group["lr"] = rate * recipe.schedule(epoch, epochs)
        for inputs, labels in read(epoch):
            optimiser.zero_grad()
            loss(inputs, labels).backward()
            if recipe.clip is not None:
                torch.nn.utils.clip_grad_norm_(everything, recipe.clip)
            optimiser.step()
    for tensor in everything:
        tensor.requires_grad_(False)
        tensor.grad = None
    return sum(tensor.numel() for tensor in everything)


def iterate(vit: FrozenViT, images: ImageSet, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Images as they are, and labels: what statistics are computed from."""
    for batch in images.batches(size, seed=None):
        yield normalise(batch.pixels.to(vit.device), vit.info), batch.labels.to(vit.device)


@torch.no_grad()
def collect(
    vit: FrozenViT, images: ImageSet, size: int, query: Callable[[Tensor], Tensor]
) -> tuple[Float[Tensor, "images ..."], Int[Tensor, " images"]]:
    """The query of every image, or what else is computed of it, and the labels."""
    parts = [(query(pixels), labels) for pixels, labels in iterate(vit, images, size)]
    return torch.cat([found for found, _ in parts]), torch.cat([labels for _, labels in parts])


@torch.no_grad()
def plain_query(vit: FrozenViT, images: Images) -> Float[Tensor, "batch dim"]:
    """q(x): the class token after the final norm, without prompts and without gradient."""
    return final_norm(vit, early_query(vit, images))
