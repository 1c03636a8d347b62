"""The prompt pool that MQMK and its neighbours share: trained by the daemon's own training loop, once for all of them.

Whatever a neighbour needs of a task beyond its prompt and head, such as means of plain queries, belongs into this pool.
"""

import time
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mqmk.learner.bench.methods.parts.forward import PassMeter
from mqmk.learner.bench.methods.parts.protocol import MethodSettings
from mqmk.learner.bench.methods.parts.remembering import Memory, memory_of
from mqmk.learner.bench.methods.parts.training import plain_query
from mqmk.learner.data.tasks import Task
from mqmk.learner.evaluation.query_table import content_digest
from mqmk.learner.training.train import Trained, empty_pool, train_task
from mqmk.matcher.pool import STATISTICS, PromptPool, cache_on_pool
from mqmk.matcher.prompted_vit import FrozenViT
from mqmk.matcher.queries import LiveQueries, Queries, rows_per_pass


@dataclass(frozen=True, eq=False)
class TrainedOnce:
    """What training a task gave, and what it cost whoever trained it."""

    trained: Trained
    forward: float
    backward: float
    seconds: float


class TrainedPool:
    """The pool after the tasks learned so far; plain means and statistics only count where a matcher needs them."""

    def __init__(
        self, vit: FrozenViT, settings: MethodSettings, plain_means: bool = False, statistics: bool = False
    ) -> None:
        self._vit, self._train = vit, replace(settings.train, plain_means=True)
        self._left_out = (() if plain_means else ("plain_means",)) + (() if statistics else STATISTICS)
        self._name: tuple[Hashable, ...] = ()
        self.pool: PromptPool = empty_pool(vit, self._train)
        self.trained = 0

    def learn(self, task: Task) -> None:
        """Train one more task, or take what another method trained from the same tasks with the same settings."""
        trains_g = not self.pool.tasks or self._train.g_prompt == "always"
        self._name += (task.classes, len(task.training))
        self.pool = self._train_once(task).added_to(self.pool).to(self._vit.device)
        newest = self.pool.tasks[-1]
        self.trained = newest.e_prompt.numel() + newest.head.numel() + (self.pool.g_prompt.numel() if trains_g else 0)

    def _train_once(self, task: Task) -> Trained:
        memory, name = memory_of(self._vit), ("pool", self._train, self._name)
        known = memory.others.get(name) if memory else None
        if isinstance(known, TrainedOnce):
            PassMeter.add(self._vit, known.forward, known.backward, known.seconds)
            return known.trained
        begun = time.monotonic()
        with PassMeter(self._vit) as meter:
            trained = train_task(task, self._vit, self.pool, self._train)
        if memory:
            memory.others[name] = TrainedOnce(trained, meter.forward, meter.backward, time.monotonic() - begun)
        return trained

    def queries(self, images: Float[Tensor, "batch 3 height width"]) -> Queries:
        """Q_t of these images, on demand."""
        live = LiveQueries(self._vit, self.pool, images, rows_per_pass(self._vit, None))
        memory = memory_of(self._vit)
        return live if memory is None else RememberedQueries(live, self._vit, self.pool, images, memory)

    def task_query(self, images: Float[Tensor, "batch 3 height width"], task: int) -> Float[Tensor, "batch dim"]:
        """Q_t of one task."""
        everyone = torch.arange(len(images))
        return self.queries(images).task_queries(everyone, torch.full_like(everyone, task))

    def kept(self) -> dict[str, Tensor]:
        """As `Method.kept` names them."""
        g_prompt = "g_prompt" if self._train.g_prompt == "always" or not self.pool.tasks else "task0/g_prompt"
        shared = {g_prompt: self.pool.g_prompt}
        if self.pool.anchor is not None and not {*STATISTICS} & {*self._left_out}:
            shared["task0/anchor"] = self.pool.anchor
        return shared | {
            f"task{number}/{name}": tensor
            for number, task in enumerate(self.pool.tasks)
            for name, tensor in task.tensors().items()
            if name not in self._left_out
        }


