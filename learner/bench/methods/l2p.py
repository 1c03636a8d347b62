"""L2P: a pool of prompts shared by all tasks; each image takes those whose keys are nearest to its plain query.

The chosen prompts enter as tokens before the first block, and the feature is the mean of their outputs. Later tasks
overwrite prompts and keys, so old answers drift.
"""

from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from mqmk.learner.bench.methods.parts.forward import final_norm, run_blocks
from mqmk.learner.bench.methods.parts.heads import LinearHead, kept_heads, score_all
from mqmk.learner.bench.methods.parts.prompts import Choice, choose, match_by_owner, uniform
from mqmk.learner.bench.methods.parts.protocol import Answer, MethodInfo, MethodSettings, Published
from mqmk.learner.bench.methods.parts.training import Recipe, fit, plain_query
from mqmk.learner.data.tasks import Task
from mqmk.matcher.prompted_vit import FrozenViT

PULL: Final = 0.1


class L2P:
    """Prompts, keys, and a head for each task."""

    def __init__(
        self, vit: FrozenViT, settings: MethodSettings, prompts: int = 10, length: int = 5, chosen: int = 5
    ) -> None:
        self._vit, self._settings, self._chosen = vit, settings, chosen
        self._generator, spread = torch.Generator().manual_seed(settings.train.seed), settings.train.spread
        self.prompts = uniform(vit, self._generator, prompts, length, vit.dim, low=-spread, high=spread)
        self.keys = uniform(vit, self._generator, prompts, vit.dim)
        self._heads: list[LinearHead] = []
        self._usage: list[Tensor] = []
        self.trained = 0

    def learn(self, task: Task) -> None:
        """Train prompts, keys and the task's head together."""
        vit, train = self._vit, self._settings.train
        head = LinearHead.new(vit, len(task.classes), self._generator)
        usage = torch.zeros(len(self.keys), device=vit.device)

        def loss(images: Tensor, labels: Tensor) -> Tensor:
            choice = choose(plain_query(vit, images), self.keys, self._chosen)
            usage.add_(torch.bincount(choice.index.flatten(), minlength=len(usage)))
            return F.cross_entropy(head(self.feature(images, choice)), labels) - PULL * choice.cosines.sum(dim=1).mean()

        recipe = Recipe("adam", 0.03 * train.batch / 256 * self._settings.rate, clip=1.0)
        self.trained = fit(vit, task.training, train, recipe, [self.prompts, self.keys, *head.tensors], loss)
        self._heads.append(head)
        self._usage.append(usage)

    @torch.no_grad()
    def predict(self, images: Float[Tensor, "batch 3 height width"]) -> Answer:
        """All seen classes; the matched task is the owner of the chosen prompts."""
        choice = choose(plain_query(self._vit, images), self.keys, self._chosen)
        nothing = torch.zeros(len(images), len(self._heads), device=self._vit.device)
        owners = match_by_owner(choice, torch.stack(self._usage), nothing)
        return Answer(score_all(self._heads, self.feature(images, choice)), owners.argmax(dim=1))

    def feature(self, images: Tensor, choice: Choice) -> Float[Tensor, "batch dim"]:
        """The mean of the prompts' own tokens after the final norm."""
        inserted = self.prompts[choice.index].flatten(1, 2)  # [batch, chosen, length, dim] -> [batch, new, dim]
        hidden = run_blocks(self._vit, images, {0: inserted})
        return final_norm(self._vit, hidden[:, -inserted.shape[1] :]).mean(dim=1)

    def kept(self) -> dict[str, Tensor]:
        """Prompts and keys change with every task."""
        usage = {f"task{number}/usage": used for number, used in enumerate(self._usage)}
        return {"prompts": self.prompts, "keys": self.keys, **usage, **kept_heads(self._heads)}


METHODS: Final = (
    MethodInfo(
        "l2p",
        "prompts",
        "10 shared prompts as tokens, 5 chosen for each image by its plain query",
        L2P,
        Published(
            "l2p-pytorch, CAPrompt READMEs; matching: MQMK paper",
            cifar100=83.83,
            imagenet_r=63.22,
            domainnet=81.17,
            matching_cifar100=48.73,
            matching_imagenet_r=42.82,
            matching_domainnet=72.31,
        ),
        (
            "prompts are chosen for each image, never by the vote of a batch",
            "prompts begin in the spread of all methods, where the reference has +-1",
            "the method defines no task; matched is the owner of the chosen prompts, by their use in training",
        ),
        searches_rate=True,
        epoch_passes=(3.5, 3.5),
        test_passes=1.5,
    ),
)
