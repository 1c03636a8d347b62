"""EvoPrompt, a light version: prompts are a function of the plain query, and memories of tasks are fused into one.

In every block a bottleneck turns the query into 5 tokens. After each task the trained (working) memory is fused into
the reference memory, hidden nodes aligned first.
"""

from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from mqmk.learner.bench.methods.parts.forward import final_norm, run_blocks
from mqmk.learner.bench.methods.parts.heads import LinearHead, kept_heads, score_all
from mqmk.learner.bench.methods.parts.prompts import uniform
from mqmk.learner.bench.methods.parts.protocol import Answer, MethodInfo, MethodSettings, Published
from mqmk.learner.bench.methods.parts.remembering import early_query
from mqmk.learner.bench.methods.parts.training import Recipe, fit, iterate
from mqmk.learner.data.tasks import Task
from mqmk.matcher.prompted_vit import FrozenViT

HIDDEN: Final = 16
TOKENS: Final = 5
PART: Final = 4  # dimensions of a head row that are mixed together
SHARPNESS: Final = 0.05


@dataclass(frozen=True, eq=False)
class Memory:
    """A bottleneck for each block, without bias."""

    down: Float[Tensor, "layers hidden dim"]
    up: Float[Tensor, "layers out hidden"]

    def clone(self) -> "Memory":
        """A copy to train."""
        return Memory(self.down.clone(), self.up.clone())

    def run(
        self, query: Float[Tensor, "batch dim"]
    ) -> tuple[Float[Tensor, "layers batch hidden"], Float[Tensor, "layers batch out"]]:
        """Activations of the hidden nodes, and the outputs."""
        hidden = F.relu(query @ self.down.mT)
        return hidden, hidden @ self.up.mT

    def tokens(self, query: Float[Tensor, "batch dim"]) -> dict[int, Tensor]:
        """What is inserted before every block."""
        _, out = self.run(query)
        return dict(enumerate(out.unflatten(2, (TOKENS, -1))))


@dataclass(frozen=True, eq=False)
class Attribution:
    """How much every node was used by images that were classified correctly, from 0 to 1 within its layer."""

    hidden: Float[Tensor, "layers hidden"]
    out: Float[Tensor, "layers out"]


class EvoPrompt:
    """The reference memory, its attributions, and for each task plain class means and a head."""

    def __init__(self, vit: FrozenViT, settings: MethodSettings) -> None:
        self._vit, self._settings = vit, settings
        self._generator = torch.Generator().manual_seed(settings.train.seed)
        bound = vit.dim**-0.5
        self._memory = Memory(
            uniform(vit, self._generator, vit.depth, HIDDEN, vit.dim, low=-bound, high=bound),
            uniform(vit, self._generator, vit.depth, TOKENS * vit.dim, HIDDEN, low=-0.25, high=0.25),
        )
        self._attribution: Attribution | None = None
        self._means: list[Tensor] = []
        self._heads: list[LinearHead] = []
        self.trained = 0

    def learn(self, task: Task) -> None:
        """Train a copy of the memory with the task's head, then fuse it into the reference."""
        vit, train, work = self._vit, self._settings.train, self._memory.clone()
        means = self._plain_means(task)
        head = LinearHead.new(vit, len(task.classes), self._generator)
        if self._heads:
            known = torch.cat(self._means), torch.cat([old.weight for old in self._heads])
            head.weight.copy_(mix_head_rows(means, *known))

        def loss(images: Tensor, labels: Tensor) -> Tensor:
            return F.cross_entropy(head(self._feature(images, early_query(self._vit, images), work)), labels)

        recipe = Recipe("adam", 0.005 * self._settings.rate, clip=1.0)
        self.trained = fit(vit, task.training, train, recipe, [work.down, work.up, *head.tensors], loss)
        found = self._attribute(task, work, head)
        if self._attribution is None:
            self._memory, self._attribution = work, found
        else:
            self._memory, self._attribution = fuse(work, self._memory, found, self._attribution)
        self._means.append(means)
        self._heads.append(head)

    @torch.no_grad()
    def predict(self, images: Float[Tensor, "batch 3 height width"]) -> Answer:
        """All seen classes."""
        return Answer(score_all(self._heads, self._feature(images, early_query(self._vit, images), self._memory)))

    def kept(self) -> dict[str, Tensor]:
        """The memory changes with every task."""
        tensors = {"down": self._memory.down, "up": self._memory.up, **kept_heads(self._heads)}
        if self._attribution:
            tensors |= {"hidden_attribution": self._attribution.hidden, "out_attribution": self._attribution.out}
        return tensors | {f"task{number}/plain_means": means for number, means in enumerate(self._means)}

    def _feature(self, images: Tensor, query: Tensor, memory: Memory) -> Float[Tensor, "batch dim"]:
        return final_norm(self._vit, run_blocks(self._vit, images, memory.tokens(query))[:, 0])

    def _plain_means(self, task: Task) -> Float[Tensor, "classes dim"]:
        total = torch.zeros(len(task.classes), self._vit.dim, device=self._vit.device)
        count = torch.zeros(len(task.classes), 1, device=self._vit.device)
        for images, labels in iterate(self._vit, task.training, self._settings.train.batch):
            total.index_add_(0, labels, final_norm(self._vit, early_query(self._vit, images)))
            count.index_add_(0, labels, torch.ones(len(labels), 1, device=self._vit.device))
        return total / count.clamp(min=1)

    @torch.no_grad()
    def _attribute(self, task: Task, memory: Memory, head: LinearHead) -> Attribution:
        hidden = torch.zeros(self._vit.depth, HIDDEN, device=self._vit.device)
        out = torch.zeros(self._vit.depth, TOKENS * self._vit.dim, device=self._vit.device)
        for images, labels in iterate(self._vit, task.training, self._settings.train.batch):
            query = early_query(self._vit, images)
            correct = head(self._feature(images, query, memory)).argmax(dim=1) == labels
            now, produced = memory.run(query[correct])
            hidden += now.sum(dim=1)
            out += F.relu(produced).sum(dim=1)
        return Attribution(_scale(hidden), _scale(out))


