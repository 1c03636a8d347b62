"""The queries of held-out images, each computed once. Rows are images, columns prompts, both named by their content.

Q_t(x) depends on the image, the g-prompt and the e-prompt of task t, and on nothing else. Whatever an earlier table has
under the same two names is therefore reused, whichever tasks were added or removed in between.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from mqmk.learner.data.tasks import ImageSet
from mqmk.matcher.images import normalise
from mqmk.matcher.pool import PromptPool
from mqmk.matcher.prompted_vit import FrozenViT

BATCH = 64


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Held-out images of several tasks, mixed."""

    pixels: UInt8[Tensor, "images 3 height width"]
    task: Int[Tensor, " images"]
    label: Int[Tensor, " images"]
    """Place of the class within its task."""

    def with_task(self, number: int, images: ImageSet) -> "HeldOut":
        """The images of one more task added at the end; batches are mixed when queries are computed."""
        parts = list(images.batches(256, seed=None))
        labels = torch.cat([self.label, *(part.labels for part in parts)])
        pixels = torch.cat([self.pixels, *(part.pixels for part in parts)])
        return HeldOut(pixels, torch.cat([self.task, torch.full((len(labels) - len(self.task),), number)]), labels)

    @classmethod
    def empty(cls, image_size: int) -> "HeldOut":
        """Before the first task."""
        none = torch.zeros(0, dtype=torch.int64)
        return cls(torch.zeros(0, 3, image_size, image_size, dtype=torch.uint8), none, none)

    @cached_property
    def ids(self) -> tuple[str, ...]:
        """A hash of each image's pixels."""
        return tuple(content_digest("image", pixels) for pixels in self.pixels)


@dataclass(frozen=True)
class TableNames:
    """What the rows and columns of a table are, by hashes of their content."""

    images: tuple[str, ...]
    prompts: tuple[str, ...]
    """Of each task: its e-prompt with the g-prompt and the backbone."""
    enhanced: str
    """The mean of all e-prompts, likewise."""
    plain: str
    """The backbone."""
    anchor: str = ""
    """The anchor prompt with the g-prompt and the backbone; empty where there is none."""
    sizes: tuple[int, ...] = ()
    """How many classes each task has; for tables with a column for each class."""

    def shared_with(self, other: "TableNames") -> int:
        """How many queries both tables have."""
        single = sum(getattr(self, name) == getattr(other, name) for name in ("enhanced", "plain", "anchor"))
        columns = len({*self.prompts} & {*other.prompts}) + single
        return len({*self.images} & {*other.images}) * columns


@dataclass(frozen=True, eq=False)
class QueryTable:
    """Every query that any matcher may need."""

    names: TableNames
    task_queries: Float[Tensor, "images tasks dim"]
    """Q_t of every image for every task."""
    enhanced: Float[Tensor, "images dim"]
    """Q+, with the mean of all e-prompts of this pool."""
    plain: Float[Tensor, "images dim"]
    anchor: Float[Tensor, "images dim"]
    """Zeros for a pool without an anchor prompt."""

    @classmethod
    def empty(cls, dim: int) -> "QueryTable":
        """Before the first task."""
        none = torch.zeros(0, dim)
        return cls(TableNames((), (), "", ""), torch.zeros(0, 0, dim), none, none, none)


def table_names(pool: PromptPool, held_out: HeldOut) -> TableNames:
    """The rows and columns of the table for a pool and images."""
    backbone = repr(pool.backbone)
    layers = repr((backbone, pool.g_layers, pool.e_layers))
    prompts = tuple(content_digest(layers, pool.g_prompt, task.e_prompt) for task in pool.tasks)
    enhanced = content_digest(layers, pool.g_prompt, *pool.mean_e.rows) if pool.tasks else ""
    anchor = "" if pool.anchor is None else content_digest(layers, pool.g_prompt, pool.anchor)
    return TableNames(held_out.ids, prompts, enhanced, content_digest(backbone), anchor)


