"""What training a task changes: the trained tensors, the epoch, the best epoch so far. And how it is checkpointed.

A task has one goal, its e-prompt with its head. The pool's first task has another one before it: the g-prompt with the
anchor prompt and a head that is thrown away.
"""

import logging
from collections.abc import Mapping
from dataclasses import asdict
from typing import Final, Literal

import torch
from torch import Tensor

from mqmk.learner.data.tasks import Task
from mqmk.learner.settings import TrainSettings
from mqmk.learner.training import checkpoint
from mqmk.matcher.pool import PromptPool, group_classes, read_head
from mqmk.matcher.prompted_vit import BackboneInfo, FrozenViT, Prompt

log = logging.getLogger(__name__)

NOT_BOUND: Final = ("accumulate", "plain_means")
"""Settings that a checkpoint is not bound to: into how many parts a batch is split changes no shape and no sum of
gradients (only which crop an image gets), and must be free to change after memory ran out; plain means are computed
after the last epoch."""


Goal = Literal["task", "anchor"]
GOALS: Final[tuple[Goal, Goal]] = ("anchor", "task")
FREE_SPREAD: Final = 0.02
"""Rows of a free head begin small, as published: their length is learned."""


class TrainState:
    """The tensors of one task in training. The optimiser is the caller's; a checkpoint contains its state, too."""

    def __init__(self, task: Task, vit: FrozenViT, pool: PromptPool, settings: TrainSettings) -> None:
        self.task_name, self.device = task.name, vit.device
        self.g_layers, self.e_layers = pool.g_layers, pool.e_layers
        self.epoch, self.best_accuracy, self.epochs_without_gain = 0, -1.0, 0
        self._moments: dict[str, Tensor] = {}
        generator = torch.Generator().manual_seed(settings.seed)

        def uniform(*shape: int) -> Tensor:
            return torch.empty(*shape).uniform_(-settings.spread, settings.spread, generator=generator).to(vit.device)

        classes = len(task.classes)
        keys = min(settings.keys_per_task or classes, classes)
        length = pool.tasks[0].e_prompt.shape[2] if pool.tasks else settings.e_length
        self.key_of_class = group_classes(classes, keys).to(vit.device)
        self.g_prompt = pool.g_prompt.clone()
        self.e_prompt = _initial_e_prompt(pool, settings, uniform(len(pool.e_layers), 2, length, vit.dim))
        self.head_kind = pool.head_kind
        self.head, self.keys = uniform(classes, vit.dim), uniform(keys, vit.dim)
        self.anchor = None if pool.anchor is None else pool.anchor.clone()
        self.anchor_head: Tensor | None = None
        if not pool.tasks and settings.anchor_steps:
            self.anchor = uniform(len(pool.e_layers), 2, settings.anchor_length, vit.dim)
            self.anchor_head = uniform(classes, vit.dim)
        self.goal: Goal = "task" if self.anchor_head is None else "anchor"
        if self.head_kind == "free":
            self.head = torch.randn(classes, vit.dim, generator=generator).mul(FREE_SPREAD).to(vit.device)
        self._trains_g = not pool.tasks or settings.g_prompt == "always"
        self._learns_keys = settings.keys == "learned"
        self.best = self.copy_tensors()
        self._digest = self._compute_digest(task, vit.info, pool, settings)

    @property
    def goals(self) -> tuple[Goal, ...]:
        """This goal and those after it."""
        return GOALS if self.goal == "anchor" else ("task",)

    def begin(self, goal: Goal) -> None:
        """Go on to another goal; the one before is reached."""
        if goal != self.goal:
            self.goal, self.epoch, self.best_accuracy, self.epochs_without_gain = goal, 0, -1.0, 0
            self._moments = {}

    @property
    def trains_g(self) -> bool:
        """Whether the g-prompt is trained now: with the first goal only."""
        return self._trains_g and (self.goal == "anchor" or self.anchor_head is None)

    @property
    def prompts(self) -> tuple[Prompt, Prompt]:
        """The g-prompt, and the prompt of the goal."""
        prompt = self.e_prompt if self.goal == "task" else self.anchor
        assert prompt is not None
        return Prompt(self.g_layers, (self.g_prompt,)), Prompt(self.e_layers, (prompt,))

    @property
    def _goal_head(self) -> Tensor:
        head = self.head if self.goal == "task" else self.anchor_head
        assert head is not None
        return head

    def trained_tensors(self) -> list[Tensor]:
        """What the goal trains."""
        tensors = [*self.prompts[1].rows, self._goal_head]
        tensors += [self.g_prompt] if self.trains_g else []
        tensors += [self.keys] if self._learns_keys and self.goal == "task" else []
        return [tensor.requires_grad_() for tensor in tensors]

    @property
    def head_rows(self) -> Tensor:
        """The head of the goal as logits read it, [classes, dim]."""
        return read_head(self._goal_head, self.head_kind)

    def copy_tensors(self) -> dict[str, Tensor]:
        """The tensors as they are now, by name."""
        names = ("g_prompt", "e_prompt", "head", "keys", "anchor", "anchor_head")
        tensors = {name: value for name in names if (value := getattr(self, name)) is not None}
        return {name: value.detach().clone() for name, value in tensors.items()}

    def load_tensors(self, values: Mapping[str, Tensor]) -> None:
        """Overwrite the tensors with what `copy_tensors` gave."""
        for name, value in values.items():
            getattr(self, name).data.copy_(value)

    def to_checkpoint(self, optimiser: torch.optim.Optimizer) -> bytes:
        """Everything that `load_checkpoint` needs to continue."""
        numbers = [self.epoch, self.best_accuracy, self.epochs_without_gain, float(GOALS.index(self.goal))]
        state = {"digest": self._digest, "numbers": torch.tensor(numbers, dtype=torch.float64)}
        state |= {f"now.{name}": value for name, value in self.copy_tensors().items()}
        state |= {f"best.{name}": value for name, value in self.best.items()}
        moments = checkpoint.optimiser_tensors(optimiser)
        return checkpoint.to_bytes(state | {f"optimiser.{name}": value for name, value in moments.items()})

    def load_checkpoint(self, data: bytes) -> None:
        """Continue from a checkpoint of the same task, settings and base; any other is ignored with a warning."""
        state = checkpoint.from_bytes(data)
        if state is None:
            self._warn_ignored("it cannot be read")
        elif "digest" not in state or not torch.equal(state["digest"], self._digest):
            self._warn_ignored("it was made with other settings or classes, or from another base")
        else:
            epoch, self.best_accuracy, without_gain, goal = state["numbers"].tolist()
            self.epoch, self.epochs_without_gain, self.goal = int(epoch), int(without_gain), GOALS[int(goal)]
            self.load_tensors(checkpoint.strip_prefix(state, "now."))
            self.best = {name: value.to(self.device) for name, value in checkpoint.strip_prefix(state, "best.").items()}
            self._moments = checkpoint.strip_prefix(state, "optimiser.")

    def restore_optimiser(self, optimiser: torch.optim.Optimizer) -> None:
        """Give the optimiser of the goal the state that the checkpoint had, if there was one."""
        if self._moments:
            checkpoint.restore_optimiser(optimiser, self._moments)

    def _warn_ignored(self, reason: str) -> None:
        ids = {"task": self.task_name, "reason": reason}
        log.warning("the checkpoint of %s is ignored, and training starts over: %s", self.task_name, reason,
                    extra={"event": "task.checkpoint_ignored", "ids": ids})  # fmt: skip

    def _compute_digest(self, task: Task, info: BackboneInfo, pool: PromptPool, settings: TrainSettings) -> Tensor:
        """Identifies the runs that may continue from a checkpoint of this one."""
        run = {
            "settings": {name: value for name, value in asdict(settings).items() if name not in NOT_BOUND},
            "classes": task.classes,
            "manifest": task.manifest_sha256,
            "images": len(task.training),
            "backbone": asdict(info),
            "layers": [pool.g_layers, pool.e_layers],
            "head_scale": pool.logit_scale,
            "trains_g": self._trains_g,
        }
        return checkpoint.compute_digest(run, self.copy_tensors())


def _initial_e_prompt(pool: PromptPool, settings: TrainSettings, uniform: Tensor) -> Tensor:
    if not pool.tasks or settings.start == "random":
        return uniform
    return pool.tasks[0 if settings.start == "first" else -1].e_prompt.clone()