def _scale(values: Float[Tensor, "layers nodes"]) -> Float[Tensor, "layers nodes"]:
    """To 0..1 within each layer."""
    low, high = values.amin(dim=1, keepdim=True), values.amax(dim=1, keepdim=True)
    return (values - low) / (high - low).clamp(min=1e-12)


def fuse(work: Memory, reference: Memory, now: Attribution, before: Attribution) -> tuple[Memory, Attribution]:
    """R + a (W' - R) with W's hidden nodes in R's order, a = 0.5 + 0.5 (attribution now - before) for each node."""
    order = torch.stack([
        assign((F.normalize(theirs, dim=1)[:, None] - F.normalize(ours, dim=1)[None]).square().sum(dim=2))
        for theirs, ours in zip(reference.down, work.down, strict=True)
    ])  # fmt: skip
    down = work.down.gather(1, order[:, :, None].expand_as(work.down))
    up = work.up.gather(2, order[:, None].expand_as(work.up))
    hidden = now.hidden.gather(1, order)
    share_hidden, share_out = 0.5 + 0.5 * (hidden - before.hidden), 0.5 + 0.5 * (now.out - before.out)
    fused = Memory(
        reference.down + share_hidden[:, :, None] * (down - reference.down),
        reference.up + share_out[:, :, None] * (up - reference.up),
    )
    return fused, Attribution(torch.maximum(hidden, before.hidden), torch.maximum(now.out, before.out))


def mix_head_rows(
    means: Float[Tensor, "new dim"], known: Float[Tensor, "old dim"], rows: Float[Tensor, "old dim"]
) -> Float[Tensor, "new dim"]:
    """New head rows from old ones: in every few dimensions, a mix by the likeness of plain class means there."""
    size = PART if means.shape[1] % PART == 0 else 1

    def cut(values: Float[Tensor, "n dim"]) -> Float[Tensor, "parts n part"]:
        return values.unflatten(1, (-1, size)).transpose(0, 1)

    alike = F.normalize(cut(means), dim=2) @ F.normalize(cut(known), dim=2).mT
    mixed = (alike / SHARPNESS).softmax(dim=2) @ cut(rows)  # [parts, new, part]
    return mixed.transpose(0, 1).flatten(1)


def assign(cost: Float[Tensor, "n n"]) -> Int[Tensor, " n"]:
    """The column of each row so that the sum of costs is least: shortest augmenting paths (Jonker and Volgenant)."""
    table, n = cost.double().tolist(), len(cost)
    row_potential, column_potential = [0.0] * (n + 1), [0.0] * (n + 1)
    row_of, way = [0] * (n + 1), [0] * (n + 1)  # numbered from 1; column 0 is where a path begins
    for row in range(1, n + 1):
        row_of[0], column = row, 0
        least, done = [float("inf")] * (n + 1), [False] * (n + 1)
        while row_of[column]:
            done[column] = True
            current, delta, best = row_of[column], float("inf"), 0
            for other in range(1, n + 1):
                if done[other]:
                    continue
                reduced = table[current - 1][other - 1] - row_potential[current] - column_potential[other]
                if reduced < least[other]:
                    least[other], way[other] = reduced, column
                if least[other] < delta:
                    delta, best = least[other], other
            for other in range(n + 1):
                if done[other]:
                    row_potential[row_of[other]] += delta
                    column_potential[other] -= delta
                else:
                    least[other] -= delta
            column = best
        while column:
            row_of[column], column = row_of[way[column]], way[column]
    columns = [0] * n
    for column in range(1, n + 1):
        columns[row_of[column] - 1] = column - 1
    return torch.tensor(columns, device=cost.device)


METHODS: Final = (
    MethodInfo(
        "evoprompt",
        "prompts",
        "prompt tokens in every block as a function of the plain query; memories of tasks are fused",
        EvoPrompt,
        Published("MQMK paper", cifar100=87.97, imagenet_r=76.83, imagenet_r_5=77.16, imagenet_r_20=74.41),
        (
            "hidden nodes are aligned one to one, by linear assignment; outputs are not transported",
            "the augmentation of all methods, without colour jitter and grey",
        ),
        searches_rate=True,
        epoch_passes=(3.7, 3.7),
        test_passes=1.8,
    ),
)
