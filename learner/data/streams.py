"""How folders of images become tasks: `CLASS/*` one task, `{train,test}/CLASS/*` a stream of N for the benchmark."""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from PIL import Image

from mqmk.learner.data.pack_sources import SPLITS
from mqmk.learner.data.tasks import Decoded, ImageSet, Task, load_images
from mqmk.learner.errors import LearnerError
from mqmk.matcher.errors import ImageError
from mqmk.matcher.image_formats import suffixes
from mqmk.matcher.images import decode
from mqmk.matcher.prompted_vit import BackboneInfo

IMAGE_SUFFIXES: Final = tuple(f".{suffix}" for suffix in suffixes(()))


@dataclass(frozen=True)
class StreamSettings:
    """Which images, cut into how many tasks."""

    data: Path
    tasks: int = 10
    train_per_class: int | None = None
    test_per_class: int | None = None
    classes: int | None = None
    """How many classes the folder must have; None takes what is there."""
    shuffle: bool = True
    """Whether the seed decides which classes come together; else they come in the order of their names."""
    least_area: float | None = None
    """The smallest random crop of an original image in training, as a share of it; None trains on centre crops, which
    augmentation may crop further."""


def list_classes(data: Path) -> list[str]:
    """The classes that have both a training and a test folder."""
    sides = [{path.name for path in (data / side).glob("*") if path.is_dir()} for side in ("train", "test")]
    if not sides[0] or sides[0] != sides[1]:
        raise LearnerError(
            f"{data}: expected train/CLASS/* and test/CLASS/* with the same classes, "
            f"found {len(sides[0])} classes to train on and {len(sides[1])} to test"
        )
    return sorted(sides[0])


def count_images(settings: StreamSettings) -> tuple[int, int]:
    """How many images there are to train on and to test with."""

    def count(side: str, most: int | None) -> int:
        return sum(len(_image_files(settings.data / side / name)[:most]) for name in list_classes(settings.data))

    return count("train", settings.train_per_class), count("test", settings.test_per_class)


def read_stream(settings: StreamSettings, info: BackboneInfo, seed: int) -> Iterator[Task]:
    """The tasks one after another; the seed decides which classes come together."""
    classes = list_classes(settings.data)
    if settings.classes not in (None, len(classes)):
        raise LearnerError(f"{settings.data}: expected {settings.classes} classes, found {len(classes)}")
    if not 1 <= settings.tasks <= len(classes):
        raise LearnerError(f"expected 1 to {len(classes)} tasks of {len(classes)} classes, got {settings.tasks}")
    if settings.shuffle:
        random.Random(seed).shuffle(classes)
    for number in range(settings.tasks):
        chosen = classes[number * len(classes) // settings.tasks : (number + 1) * len(classes) // settings.tasks]
        yield Task(
            name=f"task{number:02d}",
            classes=tuple(chosen),
            training=_load_side(settings.data / "train", chosen, settings.train_per_class, info, settings.least_area),
            held_out=_load_side(settings.data / "test", chosen, settings.test_per_class, info),
        )


def read_class_folders(task: str, folder: Path, info: BackboneInfo) -> Task:
    """One task from a folder of class folders; nothing is held out."""
    classes = sorted(path.name for path in folder.glob("[!.]*") if path.is_dir())
    if not classes:
        raise LearnerError(f"{folder}: expected a folder of images for each class, found no folder")
    if all(name.lower() in SPLITS for name in classes):
        raise LearnerError(f"{folder}: expected class folders, found splits; give one of {', '.join(classes)}")
    if empty := [name for name in classes if not _image_files(folder / name)]:
        raise LearnerError(f"{folder}: expected {', '.join(IMAGE_SUFFIXES)} files, found none of {', '.join(empty)}")
    return Task(task, tuple(classes), _load_side(folder, classes, None, info), _load_side(folder, (), None, info))


def decode_file(path: Path) -> Image.Image:
    """An image from its file, as RGB; ImageError names the file."""
    try:
        return decode(path.read_bytes())
    except ImageError as error:
        raise ImageError(f"{path}: {error}") from error


def _image_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix.lower() in IMAGE_SUFFIXES)


def read_joint(settings: StreamSettings, info: BackboneInfo, seed: int) -> Task:
    """All classes as one task, in the order in which a stream has them."""
    (task,) = read_stream(replace(settings, tasks=1), info, seed)
    return replace(task, name="joint")


def _load_side(
    folder: Path, classes: Sequence[str], per_class: int | None, info: BackboneInfo, least_area: float | None = None
) -> ImageSet:
    files = [_image_files(folder / name)[:per_class] for name in classes]
    listed = [(path, label) for label, paths in enumerate(files) for path in paths]

    def read(seed: int | None) -> Iterable[Decoded]:
        order = list(listed)
        if seed is not None:
            random.Random(seed).shuffle(order)
        return ((decode_file(path), label) for path, label in order)

    return load_images(tuple(len(paths) for paths in files), read, info, least_area)