class RememberedQueries:
    """Queries of a pool, each computed once for all methods. Counted as if this method had computed them."""

    def __init__(self, live: LiveQueries, vit: FrozenViT, pool: PromptPool, images: Tensor, memory: Memory) -> None:
        self._live, self._vit, self._pool, self._images, self._memory = live, vit, pool, images, memory
        self._digests = memory.digests(images)
        below = min(pool.e_layers[0], vit.depth - 1) * vit.tokens
        self._shared = below / (vit.tokens * (vit.depth - 1) + 1)  # of a pass: the layers below the first e-prompt
        self._is_stem_counted = self._is_stem_live = False

    def plain(self) -> Float[Tensor, "batch dim"]:
        return plain_query(self._vit, self._images)

    def enhanced(self) -> Float[Tensor, "batch dim"]:
        names = [(name_prompts(self._pool)[-1], digest) for digest in self._digests]
        missing = [*range(len(names))] if self._memory.find(names) else []
        return self._collect(names, missing, self._live.enhanced)

    def anchor(self) -> Float[Tensor, "batch dim"]:
        names = [(name_anchor(self._pool), digest) for digest in self._digests]
        missing = [*range(len(names))] if self._memory.find(names) else []
        return self._collect(names, missing, self._live.anchor)

    def by_task(self) -> Iterator[Float[Tensor, "batch dim"]]:
        everyone = torch.arange(len(self._images))
        for task in range(len(self._pool.tasks)):
            yield self.task_queries(everyone, torch.full_like(everyone, task))

    def task_queries(self, image: Int[Tensor, " rows"], task: Int[Tensor, " rows"]) -> Float[Tensor, "rows dim"]:
        prompts, pairs = name_prompts(self._pool), zip(image.tolist(), task.tolist(), strict=True)
        names = [(prompts[number], self._digests[place]) for place, number in pairs]
        missing = self._memory.find(names)
        return self._collect(names, missing, lambda: self._live.task_queries(image[missing], task[missing]))

    def _collect(self, names: list[tuple[str, bytes]], missing: list[int], compute: Callable[[], Tensor]) -> Tensor:
        """All rows: those that are missing computed, the others as they are known."""
        own = 1 - self._shared
        self._count_stem(is_live=bool(missing))
        PassMeter.add(self._vit, (len(names) - len(missing)) * own)
        found = dict(zip(missing, compute() if missing else (), strict=True))
        if missing:
            self._memory.keep([names[place] for place in missing], torch.stack([*found.values()]), own)
        return torch.stack([
            found[place] if place in found else self._memory.get(name)[0] for place, name in enumerate(names)
        ])  # fmt: skip

    def _count_stem(self, is_live: bool) -> None:
        """The layers below the first e-prompt count once for a batch, computed or not."""
        stem = len(self._images) * self._shared
        if not self._is_stem_counted and not is_live:
            PassMeter.add(self._vit, stem)
        if self._is_stem_counted and is_live and not self._is_stem_live:
            PassMeter.add(self._vit, -stem)  # it is computed now, which counts by itself
        self._is_stem_counted, self._is_stem_live = True, self._is_stem_live or is_live


@cache_on_pool
def name_anchor(pool: PromptPool) -> str:
    """A name for the anchor prompt with the g-prompt below it."""
    return content_digest(repr((pool.g_layers, pool.e_layers)), pool.g_prompt, *pool.anchor_prompt.rows)


@cache_on_pool
def name_prompts(pool: PromptPool) -> tuple[str, ...]:
    """A name for each task's e-prompt with the g-prompt below it, and last for the mean of all e-prompts."""
    layers = repr((pool.g_layers, pool.e_layers))
    prompts = [*(task.e_prompt for task in pool.tasks), *pool.mean_e.rows]
    return tuple(content_digest(layers, pool.g_prompt, prompt) for prompt in prompts)
