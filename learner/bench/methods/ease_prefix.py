"""EASE's prototypes on our prompts: every class has a prototype under every prompt, completed where it was never seen.

An old class was never seen under a newer prompt. Its prototype there is a mean of newer classes' prototypes, weighted
by their likeness to it under its own prompt. No old image is read.
"""

from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from mqmk.learner.bench.methods.parts.heads import row_tasks
from mqmk.learner.bench.methods.parts.protocol import Answer, MethodInfo, MethodSettings, Published
from mqmk.learner.bench.methods.parts.trained_pool import TrainedPool
from mqmk.learner.bench.methods.parts.training import iterate
from mqmk.learner.data.tasks import Task
from mqmk.learner.training.class_statistics import ClassMeans
from mqmk.matcher.prompted_vit import FrozenViT

OTHERS: Final = 0.1  # the weight of all other prompts together


class EasePrefix:
    """Our pool; for each task the class means under its own and all earlier prompts."""

    def __init__(self, vit: FrozenViT, settings: MethodSettings, others: float = OTHERS) -> None:
        self._vit, self._settings, self._others = vit, settings, others
        self._trained = TrainedPool(vit, settings)
        self._real: list[Tensor] = []  # of task t: [prompts 0..t, classes, dim]
        self._prototypes = torch.zeros(0)

    @property
    def trained(self) -> int:
        """How many numbers the last task trained."""
        return self._trained.trained

    def learn(self, task: Task) -> None:
        """Train the task's prompt, then its class means under all prompts so far, then complete the old ones."""
        self._trained.learn(task)
        prompts = len(self._trained.pool.tasks)
        means = [ClassMeans(len(task.classes), self._vit.dim, self._vit.device) for _ in range(prompts)]
        with torch.no_grad():
            for images, labels in iterate(self._vit, task.training, self._settings.train.batch):
                for mean, query in zip(means, self._trained.queries(images).by_task(), strict=True):
                    mean.add(query, labels)
        self._real.append(torch.stack([mean.value() for mean in means]))
        self._prototypes = complete(self._real)

    @torch.no_grad()
    def predict(self, images: Float[Tensor, "batch 3 height width"]) -> Answer:
        """The cosine under a class's own prompt, and a little of those under the others."""
        queries = torch.stack(list(self._trained.queries(images).by_task()))  # [prompts, batch, dim]
        cosines = F.normalize(queries, dim=-1) @ F.normalize(self._prototypes, dim=-1).mT
        row_task = row_tasks([real.shape[1] for real in self._real], self._vit.device)
        own = cosines.gather(0, row_task.expand(1, len(images), -1))[0]
        if len(queries) == 1:
            return Answer(own)
        return Answer(own + self._others / (len(queries) - 1) * (cosines.sum(dim=0) - own))

    def kept(self) -> dict[str, Tensor]:
        """Completed prototypes are made anew at every version."""
        real = {f"task{number}/prototypes": real for number, real in enumerate(self._real)}
        return self._trained.kept() | {"prototypes": self._prototypes} | real


def complete(real: list[Tensor]) -> Float[Tensor, "prompts classes dim"]:
    """The prototype of every class under every prompt. `real[t]` has those of task t under prompts 0 to t."""
    by_prompt = []
    for prompt in range(len(real)):
        newer = torch.cat([own[prompt] for own in real[prompt:]])
        completed = []
        for task in range(prompt):
            alike = torch.cat([own[task] for own in real[prompt:]])  # the newer classes under the old class's prompt
            weights = (F.normalize(real[task][task], dim=1) @ F.normalize(alike, dim=1).T).softmax(dim=1)
            completed.append(weights @ newer)
        by_prompt.append(torch.cat([*completed, newer]))
    return torch.stack(by_prompt)


METHODS: Final = (
    MethodInfo(
        "ease-prefix",
        "pool",
        "EASE's prototypes and answer rule with our prompts for its adapters",
        EasePrefix,
        Published("EASE's log, ViT-B/16-IN21K", imagenet_r=76.17),
        ("our e-prompts in place of adapters; means of normalised features",),
        epoch_passes=(1.9, 1.9),
        test_passes=2.0,
        shares_pool=True,
        rounds=1,
    ),
)
