"""L2P++ and Deep L2P++, the baselines of CODA-Prompt: L2P with prefix prompts, in block 0 or in the first five.

Every block has its own pool, keys and choice; the query is the same plain one.
"""

from collections.abc import Callable
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from mqmk.learner.bench.methods.parts.heads import LinearHead, kept_heads, score_all
from mqmk.learner.bench.methods.parts.prompts import (
    Choice,
    choose,
    limit_layers,
    match_by_owner,
    prefix_per_image,
    split_rows,
    uniform,
)
from mqmk.learner.bench.methods.parts.protocol import Answer, MethodInfo, MethodSettings, Published
from mqmk.learner.bench.methods.parts.training import Recipe, fit, plain_query, quarter_cosine
from mqmk.learner.data.tasks import Task
from mqmk.matcher.prompted_vit import FrozenViT


class L2PPlus:
    """For each of its blocks a pool of prompts with keys, shared by all tasks."""

    def __init__(
        self,
        vit: FrozenViT,
        settings: MethodSettings,
        last_layer: int = 0,
        prompts: int = 30,
        rows: int = 10,
        chosen: int = 5,
    ) -> None:
        self._vit, self._settings, self._chosen = vit, settings, chosen
        self.layers = limit_layers(vit, 0, last_layer)
        self._generator, spread = torch.Generator().manual_seed(settings.train.seed), settings.train.spread
        self.prompts = uniform(vit, self._generator, len(self.layers), prompts, rows, vit.dim, low=0.0, high=spread)
        self.keys = uniform(vit, self._generator, len(self.layers), prompts, vit.dim, low=0.0)
        self._heads: list[LinearHead] = []
        self._usage: list[Tensor] = []
        self.trained = 0

    def learn(self, task: Task) -> None:
        """Train all pools, keys and the task's head together."""
        vit, train = self._vit, self._settings.train
        head = LinearHead.new(vit, len(task.classes), self._generator)
        usage = torch.zeros(self.keys.shape[:2], device=vit.device)

        def loss(images: Tensor, labels: Tensor) -> Tensor:
            choices = self.choose(plain_query(vit, images))
            for used, choice in zip(usage, choices, strict=True):
                used.add_(torch.bincount(choice.index.flatten(), minlength=len(used)))
            return F.cross_entropy(head(self.feature(images, choices)), labels) + pull_loss(choices)

        recipe = Recipe("adam", 1e-3 * self._settings.rate, quarter_cosine)
        self.trained = fit(vit, task.training, train, recipe, [self.prompts, self.keys, *head.tensors], loss)
        self._heads.append(head)
        self._usage.append(usage)

    @torch.no_grad()
    def predict(self, images: Float[Tensor, "batch 3 height width"]) -> Answer:
        """All seen classes; the matched task is the owner of the chosen prompts, summed over blocks."""
        choices = self.choose(plain_query(self._vit, images))
        owners = torch.zeros(len(images), len(self._heads), device=self._vit.device)
        for choice, usage in zip(choices, torch.stack(self._usage, dim=1), strict=True):
            owners = match_by_owner(choice, usage, owners)
        return Answer(score_all(self._heads, self.feature(images, choices)), owners.argmax(dim=1))

    def choose(self, query: Float[Tensor, "batch dim"]) -> list[Choice]:
        """The best prompts of every block."""
        return [choose(query, keys, self._chosen) for keys in self.keys]

    def feature(self, images: Tensor, choices: list[Choice]) -> Float[Tensor, "batch dim"]:
        """The class token; of each chosen prompt the first half of the rows are keys, the other half values."""
        by_layer = [
            split_rows(pool)[choice.index].transpose(1, 2).flatten(2, 3)  # [batch, chosen, 2, half, dim] -> one prefix
            for pool, choice in zip(self.prompts, choices, strict=True)
        ]
        prompt = prefix_per_image(self.layers, torch.stack(by_layer, dim=1))
        return self._vit.query(self._vit.embed(images), prompt)

    def kept(self) -> dict[str, Tensor]:
        """Prompts and keys change with every task."""
        usage = {f"task{number}/usage": used for number, used in enumerate(self._usage)}
        return {"prompts": self.prompts, "keys": self.keys, **usage, **kept_heads(self._heads)}


def pull_loss(choices: list[Choice]) -> Float[Tensor, ""]:
    """1 - cosine of every image with its own chosen keys, summed over keys and blocks, mean over images."""
    return torch.stack([(1 - choice.cosines).sum(dim=1) for choice in choices]).sum(dim=0).mean()


def _until(last_layer: int) -> Callable[[FrozenViT, MethodSettings], L2PPlus]:
    return lambda vit, settings: L2PPlus(vit, settings, last_layer)


_DEVIATIONS: Final = (
    "prompts of 5 + 5 rows where the reference has 10 + 10",
    "prompts begin in the spread of all methods, where the reference has 0..1",
    "an image is pulled to its own keys only; the reference's indexing also pulls it to those of its batch",
    "the method defines no task; matched is the owner of the chosen prompts, by their use in training",
)

METHODS: Final = (
    MethodInfo(
        "l2p++",
        "prompts",
        "30 shared prefix prompts in block 0, 5 chosen for each image",
        _until(0),
        Published("MQMK paper, from CODA", cifar100=82.50, imagenet_r=69.29, imagenet_r_5=70.83, imagenet_r_20=65.89),
        _DEVIATIONS,
        searches_rate=True,
        epoch_passes=(2.2, 2.2),
        test_passes=1.1,
    ),
    MethodInfo(
        "deep-l2p++",
        "prompts",
        "the same in each of the blocks 0 to 4",
        _until(4),
        Published("MQMK paper, from CODA", cifar100=84.30, imagenet_r=71.66, imagenet_r_5=73.93, imagenet_r_20=68.42),
        _DEVIATIONS,
        searches_rate=True,
        epoch_passes=(2.4, 2.4),
        test_passes=1.2,
    ),
)
