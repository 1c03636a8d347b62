"""Gaussian replay: each class leaves a mean and a covariance, and a head is trained on samples of all classes.

With few images a class covariance is shrunk towards the one pooled over its task: n/(n+k) S_c + k/(n+k) S_pooled with
k = dim / 4.
"""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from mqmk.learner.bench.methods.parts.protocol import MethodSettings
from mqmk.learner.bench.methods.parts.training import Recipe, cosine, fit_features

JITTER: Final = 1e-4  # on the diagonal, as in the references
COSINE_RATE: Final = 0.1  # of a cosine head with unit rows; chosen on training images that were not used for statistics


@dataclass(frozen=True, eq=False)
class TaskGaussians:
    """The classes of one task; never changed after it was learned."""

    names: tuple[str, ...]
    means: Float[Tensor, "classes dim"]
    covariances: Float[Tensor, "matrices dim dim"]
    """One for each class, or one for all of them."""

    @classmethod
    def fit(
        cls,
        names: tuple[str, ...],
        features: Float[Tensor, "images dim"],
        labels: Int[Tensor, " images"],
        pooled: bool = False,
    ) -> "TaskGaussians":
        """From the features of a task's training images."""
        means = class_means(features, labels, len(names))
        if pooled:
            centred = features - means[labels]
            return cls(names, means, (centred.T @ centred / len(features))[None])
        return cls(names, means, shrunk_covariances(features, labels, means))

    def sample(self, number: int, version: int) -> Float[Tensor, "classes number dim"]:
        """Samples of each class, drawn by a generator of its own: a class and a version name them."""
        dim = self.means.shape[1]
        covariances = self.covariances.double() + JITTER * torch.eye(dim, device=self.means.device)
        factors = torch.linalg.cholesky(covariances).float().expand(len(self.names), dim, dim)
        noise = [
            torch.randn(number, dim, generator=torch.Generator().manual_seed(zlib.crc32(f"{name}/{version}".encode())))
            for name in self.names
        ]
        return self.means[:, None] + torch.stack(noise).to(self.means.device) @ factors.mT

    def kept(self, task: int) -> dict[str, Tensor]:
        """As `Method.kept` names them."""
        return {f"task{task}/means": self.means, f"task{task}/covariances": self.covariances}


def class_means(
    features: Float[Tensor, "images dim"], labels: Int[Tensor, " images"], classes: int
) -> Float[Tensor, "classes dim"]:
    """The mean of each class."""
    totals = torch.zeros(classes, features.shape[1], device=features.device).index_add(0, labels, features)
    return totals / torch.bincount(labels, minlength=classes).clamp(min=1)[:, None]


def shrunk_covariances(
    features: Float[Tensor, "images dim"], labels: Int[Tensor, " images"], means: Float[Tensor, "classes dim"]
) -> Float[Tensor, "classes dim dim"]:
    """The covariance of each class, shrunk to the one pooled over the task by the number of images."""
    centred, prior = features - means[labels], features.shape[1] / 4
    pooled = centred.T @ centred / len(features)
    found = []
    for label in range(len(means)):
        own = centred[labels == label]
        found.append((own.T @ own + prior * pooled) / (len(own) + prior))
    return torch.stack(found)


def replay(
    tasks: Sequence[TaskGaussians],
    settings: MethodSettings,
    trained: Sequence[Tensor],
    scores: Callable[[Tensor], Tensor],
    lr: float,
) -> None:
    """Train tensors in place on samples of all classes: SGD with momentum 0.9, cosine schedule, batches of 256."""
    version = len(tasks)
    samples = torch.cat([task.sample(settings.replay, version) for task in tasks])  # [classes, number, dim]
    inputs = samples.flatten(0, 1)
    labels = torch.arange(len(samples), device=inputs.device).repeat_interleave(settings.replay)

    def loss(features: Tensor, wanted: Tensor) -> Tensor:
        return F.cross_entropy(scores(features), wanted)

    recipe = Recipe("sgd", lr, cosine)
    fit_features(inputs, labels, recipe, trained, loss, epochs=settings.replay_epochs, batch=256, seed=version)
