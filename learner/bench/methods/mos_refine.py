"""MOS's self-refined retrieval on our prompts: guess a task, use its prompt, and go on while the head disagrees.

The first guess is the nearest class mean under the first task's prompt. The head is aligned over all tasks on Gaussian
samples of prompted features.
"""

from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor

from mqmk.learner.bench.methods.parts.gaussians import COSINE_RATE, TaskGaussians, replay
from mqmk.learner.bench.methods.parts.heads import cosines, row_tasks
from mqmk.learner.bench.methods.parts.protocol import Answer, MethodInfo, MethodSettings, Published
from mqmk.learner.bench.methods.parts.trained_pool import TrainedPool
from mqmk.learner.bench.methods.parts.training import collect, iterate
from mqmk.learner.data.tasks import Task
from mqmk.learner.training.class_statistics import ClassMeans
from mqmk.matcher.prompted_vit import FrozenViT

PASSES: Final = 3


class MosRefine:
    """Our pool, Gaussians under each class's own prompt, means under the first prompt, and an aligned head."""

    def __init__(self, vit: FrozenViT, settings: MethodSettings, passes: int = PASSES) -> None:
        self._vit, self._settings, self._passes = vit, settings, passes
        self._trained = TrainedPool(vit, settings)
        self._gaussians: list[TaskGaussians] = []
        self._first_means: list[Tensor] = []
        self._head = torch.zeros(0)

    @property
    def trained(self) -> int:
        """How many numbers the last task trained."""
        return self._trained.trained + self._head.numel()

    def learn(self, task: Task) -> None:
        """Train the task's prompt, add its statistics, and align the head from the pool's rows."""
        self._trained.learn(task)
        newest, batch = len(self._gaussians), self._settings.train.batch
        found = collect(self._vit, task.training, batch, lambda images: self._trained.task_query(images, newest))
        self._gaussians.append(TaskGaussians.fit(task.classes, *found))
        means = ClassMeans(len(task.classes), self._vit.dim, self._vit.device)
        with torch.no_grad():
            for images, labels in iterate(self._vit, task.training, batch):
                means.add(self._trained.task_query(images, 0), labels)
        self._first_means.append(means.value())
        self._head = self._trained.pool.head.clone()
        if newest:
            replay(self._gaussians, self._settings, [self._head], self._aligned, COSINE_RATE)

    @torch.no_grad()
    def predict(self, images: Float[Tensor, "batch 3 height width"]) -> Answer:
        """Aligned head and prototypes together; the matched task is the last one whose prompt was used."""
        queries, tasks = self._trained.queries(images), len(self._gaussians)
        row_task = row_tasks([len(known.means) for known in self._gaussians], self._vit.device)
        query = queries.task_queries(torch.arange(len(images)), torch.zeros(len(images), dtype=torch.int64))
        if tasks == 1:
            return Answer(self._aligned(query), row_task[torch.zeros(len(images), dtype=torch.int64)])
        by_mean = cosines(query, torch.cat(self._first_means))
        wanted = row_task[by_mean.argmax(dim=1)]
        task = torch.zeros_like(wanted)  # the prompt that `query` was computed with
        for _ in range(self._passes - 1):
            moved = (wanted != task).nonzero()[:, 0]
            if len(moved):
                query[moved] = queries.task_queries(moved.cpu(), wanted[moved].cpu())
            task = wanted
            wanted = row_task[self._aligned(query).argmax(dim=1)]
        both = self._aligned(query).softmax(dim=1) + (tasks * by_mean).softmax(dim=1)
        return Answer(both, task)

    def kept(self) -> dict[str, Tensor]:
        """Only the head is made anew at every version."""
        tensors = self._trained.kept() | {"aligned": self._head}
        for number, (known, first) in enumerate(zip(self._gaussians, self._first_means, strict=True)):
            tensors |= {f"{name}/prompted": value for name, value in known.kept(number).items()}
            tensors[f"task{number}/first_means"] = first
        return tensors

    def _aligned(self, query: Float[Tensor, "batch dim"]) -> Float[Tensor, "batch classes"]:
        return self._trained.pool.logit_scale * cosines(query, self._head)


METHODS: Final = (
    MethodInfo(
        "mos-refine",
        "pool",
        "MOS's retrieval with our prompts: guess a task, look with its prompt, look again; at most 3 passes",
        MosRefine,
        Published("MOS's log, ViT-B/16-IN21K", imagenet_r=77.83),
        ("our e-prompts in place of adapters; at most 3 passes where the reference has 5; a cosine head",),
        epoch_passes=(1.9, 1.9),
        test_passes=0.5,
        shares_pool=True,
        rounds=3,
    ),
)
