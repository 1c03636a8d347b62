"""FeCAM: the nearest class by Mahalanobis distance of normalised plain features. Nothing trains."""

from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from mqmk.learner.bench.methods.parts.gaussians import class_means, shrunk_covariances
from mqmk.learner.bench.methods.parts.protocol import Answer, MethodInfo, MethodSettings
from mqmk.learner.bench.methods.parts.training import collect, plain_query
from mqmk.learner.data.tasks import Task
from mqmk.matcher.prompted_vit import FrozenViT

DIAGONAL, OFF_DIAGONAL = 1.0, 0.0  # shrinkage in means of the matrix's entries, as for CIFAR-100


class FeCAM:
    """A mean and a precision matrix for each class."""

    trained = 0

    def __init__(self, vit: FrozenViT, settings: MethodSettings) -> None:
        self._vit, self._settings = vit, settings
        self._means: list[Tensor] = []
        self._precisions: list[Tensor] = []

    def learn(self, task: Task) -> None:
        """One pass over the images as they are."""
        query, labels = collect(self._vit, task.training, self._settings.train.batch, self._features)
        means = class_means(query, labels, len(task.classes))
        covariances = shrunk_covariances(query, labels, means)
        self._means.append(means)
        self._precisions.append(torch.linalg.inv(normalise_covariances(covariances).double()).float())

    @torch.no_grad()
    def predict(self, images: Float[Tensor, "batch 3 height width"]) -> Answer:
        """Minus the distance to every class."""
        query = self._features(images)
        return Answer(mahalanobis_scores(query, torch.cat(self._means), torch.cat(self._precisions)))

    def kept(self) -> dict[str, Tensor]:
        """dim * (dim + 1) numbers a class."""
        means = {f"task{number}/means": tensor for number, tensor in enumerate(self._means)}
        return means | {f"task{number}/precisions": tensor for number, tensor in enumerate(self._precisions)}

    def _features(self, images: Tensor) -> Float[Tensor, "batch dim"]:
        return F.normalize(plain_query(self._vit, images), dim=1)


def normalise_covariances(
    covariances: Float[Tensor, "classes dim dim"], diagonal: float = DIAGONAL, off_diagonal: float = OFF_DIAGONAL
) -> Float[Tensor, "classes dim dim"]:
    """Shrunk by the means of their entries, then as correlations, so that classes are comparable."""
    dim = covariances.shape[-1]
    eye = torch.eye(dim, device=covariances.device)
    own = covariances.diagonal(dim1=1, dim2=2).mean(dim=1)
    others = (covariances * (1 - eye)).sum(dim=(1, 2)) / max(1, dim * (dim - 1))
    shrunk = covariances + diagonal * own[:, None, None] * eye + off_diagonal * others[:, None, None] * (1 - eye)
    deviations = shrunk.diagonal(dim1=1, dim2=2).sqrt().clamp(min=1e-12)
    return shrunk / (deviations[:, :, None] * deviations[:, None, :])


def mahalanobis_scores(
    query: Float[Tensor, "batch dim"],
    means: Float[Tensor, "classes dim"],
    precisions: Float[Tensor, "classes dim dim"],
) -> Float[Tensor, "batch classes"]:
    """Minus (f - m)^T P (f - m) for every class."""
    away = query - means[:, None]  # [classes, batch, dim]
    return -((away @ precisions) * away).sum(dim=-1).T


METHODS: Final = (
    MethodInfo(
        "fecam",
        "statistics",
        "nearest class by Mahalanobis distance of plain features; nothing trains",
        FeCAM,
        deviations=("class covariances are first shrunk to the one pooled over the task, by dim / 4 images",),
        rounds=1,
    ),
)
