"""Joint training: all classes at once, from data that a stream of tasks never has together. A reference, no method."""

from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from mqmk.learner.bench.methods.mqmk import with_matcher
from mqmk.learner.bench.methods.parts.heads import LinearHead, kept_heads, score_all
from mqmk.learner.bench.methods.parts.protocol import Answer, MethodInfo, MethodSettings, Published
from mqmk.learner.bench.methods.parts.training import Recipe, collect, fit_features, plain_query
from mqmk.learner.data.tasks import Task
from mqmk.matcher.prompted_vit import FrozenViT

EPOCHS: Final = 100


class LinearProbe:
    """Logistic regression on plain features."""

    def __init__(self, vit: FrozenViT, settings: MethodSettings) -> None:
        self._vit, self._settings = vit, settings
        self._generator = torch.Generator().manual_seed(settings.train.seed)
        self._heads: list[LinearHead] = []
        self.trained = 0

    def learn(self, task: Task) -> None:
        """Features once, then many epochs on them."""
        query, labels = collect(
            self._vit, task.training, self._settings.train.batch, lambda x: plain_query(self._vit, x)
        )
        head = LinearHead.new(self._vit, len(task.classes), self._generator)
        self.trained = fit_features(
            query,
            labels,
            Recipe("adam", 1e-3, weight_decay=1e-4),
            head.tensors,
            lambda features, wanted: F.cross_entropy(head(features), wanted),
            epochs=EPOCHS,
            batch=256,
            seed=self._settings.train.seed,
        )
        self._heads.append(head)

    def predict(self, images: Float[Tensor, "batch 3 height width"]) -> Answer:
        """All classes."""
        return Answer(score_all(self._heads, plain_query(self._vit, images)))

    def kept(self) -> dict[str, Tensor]:
        """The rows."""
        return kept_heads(self._heads)


METHODS: Final = (
    MethodInfo(
        "joint",
        "reference",
        "our prompts and head, trained on all classes as one task, for the same number of epochs",
        with_matcher("mqmk"),
        Published("MQMK paper", cifar100=91.79, imagenet_r=79.27, domainnet=89.15),
        is_joint=True,
        epoch_passes=(1.9, 0.0),
        test_passes=1.0,
        rounds=1,
    ),
    MethodInfo(
        "joint-linear",
        "reference",
        "logistic regression on plain features of all classes",
        LinearProbe,
        Published("RanPAC, tables", cifar100=87.9, imagenet_r=72.0),
        is_joint=True,
        rounds=1,
    ),
)
