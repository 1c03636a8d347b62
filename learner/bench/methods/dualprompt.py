"""DualPrompt with its original settings: a short g-prompt for all tasks and an e-prompt with one key for each.

The g-prompt trains on every task, so old features drift. At test the task with the nearest key is matched.
"""

from typing import Final

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from mqmk.learner.bench.methods.parts.heads import LinearHead, cosines, kept_heads, score_all
from mqmk.learner.bench.methods.parts.prompts import limit_layers, prefix_per_image, uniform
from mqmk.learner.bench.methods.parts.protocol import Answer, MethodInfo, MethodSettings, Published
from mqmk.learner.bench.methods.parts.training import Recipe, collect, fit, plain_query
from mqmk.learner.data.tasks import Task
from mqmk.matcher.prompted_vit import FrozenViT, Prompt

G_LENGTH: Final = 5
E_LENGTH: Final = 5


class DualPrompt:
    """A g-prompt; for each task an e-prompt, a key and a head."""

    def __init__(self, vit: FrozenViT, settings: MethodSettings) -> None:
        self._vit, self._settings = vit, settings
        self._generator = torch.Generator().manual_seed(settings.train.seed)
        self._g_layers, self._e_layers = limit_layers(vit, 0, 1), limit_layers(vit, 2, 4)
        self._g_prompt = self._new_prompt(len(self._g_layers), G_LENGTH)
        self.e_prompts: list[Tensor] = []
        self._keys: list[Tensor] = []
        self._heads: list[LinearHead] = []
        self.trained = 0

    def learn(self, task: Task) -> None:
        """Train both prompts and the head in one pass: the task is known. The key follows in closed form."""
        vit, train = self._vit, self._settings.train
        e_prompt = self.e_prompts[-1].clone() if self.e_prompts else self._new_prompt(len(self._e_layers), E_LENGTH)
        head = LinearHead.new(vit, len(task.classes), self._generator)

        def loss(images: Tensor, labels: Tensor) -> Tensor:
            return F.cross_entropy(head(self._query(images, Prompt(self._e_layers, (e_prompt,)))), labels)

        recipe = Recipe("adam", 0.03 * train.batch / 256 * self._settings.rate, clip=1.0)
        self.trained = fit(vit, task.training, train, recipe, [self._g_prompt, e_prompt, *head.tensors], loss)
        self.trained += vit.dim
        query, _ = collect(vit, task.training, train.batch, lambda images: plain_query(vit, images))
        self.e_prompts.append(e_prompt)
        self._keys.append(F.normalize(query, dim=1).mean(dim=0))
        self._heads.append(head)

    def predict(self, images: Float[Tensor, "batch 3 height width"]) -> Answer:
        """All seen classes, with the e-prompt of the matched task."""
        return self.predict_as(images, cosines(plain_query(self._vit, images), torch.stack(self._keys)).argmax(dim=1))

    @torch.no_grad()
    def predict_as(self, images: Float[Tensor, "batch 3 height width"], task: Int[Tensor, " batch"]) -> Answer:
        """The same with given tasks."""
        prompt = prefix_per_image(self._e_layers, torch.stack(self.e_prompts)[task])
        return Answer(score_all(self._heads, self._query(images, prompt)), task)

    def kept(self) -> dict[str, Tensor]:
        """The g-prompt changes with every task."""
        tensors = {"g_prompt": self._g_prompt, **kept_heads(self._heads)}
        tensors |= {f"task{number}/e_prompt": prompt for number, prompt in enumerate(self.e_prompts)}
        return tensors | {f"task{number}/key": key for number, key in enumerate(self._keys)}

    def _query(self, images: Tensor, e_prompt: Prompt) -> Float[Tensor, "batch dim"]:
        return self._vit.query(self._vit.embed(images), Prompt(self._g_layers, (self._g_prompt,)), e_prompt)

    def _new_prompt(self, layers: int, length: int) -> Tensor:
        spread = self._settings.train.spread
        return uniform(self._vit, self._generator, layers, 2, length, self._vit.dim, low=-spread, high=spread)


METHODS: Final = (
    MethodInfo(
        "dualprompt",
        "prompts",
        "g-prompt in blocks 0-1 and an e-prompt for each task in blocks 2-4, matched by one key a task",
        DualPrompt,
        Published(
            "DualPrompt paper, README; DomainNet: CPrompt's run; 5 and 20 tasks: CODA's run",
            cifar100=86.51,
            imagenet_r=68.13,
            domainnet=81.70,
            imagenet_r_5=73.05,
            imagenet_r_20=67.87,
        ),
        (
            "keys in closed form, the minimiser of the reference's pull loss on images as they are",
            "prompts begin in the spread of all methods, where the reference has +-1; 5 rows, as for CIFAR-100",
            "only keys of learned tasks compete, and each image gets its own prompt",
        ),
        searches_rate=True,
        epoch_passes=(2.1, 2.1),
        test_passes=1.1,
    ),
)
