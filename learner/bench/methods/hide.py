"""HiDe-Prompt: task identity by a small network on plain features, prompts within tasks, a head aligned across them.

Old classes are remembered as Gaussians: of plain features for the identity, of prompted ones for the head.
"""

from typing import Final

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from mqmk.learner.bench.methods.parts.gaussians import TaskGaussians, replay
from mqmk.learner.bench.methods.parts.heads import LinearHead, row_tasks, score_all
from mqmk.learner.bench.methods.parts.prompts import limit_layers, prefix_per_image, uniform
from mqmk.learner.bench.methods.parts.protocol import Answer, MethodInfo, MethodSettings, Published
from mqmk.learner.bench.methods.parts.remembering import recall
from mqmk.learner.bench.methods.parts.training import Recipe, collect, fit, fit_features, plain_query
from mqmk.learner.data.tasks import Task
from mqmk.matcher.prompted_vit import FrozenViT, Prompt

LENGTH: Final = 20
MOMENTUM: Final = 0.01  # the share of older prompts in the one that is used
SPREAD_WEIGHT, SPREAD_TEMPERATURE = 0.1, 0.8
IDENTITY_EPOCHS: Final = 20
IDENTITY_BATCH: Final = 24
ALIGN_RATE: Final = 0.005


class TaskIdentity:
    """Plain feature -> MLP with residual and norm -> head over all seen classes."""

    def __init__(self, vit: FrozenViT, generator: torch.Generator) -> None:
        dim, bound = vit.dim, vit.dim**-0.5
        self.widen = uniform(vit, generator, 2 * dim, dim, low=-bound, high=bound)
        self.narrow = uniform(vit, generator, dim, 2 * dim, low=-(bound / 2), high=bound / 2)
        self.widen_bias, self.narrow_bias = torch.zeros(2 * dim, device=vit.device), torch.zeros(dim, device=vit.device)
        self.norm_weight, self.norm_bias = torch.ones(dim, device=vit.device), torch.zeros(dim, device=vit.device)
        self.heads: list[LinearHead] = []

    @property
    def tensors(self) -> list[Tensor]:
        """Of the network without heads."""
        return [self.widen, self.widen_bias, self.narrow, self.narrow_bias, self.norm_weight, self.norm_bias]

    def features(self, plain: Float[Tensor, "batch dim"]) -> Float[Tensor, "batch dim"]:
        """What the heads see."""
        hidden = F.linear(F.gelu(F.linear(plain, self.widen, self.widen_bias)), self.narrow, self.narrow_bias)
        return F.layer_norm(plain + hidden, plain.shape[1:], self.norm_weight, self.norm_bias)

    def scores(self, plain: Float[Tensor, "batch dim"]) -> Float[Tensor, "batch classes"]:
        """Over all seen classes."""
        return score_all(self.heads, self.features(plain))


