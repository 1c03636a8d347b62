"""CODA-Prompt: the prefix of an image is a weighted sum of components, weighted by attention to its plain query.

a_i(x) = cos(q(x) * A_i, K_i) and P(x) = sum_i a_i p_i over the components of all tasks so far. A task trains only its
own components; there is no choice of a task.
"""

from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from mqmk.learner.bench.methods.parts.heads import LinearHead, kept_heads, score_all
from mqmk.learner.bench.methods.parts.prompts import limit_layers, orthogonal_rows, prefix_per_image, split_rows
from mqmk.learner.bench.methods.parts.protocol import Answer, MethodInfo, MethodSettings, Published
from mqmk.learner.bench.methods.parts.training import Recipe, fit, plain_query, quarter_cosine
from mqmk.learner.data.tasks import Task
from mqmk.matcher.prompted_vit import FrozenViT

COMPONENTS: Final = 10
ROWS: Final = 8


@dataclass(frozen=True, eq=False)
class Components:
    """What one task adds to every block, or what all tasks have."""

    prompts: Float[Tensor, "layers n rows dim"]
    keys: Float[Tensor, "layers n dim"]
    attention: Float[Tensor, "layers n dim"]

    @property
    def tensors(self) -> list[Tensor]:
        """What is trained."""
        return [self.prompts, self.keys, self.attention]

    def weights(self, query: Float[Tensor, "batch dim"]) -> Float[Tensor, "layers batch n"]:
        """cos(q * A_i, K_i) for every block and component."""
        attended = F.normalize(query[:, None] * self.attention[:, None], dim=-1)  # [layers, batch, n, dim]
        return (attended * F.normalize(self.keys, dim=-1)[:, None]).sum(dim=-1)

    def prefix(self, weights: Float[Tensor, "layers batch n"]) -> Float[Tensor, "batch layers 2 half dim"]:
        """The weighted sums."""
        return split_rows(torch.einsum("lbn,lnrd->blrd", weights, self.prompts))


def join_components(parts: list[Components]) -> Components:
    """The components of several tasks side by side."""
    prompts, keys, attention = zip(*(part.tensors for part in parts), strict=True)
    return Components(torch.cat(prompts, dim=1), torch.cat(keys, dim=1), torch.cat(attention, dim=1))


class CODA:
    """Components and a head for each task."""

    def __init__(self, vit: FrozenViT, settings: MethodSettings) -> None:
        self._vit, self._settings = vit, settings
        self.layers = limit_layers(vit, 0, 4)
        self._generator = torch.Generator().manual_seed(settings.train.seed)
        self.components: list[Components] = []
        self._heads: list[LinearHead] = []
        self.trained = 0

    def learn(self, task: Task) -> None:
        """Train new components beside the old ones, which stay as they are."""
        vit, train, old = self._vit, self._settings.train, list(self.components)
        new = self.start_components()
        head = LinearHead.new(vit, len(task.classes), self._generator)

        def loss(images: Tensor, labels: Tensor) -> Tensor:
            query = self._query(images, join_components([*old, new]))
            return F.cross_entropy(head(query), labels)

        recipe = Recipe("adam", 1e-3 * self._settings.rate, quarter_cosine)
        self.trained = fit(vit, task.training, train, recipe, [*new.tensors, *head.tensors], loss)
        self.components.append(new)
        self._heads.append(head)

    @torch.no_grad()
    def predict(self, images: Float[Tensor, "batch 3 height width"]) -> Answer:
        """All seen classes."""
        return Answer(score_all(self._heads, self._query(images, join_components(self.components))))

    def start_components(self) -> Components:
        """Unit rows, orthogonal to those of all earlier tasks while there is room."""
        shapes = {"prompts": (ROWS, self._vit.dim), "keys": (self._vit.dim,), "attention": (self._vit.dim,)}
        found = {}
        for name, shape in shapes.items():
            by_layer = []
            for layer in range(len(self.layers)):
                empty = torch.zeros(0, *shape, device=self._vit.device)
                known = torch.cat([empty, *(getattr(part, name)[layer] for part in self.components)]).flatten(1)
                by_layer.append(orthogonal_rows(known, COMPONENTS, self._generator).unflatten(1, shape))
            found[name] = torch.stack(by_layer)
        return Components(**found)

    def kept(self) -> dict[str, Tensor]:
        """Nothing of a task changes later; answers drift only because new components join the sum."""
        return kept_heads(self._heads) | {
            f"task{number}/{name}": getattr(part, name)
            for number, part in enumerate(self.components)
            for name in ("prompts", "keys", "attention")
        }

    def _query(self, images: Tensor, components: Components) -> Float[Tensor, "batch dim"]:
        weights = components.weights(plain_query(self._vit, images))
        return self._vit.query(self._vit.embed(images), prefix_per_image(self.layers, components.prefix(weights)))


METHODS: Final = (
    MethodInfo(
        "coda-p",
        "prompts",
        "prefix in blocks 0-4 as a sum of components, weighted by attention; 10 new components a task",
        CODA,
        Published(
            "MQMK paper", cifar100=86.25, imagenet_r=75.45, domainnet=80.04, imagenet_r_5=76.51, imagenet_r_20=72.37
        ),
        (
            "10 components a task, because the number of tasks is not known beforehand",
            "new rows are projected onto the complement of all earlier ones; random unit rows once there is none",
            "no orthogonality loss, as in the released scripts",
        ),
        searches_rate=True,
        epoch_passes=(2.4, 2.4),
        test_passes=1.2,
    ),
)
