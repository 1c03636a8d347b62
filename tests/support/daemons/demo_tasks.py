"""The demo's sketches as tasks, and noise for tests that do not depend on accuracy."""

import torch

from mqmk.learner.data import sketches
from mqmk.learner.data.tasks import InMemory, Task


def side(name: str, part: str, per_class: int | None = None) -> InMemory:
    drawings = [torch.tensor(getattr(sketches.read(label), part))[:per_class] for label in sketches.TASKS[name]]
    labels = torch.arange(len(drawings)).repeat_interleave(len(drawings[0]))
    return InMemory(torch.cat(drawings)[:, None].repeat(1, 3, 1, 1), labels)


def demo_task(name: str, per_class: int | None = None) -> Task:
    training, held_out = side(name, "training", per_class), side(name, "held_out", per_class)
    return Task(name, sketches.TASKS[name], training, held_out, manifest_sha256="ab" * 32)


def noise(*sizes: int, pixels: int = 12) -> InMemory:
    """Random images, `sizes[i]` of class i."""
    labels = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes, dtype=torch.int64))
    return InMemory(torch.randint(0, 256, (len(labels), 3, pixels, pixels), dtype=torch.uint8), labels)


def noise_task(*sizes: int, name: str = "noise", pixels: int = 12) -> Task:
    """A task of random images without held-out images."""
    classes = tuple(f"{name} {number}" for number in range(len(sizes)))
    return Task(name, classes, noise(*sizes, pixels=pixels), noise(pixels=pixels), manifest_sha256="ab" * 32)
