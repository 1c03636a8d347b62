"""MQMK and DualPrompt with the batch bug of their published codes, to show what it is worth. For comparison only.

Prompts of a batch, `[layers, 2, batch, ...]`, are reshaped to `[layers, batch, 2, ...]` where a permutation is needed.
An image is then computed with its batch-mates' prompts, and key rows serve as value rows. Tested with batches of one
task, as those codes do, the batch-mates hand over the true task's prompt.
"""

from collections.abc import Callable
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from mqmk.learner.bench.methods.parts.heads import cosines
from mqmk.learner.bench.methods.parts.prompts import limit_layers, prefix_per_image, uniform
from mqmk.learner.bench.methods.parts.protocol import Answer, MethodInfo, MethodSettings
from mqmk.learner.bench.methods.parts.training import Recipe, collect, cosine, fit, iterate, plain_query
from mqmk.learner.data.tasks import Task
from mqmk.learner.settings import default_e_layers
from mqmk.learner.training.class_statistics import ClassMeans
from mqmk.matcher.prompted_vit import FrozenViT, Prompt

SCALE: Final = 16.0


class LeakyPool:
    """A g-prompt of task 1; for each task an e-prompt, head, class keys and one plain key."""

    def __init__(self, vit: FrozenViT, settings: MethodSettings, matcher: str, last_layer: int, length: int) -> None:
        self._vit, self._settings, self._matcher = vit, settings, matcher
        self._generator = torch.Generator().manual_seed(settings.train.seed)
        self._e_layers = limit_layers(vit, 2, last_layer)
        self._g_prompt = self._new_prompt(2, settings.train.g_length)
        self._length = length
        self._e_prompts: list[Tensor] = []
        self._heads: list[Tensor] = []
        self._class_keys: list[Tensor] = []
        self._plain_keys: list[Tensor] = []
        self.trained = 0

    def learn(self, task: Task) -> None:
        """As published: the bug is in training, too, where all images of a batch have the same prompt."""
        vit, train, is_first = self._vit, self._settings.train, not self._e_prompts
        new = self._new_prompt(len(self._e_layers), self._length)
        e_prompt = new if is_first else self._e_prompts[0].clone()
        head = uniform(vit, self._generator, len(task.classes), vit.dim)

        def query(images: Tensor) -> Tensor:
            return self._query(images, e_prompt.expand(len(images), *e_prompt.shape))

        def loss(images: Tensor, labels: Tensor) -> Tensor:
            return F.cross_entropy(SCALE * cosines(query(images), head), labels)

        trained = [e_prompt, head, *([self._g_prompt] if is_first else [])]
        recipe = Recipe("adam", train.learning_rate, cosine, clip=train.clip)
        self.trained = fit(vit, task.training, train, recipe, trained, loss)
        keys = ClassMeans(len(task.classes), vit.dim, vit.device)
        with torch.no_grad():
            for images, labels in iterate(vit, task.training, train.batch):
                keys.add(query(images), labels)
        plain, _ = collect(vit, task.training, train.batch, lambda images: plain_query(vit, images))
        self._e_prompts.append(e_prompt)
        self._heads.append(head)
        self._class_keys.append(keys.value())
        self._plain_keys.append(F.normalize(plain, dim=1).mean(dim=0))

    @torch.no_grad()
    def predict(self, images: Float[Tensor, "batch 3 height width"]) -> Answer:
        """All seen classes, on a query that its batch-mates have changed."""
        prompts = torch.stack(self._e_prompts)
        if self._matcher == "sqsk":
            scores = cosines(plain_query(self._vit, images), torch.stack(self._plain_keys))
        else:
            whole = [self._query(images, prompt.expand(len(images), *prompt.shape)) for prompt in prompts]
            best = [cosines(query, keys).amax(dim=1) for query, keys in zip(whole, self._class_keys, strict=True)]
            scores = torch.stack(best, dim=1)
        task = scores.argmax(dim=1)
        return Answer(SCALE * cosines(self._query(images, prompts[task]), torch.cat(self._heads)), task)

    def kept(self) -> dict[str, Tensor]:
        """Prompts, keys and heads."""
        tensors = {"g_prompt": self._g_prompt}
        for number, parts in enumerate(
            zip(self._e_prompts, self._heads, self._class_keys, self._plain_keys, strict=True)
        ):
            tensors |= {f"task{number}/{place}": part for place, part in enumerate(parts)}
        return tensors

    def _query(self, images: Tensor, rows: Float[Tensor, "batch layers 2 length dim"]) -> Float[Tensor, "batch dim"]:
        g_layers = limit_layers(self._vit, 0, 1)
        prompt = prefix_per_image(self._e_layers, mix_up(rows))
        return self._vit.query(self._vit.embed(images), Prompt(g_layers, (self._g_prompt,)), prompt)

    def _new_prompt(self, layers: int, length: int) -> Tensor:
        spread = self._settings.train.spread
        return uniform(self._vit, self._generator, layers, 2, length, self._vit.dim, low=-spread, high=spread)


def mix_up(rows: Float[Tensor, "batch layers 2 length dim"]) -> Float[Tensor, "batch layers 2 length dim"]:
    """The bug: a reshape of [layers, 2, batch, ...] to [layers, batch, 2, ...]."""
    published = rows.permute(1, 2, 0, 3, 4)  # [layers, 2, batch, length, dim]
    layers, pair, batch, length, dim = published.shape
    return published.reshape(layers, batch, pair, length, dim).transpose(0, 1)


def _mqmk(vit: FrozenViT, settings: MethodSettings) -> LeakyPool:
    layers = settings.train.e_layers or default_e_layers(vit.depth)
    return LeakyPool(vit, settings, "mqmk", layers[-1], settings.train.e_length)


def _dualprompt(vit: FrozenViT, settings: MethodSettings) -> LeakyPool:
    return LeakyPool(vit, settings, "sqsk", 4, 5)


def _info(name: str, create: Callable[[FrozenViT, MethodSettings], LeakyPool]) -> MethodInfo:
    what = f"NOT A RESULT: {name} with the published batch bug, tested with batches of one task"
    passes = 9.0 if name == "mqmk" else 2.0
    return MethodInfo(f"{name}-leaky", "pool", what, create, epoch_passes=(2.2, 2.2), test_passes=passes, is_leaky=True)


METHODS: Final = (_info("mqmk", _mqmk), _info("dualprompt", _dualprompt))
