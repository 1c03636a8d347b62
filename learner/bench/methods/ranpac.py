"""RanPAC: ridge regression on random features, plain or after a first session that adapts the ViT to task 1.

h = relu(phi(x) R) with the un-normalised class token phi and a fixed random R. Every task adds to G = sum h h^T and to
Q = sum h y^T; the head is (G + r I)^-1 Q. Without a first session the order of tasks does not matter.
"""

import math
from collections.abc import Callable
from typing import Final, Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from mqmk.learner.bench.methods.parts.forward import Adapters, final_norm, run_blocks
from mqmk.learner.bench.methods.parts.heads import cosines
from mqmk.learner.bench.methods.parts.prompts import uniform
from mqmk.learner.bench.methods.parts.protocol import Answer, MethodInfo, MethodSettings, Published
from mqmk.learner.bench.methods.parts.remembering import recall
from mqmk.learner.bench.methods.parts.training import Recipe, collect, cosine, fit, plain_query
from mqmk.learner.data.tasks import Task
from mqmk.matcher.prompted_vit import FrozenViT, Prompt
from mqmk.matcher.regression import features

PENALTIES: Final = tuple(10.0**power for power in range(-8, 9))
ROWS: Final = 20  # of a first-session prefix, in every block
BOTTLENECK: Final = 64
SCALE: Final = 16.0


class RanPAC:
    """The statistics of every task, and the regression over all of them."""

    def __init__(
        self, vit: FrozenViT, settings: MethodSettings, first_session: Literal["prefix", "adapter"] | None = None
    ) -> None:
        self._vit, self._settings, self._first_session = vit, settings, first_session
        self._adapted: list[Tensor] = []
        self._mark = object()
        self._gram = torch.zeros(0, 0, dtype=torch.float64)
        self._sums: list[Tensor] = []
        self._errors: list[Tensor] = []
        self._head = torch.zeros(0)
        self.trained = 0

    def learn(self, task: Task) -> None:
        """Add the task's statistics and solve the regression anew; the first task may adapt the ViT before."""
        self.trained = self._adapt(task) if self._first_session and not self._sums else 0
        seen, labels = collect(self._vit, task.training, self._settings.train.batch, self._expand)
        targets = F.one_hot(labels, len(task.classes)).double()
        self._gram = self._gram + seen.T @ seen if self._sums else seen.T @ seen
        self._sums.append(targets.T @ seen)
        self._errors.append(penalty_errors(seen, targets, self._settings.train.seed))
        gram = self._gram.clone()
        gram.diagonal().add_(self.penalty)
        self._head = torch.linalg.solve(gram, torch.cat(self._sums).T)

    @property
    def penalty(self) -> float:
        """The r with the least error summed over all tasks, so that the last one does not decide alone."""
        return PENALTIES[int(torch.stack(self._errors).sum(dim=0).argmin())]

    @torch.no_grad()
    def predict(self, images: Float[Tensor, "batch 3 height width"]) -> Answer:
        """The regression's value for every class."""
        return Answer((self._expand(images) @ self._head).float())

    def kept(self) -> dict[str, Tensor]:
        """The outer products are only needed as their sum over tasks."""
        tensors = {"gram": self._gram} | {f"task{number}/sums": sums for number, sums in enumerate(self._sums)}
        return tensors | {f"task0/adapted{number}": tensor for number, tensor in enumerate(self._adapted)}

    def _expand(self, images: Tensor) -> Float[Tensor, "batch width"]:
        """relu(phi R), in double precision."""
        phi = recall(self._vit, images, [self._mark] * len(images), lambda some: self._phi(images[some]))
        if not self._settings.width:
            return phi.double()
        return (features(phi, self._settings.width) * phi.norm(dim=1, keepdim=True)).double()

    def _phi(self, images: Tensor) -> Float[Tensor, "batch dim"]:
        if not self._adapted:
            return plain_query(self._vit, images)
        if self._first_session == "prefix":
            return self._vit.query(self._vit.embed(images), Prompt(tuple(range(self._vit.depth)), (self._adapted[0],)))
        return final_norm(
            self._vit, run_blocks(self._vit, images, adapters=Adapters(self._adapted[0], self._adapted[1]))[:, 0]
        )

    def _adapt(self, task: Task) -> int:
        """Train prefix or adapters with a cosine head that is thrown away."""
        vit, train = self._vit, self._settings.train
        generator = torch.Generator().manual_seed(train.seed)
        if self._first_session == "prefix":
            self._adapted = [uniform(vit, generator, vit.depth, 2, ROWS, vit.dim, low=-train.spread, high=train.spread)]
            recipe = Recipe("adam", 0.005 * self._settings.rate, cosine, clip=1.0)
        else:
            adapters = Adapters.new(vit, BOTTLENECK, generator)
            self._adapted = [adapters.down, adapters.up]
            recipe = Recipe("sgd", 0.01 * self._settings.rate, cosine, weight_decay=5e-4)
        head = uniform(vit, generator, len(task.classes), vit.dim)

        def loss(images: Tensor, labels: Tensor) -> Tensor:
            return F.cross_entropy(SCALE * cosines(self._phi(images), head), labels)

        return fit(vit, task.training, train, recipe, [*self._adapted, head], loss)


