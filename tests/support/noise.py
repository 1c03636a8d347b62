"""Held-out images of noise, and a count of the queries that a test causes."""

import torch

from mqmk.learner.evaluation.sample import Sample, TaskImages, image_ids
from mqmk.learner.evaluation.sample_matches import ReadPixels
from mqmk.matcher.pool import PromptPool
from mqmk.matcher.prompted_vit import FrozenViT


class Noise:
    """Held-out images of noise, a few of each class."""

    def __init__(self, pool: PromptPool, per_class: int | tuple[int, ...]) -> None:
        self.pixels: list[torch.Tensor] = []
        self.tasks: list[TaskImages] = []
        numbers = per_class if isinstance(per_class, tuple) else (per_class,) * len(pool.tasks)
        for number, task in enumerate(pool.tasks):
            self.add(len(task.classes), numbers[number] if number < len(numbers) else 0)

    def add(self, classes: int, per_class: int) -> None:
        labels = torch.arange(classes).repeat(per_class)
        self.pixels.append(torch.randint(0, 256, (len(labels), 3, 12, 12), dtype=torch.uint8))
        self.tasks.append(TaskImages.of(image_ids(self.pixels[-1]), labels))

    def reader(self, sample: Sample) -> ReadPixels:
        def read(rows: torch.Tensor) -> torch.Tensor:
            return torch.stack([self.pixels[int(sample.task[row])][int(sample.place[row])] for row in rows])

        return read


def count_queries(vit: FrozenViT) -> list[int]:
    """For how many rows each pass from now on computes a query."""
    rows: list[int] = []
    run_query = vit.query
    vit.query = lambda stem, *prompts: (rows.append(len(stem)), run_query(stem, *prompts))[1]  # type: ignore[method-assign]
    return rows
