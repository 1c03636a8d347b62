"""NCM (SimpleCIL): the nearest mean of plain features. Nothing trains; the floor that every table must show."""

from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor

from mqmk.learner.bench.methods.parts.heads import cosines
from mqmk.learner.bench.methods.parts.protocol import Answer, MethodInfo, MethodSettings, Published
from mqmk.learner.bench.methods.parts.training import iterate, plain_query
from mqmk.learner.data.tasks import Task
from mqmk.learner.training.class_statistics import ClassMeans
from mqmk.matcher.prompted_vit import FrozenViT


class NCM:
    """A mean of normalised plain features for each class."""

    trained = 0

    def __init__(self, vit: FrozenViT, settings: MethodSettings) -> None:
        self._vit, self._settings = vit, settings
        self._means: list[Tensor] = []

    def learn(self, task: Task) -> None:
        """One pass over the images as they are."""
        means = ClassMeans(len(task.classes), self._vit.dim, self._vit.device)
        for images, labels in iterate(self._vit, task.training, self._settings.train.batch):
            means.add(plain_query(self._vit, images), labels)
        self._means.append(means.value())

    def predict(self, images: Float[Tensor, "batch 3 height width"]) -> Answer:
        """The cosine with every class mean."""
        return Answer(cosines(plain_query(self._vit, images), torch.cat(self._means)))

    def kept(self) -> dict[str, Tensor]:
        """One row a class."""
        return {f"task{number}/means": means for number, means in enumerate(self._means)}


METHODS: Final = (
    MethodInfo(
        "ncm",
        "statistics",
        "nearest class mean of plain features; nothing trains",
        NCM,
        Published("RanPAC, tables", cifar100=83.4, imagenet_r=61.2),
        ("means of normalised features, which the reference does not normalise",),
        rounds=1,
    ),
)