class HiDe:
    """Identity network, prompts, aligned heads, and two Gaussians for each class."""

    def __init__(self, vit: FrozenViT, settings: MethodSettings) -> None:
        self._vit, self._settings = vit, settings
        self._generator = torch.Generator().manual_seed(settings.train.seed)
        self._layers, self._mark = limit_layers(vit, 0, 4), object()
        self._identity = TaskIdentity(vit, self._generator)
        self._prompts: list[Tensor] = []
        self._heads: list[LinearHead] = []
        self._plain: list[TaskGaussians] = []
        self._prompted: list[TaskGaussians] = []
        self.trained = 0

    def learn(self, task: Task) -> None:
        """Identity, then the task's prompt, then the head over all tasks."""
        self.trained = self._learn_identity(task) + self._learn_prompt(task)
        if len(self._heads) > 1:
            trained = [tensor for head in self._heads for tensor in head.tensors]
            replay(self._prompted, self._settings, trained, lambda x: score_all(self._heads, x), ALIGN_RATE)

    def predict(self, images: Float[Tensor, "batch 3 height width"]) -> Answer:
        """All seen classes, with the prompt of the task that the identity network names."""
        best = self._identity.scores(plain_query(self._vit, images)).argmax(dim=1)
        return self.predict_as(images, row_tasks([len(head.bias) for head in self._heads], self._vit.device)[best])

    @torch.no_grad()
    def predict_as(self, images: Float[Tensor, "batch 3 height width"], task: Int[Tensor, " batch"]) -> Answer:
        """The same with given tasks."""
        kinds = [(self._mark, number) for number in task.tolist()]
        feature = recall(self._vit, images, kinds, lambda some: self._query(images[some], task[some]))
        return Answer(score_all(self._heads, feature), task)

    def kept(self) -> dict[str, Tensor]:
        """Identity and heads change with every task; prompts and statistics do not."""
        heads = [*self._heads, *self._identity.heads]
        trained = [*self._identity.tensors, *(tensor for head in heads for tensor in head.tensors)]
        tensors = {f"network{number}": tensor for number, tensor in enumerate(trained)}
        for number, prompt in enumerate(self._prompts):
            tensors[f"task{number}/prompt"] = prompt
            tensors |= {f"{name}/plain": value for name, value in self._plain[number].kept(number).items()}
            tensors |= {f"{name}/prompted": value for name, value in self._prompted[number].kept(number).items()}
        return tensors

    def _query(self, images: Tensor, task: Int[Tensor, " batch"]) -> Float[Tensor, "batch dim"]:
        """With the prompts of these tasks, which stay as they are."""
        prompt = prefix_per_image(self._layers, torch.stack(self._prompts)[task])
        return self._vit.query(self._vit.embed(images), prompt)

    def _learn_identity(self, task: Task) -> int:
        vit, network = self._vit, self._identity
        plain, labels = collect(vit, task.training, self._settings.train.batch, lambda x: plain_query(vit, x))
        head = LinearHead.new(vit, len(task.classes), self._generator)
        trained = fit_features(
            plain,
            labels,
            Recipe("adam", 5e-4 * IDENTITY_BATCH / 256 * self._settings.rate),
            [*network.tensors, *head.tensors],
            lambda features, wanted: F.cross_entropy(head(network.features(features)), wanted),
            epochs=IDENTITY_EPOCHS,
            batch=IDENTITY_BATCH,
            seed=self._settings.train.seed,
        )
        network.heads.append(head)
        self._plain.append(TaskGaussians.fit(task.classes, plain, labels))
        if len(self._plain) > 1:
            everything = [*network.tensors, *(tensor for each in network.heads for tensor in each.tensors)]
            replay(self._plain, self._settings, everything, network.scores, ALIGN_RATE)
        return trained

    def _learn_prompt(self, task: Task) -> int:
        vit, train, spread = self._vit, self._settings.train, self._settings.train.spread
        if self._prompts:
            prompt, older = self._prompts[-1].clone(), torch.stack(self._prompts).mean(dim=0)
        else:
            prompt = uniform(vit, self._generator, len(self._layers), 2, LENGTH, vit.dim, low=-spread, high=spread)
            older = None
        head = LinearHead.new(vit, len(task.classes), self._generator)
        centroids = torch.cat([torch.zeros(0, vit.dim, device=vit.device), *(known.means for known in self._prompted)])

        def used() -> Tensor:
            return prompt if older is None else (1 - MOMENTUM) * prompt + MOMENTUM * older

        def query(images: Tensor) -> Tensor:
            return vit.query(vit.embed(images), Prompt(self._layers, (used(),)))

        def loss(images: Tensor, labels: Tensor) -> Tensor:
            features = query(images)
            return F.cross_entropy(head(features), labels) + SPREAD_WEIGHT * spread_loss(centroids, features)

        recipe = Recipe("adam", 0.03 * 24 / 256 * self._settings.rate)
        trained = fit(vit, task.training, train, recipe, [prompt], loss, slow=head.tensors)
        prompted, labels = collect(vit, task.training, train.batch, query)
        self._prompts.append(used())
        self._prompted.append(TaskGaussians.fit(task.classes, prompted, labels))
        self._heads.append(head)
        return trained


def spread_loss(centroids: Float[Tensor, "old dim"], features: Float[Tensor, "batch dim"]) -> Float[Tensor, ""]:
    """Pushes old centroids and the batch's features apart: each must be most like itself."""
    rows = torch.cat([centroids, features])
    return F.cross_entropy(rows @ rows.T / SPREAD_TEMPERATURE, torch.arange(len(rows), device=rows.device))


METHODS: Final = (
    MethodInfo(
        "hide-prompt",
        "prompts",
        "a network on plain features names the task; its prefix in blocks 0-4; a head aligned on Gaussians",
        HiDe,
        Published("re-run in CAPrompt's README", cifar100=92.64, imagenet_r=75.66, matching_imagenet_r=57.76),
        (
            "a covariance for each class, shrunk to the task's, where the reference has 10 centroids",
            "a constant rate within a task, and prompts that begin in the spread of all methods",
            "64 samples a class and 10 epochs of alignment; the identity network trains on plain features as they are",
        ),
        searches_rate=True,
        epoch_passes=(2.2, 2.2),
        test_passes=0.4,
    ),
)