def penalty_errors(
    seen: Float[Tensor, "images width"], targets: Float[Tensor, "images classes"], seed: int
) -> Float[Tensor, " penalties"]:
    """The squared error of every penalty on a random fifth of the task, fitted on the other four.

    Solved among images, X^T (X X^T + r I)^-1 Y, where there are fewer of them than features.
    """
    order = torch.randperm(len(seen), generator=torch.Generator().manual_seed(seed)).to(seen.device)
    held, rest = order[: math.ceil(len(seen) / 5)], order[math.ceil(len(seen) / 5) :]
    if not len(rest):
        rest = held
    fitted = seen[rest]
    if len(rest) < seen.shape[1]:
        values, vectors = torch.linalg.eigh(fitted @ fitted.T)
        turned, wanted = seen[held] @ fitted.T @ vectors, vectors.T @ targets[rest]
    else:
        values, vectors = torch.linalg.eigh(fitted.T @ fitted)
        turned, wanted = seen[held] @ vectors, vectors.T @ (fitted.T @ targets[rest])
    return torch.stack([
        ((turned / (values.clamp(min=0) + penalty)) @ wanted - targets[held]).square().sum() for penalty in PENALTIES
    ])  # fmt: skip


def _with_first_session(kind: Literal["prefix", "adapter"]) -> Callable[[FrozenViT, MethodSettings], RanPAC]:
    return lambda vit, settings: RanPAC(vit, settings, kind)


_WIDTH: Final = "2,000 random features where the reference has 10,000"
_PENALTY: Final = "the penalty is chosen by errors summed over all tasks, not on the newest alone"
_WITH: Final = Published("RanPAC, tables", cifar100=92.2, imagenet_r=77.9)

METHODS: Final = (
    MethodInfo(
        "ranpac",
        "statistics",
        "ridge regression on random features of the plain ViT",
        RanPAC,
        Published("RanPAC, tables", cifar100=89.0, imagenet_r=71.8),
        (_WIDTH, _PENALTY),
        rounds=1,
    ),
    MethodInfo(
        "ranpac-fsa",
        "statistics",
        "the same after a prefix in all blocks was trained on task 1",
        _with_first_session("prefix"),
        _WITH,
        (_WIDTH, _PENALTY, "a prefix of 20 rows by Adam in the first session, not adapters by SGD"),
        searches_rate=True,
        epoch_passes=(2.1, 0.0),
        rounds=1,
    ),
    MethodInfo(
        "ranpac-fsa-adapter",
        "statistics",
        "the same with adapters in all blocks, as published for CIFAR-100",
        _with_first_session("adapter"),
        _WITH,
        (_WIDTH, _PENALTY),
        searches_rate=True,
        epoch_passes=(2.4, 0.0),
        rounds=1,
    ),
)
