"""The prompt pool: one g-prompt for all tasks, and for each task an e-prompt with its keys, head rows and means.

A pool is a value. `with_task` and `without_task` return another pool and share the tensors of the tasks they keep, so
an old pool keeps serving while a new one is built.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import wraps
from itertools import accumulate
from typing import Any, Concatenate, Final, ParamSpec, TypeVar, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from mqmk.matcher.errors import MatchError, PoolError
from mqmk.matcher.prompted_vit import BackboneInfo, Prompt

T = TypeVar("T")
P = ParamSpec("P")
STATISTICS: Final = ("factor", "residual", "feature_means")
"""What the regression over all tasks needs of a task (`regression.py`): a layer of its own in a store."""
HEAD_KINDS: Final = ("normalised", "free")


@dataclass(frozen=True, eq=False)
class TaskPrompt:
    """What one task adds to the pool; none of it changes after the task was trained.

    Shapes are checked here and not by annotation, because these values also come from files.
    """

    name: str
    classes: tuple[str, ...]
    e_prompt: Tensor  # [e_layers, 2, length, dim], axis 1: 0 = key rows, 1 = value rows
    keys: Tensor  # [keys, dim], one for each class or for each group of classes (`group_classes`)
    head: Tensor  # [classes, dim]
    means: Tensor  # [classes, dim], mean of the normalised queries of each class
    plain_means: Tensor | None = None  # the same for queries without prompts; only sqsk and sqmk need it
    factor: Tensor | None = None  # [rank, width], factor^T factor is about the mean outer product of anchor features
    residual: Tensor | None = None  # [1, width], what its diagonal lacks
    feature_means: Tensor | None = None  # [classes, width], mean of these features of each class
    manifest_sha256: str = ""
    samples: int = 0
    trained_at: str = ""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    class_samples: tuple[int, ...] = ()  # training images of each class; empty where an older release wrote the pool
    base: str = ""  # digest of what training started from; empty for the first task and in older pools
    layer: str = field(default="", init=False)  # sha256 of the stored layer with these tensors (`stored_as`), or empty
    layer_bytes: int = field(default=0, init=False)
    statistics: str = field(default="", init=False)  # likewise of the layer with STATISTICS

    def __post_init__(self) -> None:
        classes = len(self.classes)
        if not self.name or not classes or len(set(self.classes)) != classes:
            raise PoolError(f"task {self.name!r}: expected a name and distinct classes, got {list(self.classes)}")
        if not 1 <= len(self.keys) <= classes:
            raise PoolError(f"task {self.name!r}: expected 1 to {classes} keys, got {len(self.keys)}")
        for name in ("head", "means", "plain_means", "feature_means"):
            if (rows := getattr(self, name)) is not None and len(rows) != classes:
                raise PoolError(f"task {self.name!r}: expected {classes} rows in {name}, got {len(rows)}")
        counts = self.class_samples
        if counts and (len(counts) != classes or any(type(count) is not int or count < 0 for count in counts)):
            raise PoolError(f"task {self.name!r}: expected {classes} numbers in class_samples, got {list(counts)}")
        if len({getattr(self, name) is None for name in STATISTICS}) > 1:
            raise PoolError(f"task {self.name!r}: expected {', '.join(STATISTICS)} together, got some of them")
        for name, tensor in self.tensors().items():
            width = self.factor.shape[-1] if name in STATISTICS and self.factor is not None else self.dim
            if tensor.ndim != (4 if name == "e_prompt" else 2) or tensor.shape[-1] != width:
                raise PoolError(f"task {self.name!r}: {name} has the shape {[*tensor.shape]}, of another width or rank")
            if tensor.dtype != torch.float32:
                raise PoolError(f"task {self.name!r}: expected float32 in {name}, got {tensor.dtype}")
            if not torch.isfinite(tensor).all():
                raise PoolError(f"task {self.name!r}: {name} has values that are not finite")

    @property
    def dim(self) -> int:
        """The width of a query."""
        return self.e_prompt.shape[-1]

    def tensors(self) -> dict[str, Tensor]:
        """Name and tensor of everything that was trained."""
        names = ("e_prompt", "keys", "head", "means", "plain_means", *STATISTICS)
        return {name: tensor for name in names if (tensor := getattr(self, name)) is not None}

    def to(self, device: torch.device) -> "TaskPrompt":
        """The same on another device; itself if it is there."""
        if all(tensor.device == device for tensor in self.tensors().values()):
            return self
        return self._copy_with({name: tensor.to(device) for name, tensor in self.tensors().items()})

    def stored_as(self, layer: str, size: int, statistics: str) -> "TaskPrompt":
        """The same, whose tensors are known to be in these layers; a `replace` of it knows of none."""
        return self._copy_with({"layer": layer, "layer_bytes": size, "statistics": statistics})

    def _copy_with(self, values: Mapping[str, Any]) -> "TaskPrompt":
        """A copy that needs no checks: it holds the same numbers."""
        same = copy(self)
        for name, value in values.items():
            object.__setattr__(same, name, value)
        return same


def group_classes(classes: int, keys: int) -> Int[Tensor, " classes"]:
    """The group of each class when a task has fewer keys than classes: neighbours share a key."""
    return torch.arange(classes) * keys // classes


def task_of_rows(sizes: Sequence[int]) -> Int[Tensor, " rows"]:
    """The task of each row where the rows of all tasks, `sizes` of each, are side by side."""
    return torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes, dtype=torch.long))


def read_head(rows: Float[Tensor, "rows dim"], kind: str) -> Float[Tensor, "rows dim"]:
    """Head rows as logits read them: of unit length, or as they were trained."""
    return rows if kind == "free" else F.normalize(rows, dim=1)


def _is_increasing(layers: tuple[int, ...]) -> bool:
    """Also that no layer is negative."""
    return list(layers) == sorted({layer for layer in layers if layer >= 0})


def cache_on_pool(compute: Callable[Concatenate["PromptPool", P], T]) -> Callable[Concatenate["PromptPool", P], T]:
    """Cache a function of a pool inside the pool: computed on first use and kept as long as the pool lives."""

    @wraps(compute)
    def compute_once(pool: "PromptPool", /, *arguments: P.args, **named: P.kwargs) -> T:
        name = (compute, arguments, tuple(named.items()))
        if name not in pool.cache:
            pool.cache[name] = compute(pool, *arguments, **named)
        return cast(T, pool.cache[name])

    return compute_once


@dataclass(frozen=True, eq=False)
class PromptPool:
    """Everything the service has learned."""

    backbone: BackboneInfo
    g_layers: tuple[int, ...]
    e_layers: tuple[int, ...]
    g_prompt: Tensor  # [g_layers, 2, length, dim]
    tasks: tuple[TaskPrompt, ...] = ()
    logit_scale: float = 16.0
    anchor: Tensor | None = None  # [e_layers, 2, length, dim], as an e-prompt; None where an older release trained it
    matching: Mapping[str, Any] = field(default_factory=dict)
    """Measured on held-out data when the version was built: each matcher's rate, agreement and cost, thresholds."""
    head_kind: str = "normalised"
    """How logits read the head rows of all tasks."""
    cache: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False)
    """What `cache_on_pool` computed; another pool starts with an empty one."""

    def __post_init__(self) -> None:
        dim = self.g_prompt.shape[-1]
        if self.g_prompt.ndim != 4 or self.g_prompt.shape[:2] != (len(self.g_layers), 2):
            raise PoolError(f"g_prompt: expected [{len(self.g_layers)}, 2, length, dim], got {[*self.g_prompt.shape]}")
        if self.g_prompt.dtype != torch.float32 or not torch.isfinite(self.g_prompt).all():
            raise PoolError("g_prompt: expected finite float32 values")
        if self.head_kind not in HEAD_KINDS:
            raise PoolError(f"expected head rows that are {' or '.join(HEAD_KINDS)}, got {self.head_kind!r}")
        if not self.e_layers or not (_is_increasing(self.e_layers) and _is_increasing(self.g_layers)):
            raise PoolError(f"layers must rise from 0 and not be empty, got g {self.g_layers} and e {self.e_layers}")
        names = [task.name for task in self.tasks]
        if len(set(names)) != len(names):
            raise PoolError(f"two tasks have the same name: {names}")
        for task in self.tasks:
            expected = (len(self.e_layers), 2, self.tasks[0].e_prompt.shape[2], dim)
            if task.e_prompt.shape != expected:
                raise PoolError(
                    f"task {task.name!r}: expected an e-prompt {list(expected)} as of the first task (their mean is a "
                    f"query, too), got {list(task.e_prompt.shape)}"
                )
        if self.anchor is not None and (
            self.anchor.ndim != 4
            or (*self.anchor.shape[:2], self.anchor.shape[3]) != (len(self.e_layers), 2, dim)
            or self.anchor.dtype != torch.float32
            or not torch.isfinite(self.anchor).all()
        ):
            raise PoolError(f"anchor: expected finite float32 [{len(self.e_layers)}, 2, length, {dim}]")

    def with_task(self, task: TaskPrompt) -> "PromptPool":
        """The pool after learning one more task; what the other tasks compute stays as it is."""
        if any(known.name == task.name for known in self.tasks):
            raise PoolError(f"the pool already has a task {task.name!r}; forget it first or choose another name")
        return replace(self, tasks=(*self.tasks, task), matching={})

    def without_task(self, name: str) -> "PromptPool":
        """The pool as if that task had never been learned."""
        kept = tuple(task for task in self.tasks if task.name != name)
        if len(kept) == len(self.tasks):
            raise PoolError(f"no task {name!r} in the pool; it has {', '.join(t.name for t in self.tasks) or 'none'}")
        return replace(self, tasks=kept, matching={})

    def with_matching(self, matching: Mapping[str, Any]) -> "PromptPool":
        """The pool with what was measured on held-out data."""
        return replace(self, matching=matching)

    def to(self, device: torch.device) -> "PromptPool":
        """The same pool on another device; itself if it is there."""
        tasks = tuple(task.to(device) for task in self.tasks)
        if self.g_prompt.device == device and all(new is old for new, old in zip(tasks, self.tasks, strict=True)):
            return self
        anchor = None if self.anchor is None else self.anchor.to(device)
        return replace(self, g_prompt=self.g_prompt.to(device), tasks=tasks, anchor=anchor)

    # What matchers and classifiers read, computed once for each pool.

    @property
    @cache_on_pool
    def g(self) -> Prompt:
        """The g-prompt."""
        return Prompt(self.g_layers, (self.g_prompt,))

    @property
    def has_statistics(self) -> bool:
        """Whether every task can be found by the anchor query."""
        return self.anchor is not None and all(task.factor is not None for task in self.tasks)

    @property
    def anchor_prompt(self) -> Prompt:
        """The anchor prompt, which gives the anchor query."""
        if self.anchor is None:
            raise MatchError("the pool has no anchor prompt: its first task was trained without one; use mqmk")
        return Prompt(self.e_layers, (self.anchor,))

    def e(self, task: int) -> Prompt:
        """The e-prompt of one task, for a whole batch."""
        return Prompt(self.e_layers, (self.tasks[task].e_prompt,))

    def e_rows(self, tasks: Int[Tensor, " rows"]) -> Prompt:
        """For each row the e-prompt of its own task."""
        return Prompt(self.e_layers, tuple(self.tasks[t].e_prompt for t in tasks.tolist()))

    @property
    @cache_on_pool
    def mean_e(self) -> Prompt:
        """The mean of all e-prompts, which gives the enhanced query Q+."""
        total = self.tasks[0].e_prompt.clone()
        for task in self.tasks[1:]:
            total += task.e_prompt
        return Prompt(self.e_layers, (total / len(self.tasks),))

    @property
    @cache_on_pool
    def labels(self) -> tuple[tuple[int, str], ...]:
        """Task number and class name of every head row."""
        return tuple((number, name) for number, task in enumerate(self.tasks) for name in task.classes)

    @property
    @cache_on_pool
    def row_task(self) -> Int[Tensor, " rows"]:
        """The task of every head row."""
        return task_of_rows([len(task.classes) for task in self.tasks]).to(self.g_prompt.device)

    @property
    @cache_on_pool
    def rows_of_task(self) -> tuple[slice, ...]:
        """The head rows of each task."""
        ends = [*accumulate(len(task.classes) for task in self.tasks)]
        return tuple(slice(end - len(task.classes), end) for task, end in zip(self.tasks, ends, strict=True))

    @property
    @cache_on_pool
    def head(self) -> Float[Tensor, "rows dim"]:
        """Head rows of all tasks, as logits read them."""
        return read_head(torch.cat([task.head for task in self.tasks]), self.head_kind)

    @property
    @cache_on_pool
    def means(self) -> Float[Tensor, "rows dim"]:
        """Normalised class means of all tasks."""
        return F.normalize(torch.cat([task.means for task in self.tasks]), dim=1)
