"""Small tasks for benchmark methods: images whose colour tells the class, and settings that learn them in no time."""

import torch

from mqmk.learner.bench.methods.parts.protocol import MethodSettings
from mqmk.learner.data.tasks import InMemory, Task
from mqmk.learner.settings import Augmentation, TrainSettings

QUICK = MethodSettings(
    TrainSettings(epochs=1, batch=4, e_length=3, augmentation=Augmentation(least_area=1.0, mirror=False)),
    width=24,
    replay=4,
    replay_epochs=1,
)


def coloured(labels: list[int], seed: int, size: int = 12) -> InMemory:
    """Noisy images, each around the colour of its label."""
    generator = torch.Generator().manual_seed(seed)
    colours = torch.rand(64, 3, 1, 1, generator=torch.Generator().manual_seed(7))
    noise = torch.rand(len(labels), 3, size, size, generator=generator)
    pixels = (0.7 * colours[torch.tensor(labels)] + 0.3 * noise) * 255
    return InMemory(pixels.to(torch.uint8), torch.tensor(labels) - min(labels))


def ragged_tasks(sizes: tuple[int, ...] = (3, 1, 2), images: int = 4, size: int = 12) -> list[Task]:
    """A task for each number of classes, all classes different."""
    tasks, first = [], 0
    for number, classes in enumerate(sizes):
        labels = [first + label for label in range(classes)]
        names = tuple(f"class{label}" for label in labels)
        training, held_out = (
            coloured(labels * count, 2 * number + seed, size) for seed, count in ((0, images), (1, 2))
        )
        tasks.append(Task(f"task{number}", names, training, held_out))
        first += classes
    return tasks


def learned(method, tasks):
    """The method after these tasks, one after another."""
    for task in tasks:
        method.learn(task)
    return method
