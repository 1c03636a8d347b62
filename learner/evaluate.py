"""How good a pool is on held-out pictures of every task, for every matcher, read-out and classifier.

A query Q_t(x) does not change when another task is learned (the g-prompt is frozen), so each is computed once, in
shuffled batches of mixed tasks, and kept in a table. Every matcher's answer then follows from the table by the same
scoring that serves requests, and evaluating after each of M tasks costs M passes a picture, not M squared.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from mqmk.learner.tasks import Pictures
from mqmk.matcher import matchers
from mqmk.matcher.classifiers import logits
from mqmk.matcher.images import normalise
from mqmk.matcher.matchers import Match, MatchSettings
from mqmk.matcher.pool import PromptPool
from mqmk.matcher.prompted_vit import FrozenViT, Prompt

BATCH = 64


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Held-out pictures of several tasks, mixed."""

    pixels: UInt8[Tensor, "images 3 height width"]
    task: Int[Tensor, " images"]
    label: Int[Tensor, " images"]
    """Place of the class within its task."""

    def with_task(self, number: int, pictures: Pictures) -> "HeldOut":
        """The pictures of one more task added at the end; batches are mixed when queries are computed."""
        parts = list(pictures.batches(256, seed=None))
        labels = torch.cat([self.label, *(part.labels for part in parts)])
        pixels = torch.cat([self.pixels, *(part.pixels for part in parts)])
        return HeldOut(pixels, torch.cat([self.task, torch.full((len(labels) - len(self.task),), number)]), labels)

    @classmethod
    def nothing(cls, image_size: int) -> "HeldOut":
        """Before the first task."""
        none = torch.zeros(0, dtype=torch.int64)
        return cls(torch.zeros(0, 3, image_size, image_size, dtype=torch.uint8), none, none)


@dataclass(frozen=True, eq=False)
class QueryTable:
    """Every query that any matcher could ask for."""

    own: Float[Tensor, "images tasks dim"]
    """Q_t of every picture for every task."""
    plus: Float[Tensor, "images dim"]
    """Q+, with the mean of all e-prompts of this pool."""
    plain: Float[Tensor, "images dim"]


def first_table(vit: FrozenViT) -> QueryTable:
    """Before the first task."""
    none = torch.zeros(0, vit.dim)
    return QueryTable(torch.zeros(0, 0, vit.dim), none, none)


@torch.inference_mode()
def extend(table: QueryTable, vit: FrozenViT, pool: PromptPool, held_out: HeldOut, seed: int = 0) -> QueryTable:
    """The table after new tasks and pictures were added; only what is missing is computed, and Q+ anew."""
    images, tasks = len(held_out.task), len(pool.tasks)
    known_images, known_tasks = table.own.shape[:2]
    own = torch.zeros(images, tasks, vit.dim)
    own[:known_images, :known_tasks] = table.own
    plain = torch.cat([table.plain, torch.zeros(images - known_images, vit.dim)])
    plus = torch.zeros(images, vit.dim)
    order = torch.randperm(images, generator=torch.Generator().manual_seed(seed))
    for part in order.split(BATCH):
        batch = normalise(held_out.pixels[part].to(vit.device), vit.info)
        stem = vit.stem(batch, pool.g, pool.e_layers[0])
        plus[part] = vit.query(stem, pool.g, pool.mean_e).cpu()
        new = part >= known_images
        for task in range(tasks):
            wanted = new | torch.tensor(task >= known_tasks)
            if wanted.any():
                rows = stem if bool(wanted.all()) else stem.rows(wanted.nonzero()[:, 0].to(vit.device))
                own[part[wanted], task] = vit.query(rows, pool.g, pool.e(task)).cpu()
        if new.any():
            plain[part[new]] = vit.plain(batch[new.to(vit.device)]).cpu()
    return QueryTable(own, plus, plain)


def matched(
    name: str, pool: PromptPool, table: QueryTable, settings: MatchSettings, true_task: Int[Tensor, " images"]
) -> Match:
    """What the named matcher answers, from the table. The pool is on the CPU."""
    return matchers.match(name, _FromTable(pool, table, settings, true_task))


@dataclass(frozen=True)
class Tally:
    """How one matcher did on held-out pictures; rates from 0 to 1."""

    matching_rate: float
    accuracy_all: float
    accuracy_task: float
    recall_at_3: float
    """Share of pictures whose true task is among the three best scores."""
    queries: float
    by_task_all: tuple[float, ...]
    by_task_task: tuple[float, ...]
    by_task_matching: tuple[float, ...]
    agreement: float
    """Share of pictures matched to the same task as by exact matching."""
    confusion: tuple[tuple[int, ...], ...]
    """Rows: true task, columns: matched task."""
