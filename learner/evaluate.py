"""How good a pool is on held-out pictures of every task, for every matcher, read-out and classifier.

A query Q_t(x) does not change when another task is learned (the g-prompt is frozen), so each is computed once, in
shuffled batches of mixed tasks, and kept in a table. Every matcher's answer then follows from the table by the same
scoring that serves requests, and evaluating after each of M tasks costs M passes a picture, not M squared.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from mqmk.learner.tasks import Pictures
from mqmk.matcher.classifiers import READOUTS, logits
from mqmk.matcher.images import normalise
from mqmk.matcher.matchers import Match, MatchSettings, Scene, decide
from mqmk.matcher.pool import PromptPool
from mqmk.matcher.prompted_vit import FrozenViT

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
        stem = vit.stem(vit.embed(batch), pool.g, pool.e_layers[0])
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


@dataclass(frozen=True, eq=False)
class TableQueries:
    """The queries of all held-out pictures as a matcher asks for them."""

    table: QueryTable

    def plain(self) -> Float[Tensor, "images dim"]:
        return self.table.plain

    def plus(self) -> Float[Tensor, "images dim"]:
        return self.table.plus

    def by_task(self) -> Iterator[Float[Tensor, "images dim"]]:
        yield from self.table.own.unbind(dim=1)

    def own(self, image: Int[Tensor, " rows"], task: Int[Tensor, " rows"]) -> Float[Tensor, "rows dim"]:
        return self.table.own[image, task]


@dataclass(frozen=True)
class Tally:
    """How one matcher did on held-out pictures; rates from 0 to 1."""

    matching_rate: float
    accuracy_all: float
    accuracy_task: float
    recall_at_3: float
    """Share of pictures whose true task is among the three best scores."""
    agreement: float
    """Share of pictures matched to the same task as by exact matching."""
    queries: float
    """Mean number of queries a picture."""
    task_matching: tuple[float, ...]
    task_accuracy_all: tuple[float, ...]
    task_accuracy_task: tuple[float, ...]
    confusion: tuple[tuple[int, ...], ...]
    """Rows: true task, columns: matched task."""


@dataclass(frozen=True, eq=False)
class Evaluation:
    """Everything that held-out pictures say about one pool. The pool is on the CPU, where the table is."""

    pool: PromptPool
    table: QueryTable
    held_out: HeldOut

    def match(self, matcher: str, settings: MatchSettings | None = None) -> Match:
        """What the named matcher answers."""
        scene = Scene(TableQueries(self.table), self.pool, settings or MatchSettings(), self.held_out.task)
        return decide(matcher, scene)

    def tally(self, matcher: str, settings: MatchSettings | None = None, classifier: str = "fc") -> Tally:
        """How the named matcher did."""
        found = self.match(matcher, settings)
        matched = found.task == self.held_out.task
        rightly = {way: self.rightly(found, classifier, way) for way in READOUTS}
        best = found.scores.topk(min(3, found.scores.shape[1]), dim=1).indices
        exact = self._exact(settings or MatchSettings())
        return Tally(
            matching_rate=_share(matched),
            accuracy_all=_share(rightly["all"]),
            accuracy_task=_share(rightly["task"]),
            recall_at_3=_share((best == self.held_out.task[:, None]).any(dim=1)),
            agreement=_share(found.task == exact),
            queries=found.queries.float().mean().item(),
            task_matching=self._by_task(matched),
            task_accuracy_all=self._by_task(rightly["all"]),
            task_accuracy_task=self._by_task(rightly["task"]),
            confusion=self._confusion(found.task),
        )

    def _exact(self, settings: MatchSettings) -> Int[Tensor, " images"]:
        """The tasks that exact matching gives, which every tally is compared with."""
        if settings not in self._exact_tasks:
            self._exact_tasks[settings] = self.match("mqmk", settings).task
        return self._exact_tasks[settings]

    @cached_property
    def _exact_tasks(self) -> dict[MatchSettings, Int[Tensor, " images"]]:
        return {}

    def rightly(self, found: Match, classifier: str, readout: str) -> Bool[Tensor, " images"]:
        """Which pictures got their own label; a label that several tasks know counts whichever task gave it."""
        rows = logits(self.pool, found, classifier, readout).argmax(dim=1)
        labels = [label for _, label in self.pool.labels]
        names = torch.tensor([labels.index(label) for label in labels])
        return names[rows] == names[self.true_row]

    @property
    def true_row(self) -> Int[Tensor, " images"]:
        """The head row of each picture's true class."""
        sizes = torch.tensor([0, *(len(task.classes) for task in self.pool.tasks)])
        return sizes.cumsum(0)[self.held_out.task] + self.held_out.label

    def _by_task(self, good: Bool[Tensor, " images"]) -> tuple[float, ...]:
        return tuple(_share(good[self.held_out.task == task]) for task in range(len(self.pool.tasks)))

    def _confusion(self, matched: Int[Tensor, " images"]) -> tuple[tuple[int, ...], ...]:
        tasks = len(self.pool.tasks)
        pairs = torch.bincount(self.held_out.task * tasks + matched, minlength=tasks * tasks)
        return tuple(tuple(row) for row in pairs.reshape(tasks, tasks).tolist())


def matching_card(pictures: int, tallies: Mapping[str, Tally]) -> dict[str, Any]:
    """What a pool file says of each matcher, from so many held-out pictures: the table that `auto` chooses by."""
    return {
        "held_out": pictures,
        "matchers": {
            name: {
                "rate": row.matching_rate,
                "agreement": row.agreement,
                "cost": row.queries,
                "accuracy": row.accuracy_task,
            }
            for name, row in tallies.items()
        },
    }


def _share(good: Bool[Tensor, " images"]) -> float:
    return good.float().mean().item() if len(good) else 0.0
