"""How a folder of pictures becomes a stream of tasks for the benchmark: `{train,test}/CLASS/*`, cut into N tasks."""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mqmk.learner.errors import LearnerError
from mqmk.learner.tasks import Decoded, Pictures, Task, pictures
from mqmk.matcher.images import decode
from mqmk.matcher.prompted_vit import BackboneInfo

PICTURES = (".jpg", ".jpeg", ".png", ".webp")


@dataclass(frozen=True)
class StreamSettings:
    """Which pictures, cut into how many tasks."""

    data: Path
    tasks: int = 10
    train_per_class: int | None = None
    test_per_class: int | None = None
    classes: int | None = None
    """How many classes the folder must have; None takes what is there."""


def class_folders(data: Path) -> list[str]:
    """The classes that have both a training and a test folder."""
    sides = [{path.name for path in (data / side).glob("*") if path.is_dir()} for side in ("train", "test")]
    if not sides[0] or sides[0] != sides[1]:
        raise LearnerError(
            f"{data}: expected train/CLASS/* and test/CLASS/* with the same classes, "
            f"found {len(sides[0])} classes to train on and {len(sides[1])} to test"
        )
    return sorted(sides[0])


def read_stream(settings: StreamSettings, info: BackboneInfo, seed: int) -> Iterator[Task]:
    """The tasks one after another; the seed decides which classes come together."""
    classes = class_folders(settings.data)
    if settings.classes not in (None, len(classes)):
        raise LearnerError(f"{settings.data}: expected {settings.classes} classes, found {len(classes)}")
    if not 1 <= settings.tasks <= len(classes):
        raise LearnerError(f"expected 1 to {len(classes)} tasks of {len(classes)} classes, got {settings.tasks}")
    random.Random(seed).shuffle(classes)
    for number in range(settings.tasks):
        own = classes[number * len(classes) // settings.tasks : (number + 1) * len(classes) // settings.tasks]
        yield Task(
            name=f"task{number:02d}",
            classes=tuple(own),
            training=_side(settings.data / "train", own, settings.train_per_class, info),
            held_out=_side(settings.data / "test", own, settings.test_per_class, info),
        )


def _side(folder: Path, classes: Sequence[str], per_class: int | None, info: BackboneInfo) -> Pictures:
    files = [
        sorted(p for p in (folder / name).iterdir() if p.suffix.lower() in PICTURES)[:per_class] for name in classes
    ]
    listed = [(path, label) for label, paths in enumerate(files) for path in paths]

    def read(seed: int | None) -> Iterable[Decoded]:
        order = list(listed)
        if seed is not None:
            random.Random(seed).shuffle(order)
        return ((decode(path.read_bytes()), label) for path, label in order)

    return pictures(tuple(len(paths) for paths in files), read, info)
