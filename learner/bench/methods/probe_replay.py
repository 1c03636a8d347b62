"""`probe-replay`: a cosine head on plain features, trained anew at every version on samples of all classes.

After SLCA's alignment, on a frozen ViT. What a task leaves is a mean for each class and one covariance; they never
change, and a task that is dropped leaves no trace.
"""

from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from mqmk.learner.bench.methods.parts.gaussians import COSINE_RATE, TaskGaussians, replay
from mqmk.learner.bench.methods.parts.heads import cosines
from mqmk.learner.bench.methods.parts.protocol import Answer, MethodInfo, MethodSettings
from mqmk.learner.bench.methods.parts.training import collect, plain_query
from mqmk.learner.data.tasks import Task
from mqmk.matcher.prompted_vit import FrozenViT

SCALE: Final = 16.0


class ProbeReplay:
    """Gaussians of plain features, and a head."""

    def __init__(self, vit: FrozenViT, settings: MethodSettings) -> None:
        self._vit, self._settings = vit, settings
        self._tasks: list[TaskGaussians] = []
        self._head = torch.zeros(0, vit.dim)
        self.trained = 0

    def learn(self, task: Task) -> None:
        """Add the task's Gaussians and train the head anew, from the class means."""
        found = collect(self._vit, task.training, self._settings.train.batch, lambda x: plain_query(self._vit, x))
        self._tasks.append(TaskGaussians.fit(task.classes, *found, pooled=True))
        self._head = F.normalize(torch.cat([known.means for known in self._tasks]), dim=1)
        self.trained = self._head.numel()
        replay(self._tasks, self._settings, [self._head], self._scores, COSINE_RATE)

    def predict(self, images: Float[Tensor, "batch 3 height width"]) -> Answer:
        """The head's logits."""
        return Answer(self._scores(plain_query(self._vit, images)))

    def kept(self) -> dict[str, Tensor]:
        """The Gaussians, and the head of this version."""
        tensors = {"head": self._head}
        for number, task in enumerate(self._tasks):
            tensors |= task.kept(number)
        return tensors

    def _scores(self, query: Float[Tensor, "batch dim"]) -> Float[Tensor, "batch classes"]:
        return SCALE * cosines(query, self._head)


METHODS: Final = (
    MethodInfo(
        "probe-replay",
        "statistics",
        "a head on plain features, trained on Gaussian samples of all classes (after SLCA)",
        ProbeReplay,
        deviations=("SLCA fine-tunes the ViT; here it stays frozen, with one covariance a task and a cosine head",),
        rounds=1,
    ),
)
