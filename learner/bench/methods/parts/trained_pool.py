"""The prompt pool that MQMK and its neighbours share: trained by the daemon's own training loop."""

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from mqmk.learner.bench.methods.parts.protocol import MethodSettings
from mqmk.learner.data.tasks import Task
from mqmk.learner.training.train import empty_pool, train_task
from mqmk.matcher.pool import PromptPool
from mqmk.matcher.prompted_vit import FrozenViT
from mqmk.matcher.queries import LiveQueries, rows_per_pass


class TrainedPool:
    """The pool after the tasks learned so far; with plain means where a matcher needs them."""

    def __init__(self, vit: FrozenViT, settings: MethodSettings, plain_means: bool = False) -> None:
        self._vit, self._train = vit, replace(settings.train, plain_means=plain_means)
        self.pool: PromptPool = empty_pool(vit, self._train)
        self.trained = 0

    def learn(self, task: Task) -> None:
        """Train one more task."""
        trains_g = not self.pool.tasks or self._train.g_prompt == "always"
        self.pool = train_task(task, self._vit, self.pool, self._train).added_to(self.pool).to(self._vit.device)
        newest = self.pool.tasks[-1]
        self.trained = newest.e_prompt.numel() + newest.head.numel() + (self.pool.g_prompt.numel() if trains_g else 0)

    def queries(self, images: Float[Tensor, "batch 3 height width"]) -> LiveQueries:
        """Q_t of these images, on demand."""
        return LiveQueries(self._vit, self.pool, images, rows_per_pass(self._vit, None))

    def task_query(self, images: Float[Tensor, "batch 3 height width"], task: int) -> Float[Tensor, "batch dim"]:
        """Q_t of one task."""
        everyone = torch.arange(len(images))
        return self.queries(images).task_queries(everyone, torch.full_like(everyone, task))

    def kept(self) -> dict[str, Tensor]:
        """As `Method.kept` names them."""
        g_prompt = "g_prompt" if self._train.g_prompt == "always" or not self.pool.tasks else "task0/g_prompt"
        return {g_prompt: self.pool.g_prompt} | {
            f"task{number}/{name}": tensor
            for number, task in enumerate(self.pool.tasks)
            for name, tensor in task.tensors().items()
        }