@torch.inference_mode()
def extend(table: QueryTable, vit: FrozenViT, pool: PromptPool, held_out: HeldOut, seed: int = 0) -> QueryTable:
    """The table of this pool and these images; only what the given table lacks is computed."""
    names, known = table_names(pool, held_out), table.names
    images, tasks = len(names.images), len(names.prompts)
    by_task, enhanced, plain, anchor = (torch.zeros(images, *shape, vit.dim) for shape in ((tasks,), (), (), ()))
    if not images:
        return QueryTable(names, by_task, enhanced, plain, anchor)
    row = find_places(known.images, names.images)
    columns = []
    for task, place in enumerate(find_places(known.prompts, names.prompts).tolist()):
        lacking = _copy_known(by_task[:, task], row, table.task_queries[:, place] if place >= 0 else None)
        columns.append((by_task[:, task], pool.e(task), lacking))
    lacking = _copy_known(enhanced, row, table.enhanced if known.enhanced == names.enhanced else None)
    columns.append((enhanced, pool.mean_e, lacking))
    if pool.anchor is not None:
        lacking = _copy_known(anchor, row, table.anchor if known.anchor == names.anchor else None)
        columns.append((anchor, pool.anchor_prompt, lacking))
    no_plain = _copy_known(plain, row, table.plain if known.plain == names.plain else None)
    missing = torch.stack([*(lacking for _, _, lacking in columns), no_plain]).any(dim=0)
    order = torch.randperm(images, generator=torch.Generator().manual_seed(seed))
    order = order[missing[order]]
    for part in (order[first : first + BATCH] for first in range(0, len(order), BATCH)):
        batch = normalise(held_out.pixels[part].to(vit.device), vit.info)
        stem = vit.stem(vit.embed(batch), pool.g, pool.e_layers[0])
        for queries, prompt, lacking in columns:
            if (here := lacking[part]).any():
                rows = stem if here.all() else stem.rows(here.nonzero()[:, 0].to(vit.device))
                queries[part[here]] = vit.query(rows, pool.g, prompt).cpu()
        if (here := no_plain[part]).any():
            plain[part[here]] = vit.plain(batch[here.to(vit.device)]).cpu()
    return QueryTable(names, by_task, enhanced, plain, anchor)


def _copy_known(
    queries: Float[Tensor, "images dim"], row: Int[Tensor, " images"], known: Float[Tensor, "rows dim"] | None
) -> Tensor:
    """Copy what is known; returns which images lack their query."""
    if known is None:
        return torch.ones(len(row), dtype=torch.bool)
    queries[row >= 0] = known[row[row >= 0]]
    return row < 0


def find_places(known: Sequence[str], wanted: Sequence[str]) -> Int[Tensor, " wanted"]:
    """Where each wanted name is among the known ones; -1 where it is not."""
    place = {name: number for number, name in enumerate(known)}
    return torch.tensor([place.get(name, -1) for name in wanted], dtype=torch.int64)


def content_digest(text: str, *tensors: Tensor) -> str:
    """A name for tensors by their content: 32 hex digits."""
    found = sha256(text.encode())
    for tensor in tensors:
        found.update(f"{tensor.dtype}{[*tensor.shape]}".encode())
        found.update(tensor.detach().cpu().contiguous().numpy().data)
    return found.hexdigest()[:32]


@dataclass(frozen=True, eq=False)
class TableQueries:
    """The queries of all held-out images, as a matcher reads them."""

    table: QueryTable

    def plain(self) -> Float[Tensor, "images dim"]:
        return self.table.plain

    def enhanced(self) -> Float[Tensor, "images dim"]:
        return self.table.enhanced

    def anchor(self) -> Float[Tensor, "images dim"]:
        return self.table.anchor

    def by_task(self) -> Iterator[Float[Tensor, "images dim"]]:
        yield from self.table.task_queries.unbind(dim=1)

    def task_queries(self, image: Int[Tensor, " rows"], task: Int[Tensor, " rows"]) -> Float[Tensor, "rows dim"]:
        return self.table.task_queries[image, task]
