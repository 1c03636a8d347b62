"""What a demo learns: tasks, and unseen images of every class that are only predicted."""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Final

from mqmk.daemon.errors import DaemonError
from mqmk.learner.data.pack_sources import ImageFile, expect_image_names, find_images

IMAGES_PER_CLASS: Final = 20
KEPT_BACK: Final = 5
"""Of the user's own images, one in five is kept back as unseen."""
MIN_IMAGES: Final = 5
"""Per class of the user's own images: one unseen, two or more for training, some for the daemon's own gate."""
MAX_TASKS: Final = 10


@dataclass(frozen=True)
class UnseenImage:
    """An image that no task was learned from, with its true label and task."""

    path: Path
    label: str
    task: str


@dataclass(frozen=True)
class DemoTask:
    """A task that will be dropped into the bucket."""

    name: str
    classes: tuple[str, ...]
    write: Callable[[Path], Path]
    """Writes class folders without the unseen images into a folder, ready to be packed, and returns it."""
    unseen: tuple[UnseenImage, ...]


def sketch_tasks(count: int, folder: Path, max_images: int) -> list[DemoTask]:
    """The first tasks of the packaged sketches; their unseen images are written below the folder."""
    from mqmk.learner.data import sketches

    if not 1 <= count <= len(sketches.TASKS):
        raise DaemonError(f"--tasks: expected 1 to {len(sketches.TASKS)} tasks of sketches, got {count}")
    chosen = dict(list(sketches.TASKS.items())[:count])
    each = _images_per_class([label for classes in chosen.values() for label in classes], max_images)
    return [
        DemoTask(
            name,
            classes,
            partial(sketches.write_class_folders, name, per_class=sketches.TRAINING),
            tuple(image for label in classes for image in _write_unseen_sketches(folder / name, name, label, each)),
        )
        for name, classes in chosen.items()
    ]


def _write_unseen_sketches(folder: Path, task: str, label: str, count: int) -> Iterable[UnseenImage]:
    from PIL import Image

    from mqmk.learner.data import sketches

    (folder / label).mkdir(parents=True, exist_ok=True)
    for number, drawing in enumerate(sketches.read(label).held_out[:count], start=sketches.TRAINING):
        path = folder / label / f"{number:03}.png"
        Image.fromarray(drawing).save(path)
        yield UnseenImage(path, label, task)


def own_tasks(source: Path, count: int | None, max_images: int) -> list[DemoTask]:
    """A folder of class folders as several tasks of about equal size: classes in order of their names."""
    by_label: dict[str, list[ImageFile]] = {}
    found = find_images(source)
    expect_image_names(found)
    for image in found:
        by_label.setdefault(image.label, []).append(image)
    for label, images in by_label.items():
        if len(images) < MIN_IMAGES:
            raise DaemonError(
                f"{source}: expected at least {MIN_IMAGES} images of every class, {label} has {len(images)}; "
                "add some, or remove the class"
            )
    labels = sorted(by_label)
    parts = _split(labels, _task_count(source, len(labels), count))
    each = _images_per_class(labels, max_images)
    width = len(str(len(parts)))
    return [
        _own_task(f"part-{number:0{width}}", part, by_label, each)
        for number, part in enumerate(parts, start=1)
    ]  # fmt: skip


def _task_count(source: Path, classes: int, wanted: int | None) -> int:
    """Two or more classes per task, unless there is only one."""
    most = max(1, classes // 2)
    if wanted is None:
        return min(MAX_TASKS, most)
    if not 1 <= wanted <= most:
        raise DaemonError(f"--tasks: {source} has {classes} classes, expected 1 to {most} tasks, got {wanted}")
    return wanted


def _split(labels: Sequence[str], parts: int) -> list[tuple[str, ...]]:
    ends = [len(labels) * number // parts for number in range(parts + 1)]
    return [tuple(labels[begin:end]) for begin, end in pairwise(ends)]


def _own_task(name: str, labels: tuple[str, ...], by_label: Mapping[str, Sequence[ImageFile]], each: int) -> DemoTask:
    learned: dict[str, list[Path]] = {}
    unseen: list[UnseenImage] = []
    for label in labels:
        kept, learned[label] = _split_images([image.path for image in by_label[label]])
        unseen += [UnseenImage(path, label, name) for path in kept[:each]]
    return DemoTask(name, labels, partial(_link, learned), tuple(unseen))


def _split_images(paths: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """Unseen images, and those to learn from: by content, so that copies stay on one side.

    Unseen are those with the largest hashes: the daemon itself holds out the smallest.
    """
    by_content: dict[str, list[Path]] = {}
    for path in paths:
        by_content.setdefault(hashlib.sha256(path.read_bytes()).hexdigest(), []).append(path)
    contents = sorted(by_content, reverse=True)
    count = max(1, min(IMAGES_PER_CLASS, len(contents) // KEPT_BACK))
    unseen = [by_content[content][0] for content in contents[:count]]
    return unseen, [path for content in contents[count:] for path in by_content[content]]


def _link(images: Mapping[str, Sequence[Path]], folder: Path) -> Path:
    for label, paths in images.items():
        (folder / label).mkdir(parents=True, exist_ok=True)
        for number, path in enumerate(paths):
            (folder / label / f"{number:06}-{path.name}").symlink_to(path.resolve())
    return folder


def _images_per_class(labels: Sequence[str], most: int) -> int:
    """The same number for every class and after every task, so that forgetting is measured on the same images."""
    if most < len(labels):
        raise DaemonError(f"--questions: expected at least one for each of {len(labels)} classes, got {most}")
    return min(IMAGES_PER_CLASS, most // len(labels))
