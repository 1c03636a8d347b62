"""What a demo learns: tasks with their pictures, and of every class some pictures that are only asked about."""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Final

from mqmk.daemon.errors import DaemonError
from mqmk.learner.pack import Picture, find_pictures

QUESTIONS_PER_CLASS: Final = 20
KEPT_BACK: Final = 5
"""Of one's own pictures every fifth is kept back for questions."""
LEAST_PICTURES: Final = 5
"""Of one's own classes: one for the questions, two or more for training, some for the daemon's own gate."""
MOST_TASKS: Final = 10


@dataclass(frozen=True)
class Question:
    """A picture that no task was learned from, and the truth about it."""

    path: Path
    label: str
    task: str


@dataclass(frozen=True)
class DemoTask:
    """A task that will be dropped into the bucket."""

    name: str
    classes: tuple[str, ...]
    write: Callable[[Path], Path]
    """Writes its class folders into a folder, ready to be packed, and returns it; without the questions' pictures."""
    questions: tuple[Question, ...]


def sketch_tasks(count: int, folder: Path, most_questions: int) -> list[DemoTask]:
    """The first tasks of the sketches in the package; the pictures of the questions are written below the folder."""
    from mqmk.learner import sketches

    if not 1 <= count <= len(sketches.TASKS):
        raise DaemonError(f"--tasks: expected 1 to {len(sketches.TASKS)} tasks of sketches, got {count}")
    chosen = dict(list(sketches.TASKS.items())[:count])
    each = _questions_per_class([label for classes in chosen.values() for label in classes], most_questions)
    return [
        DemoTask(
            name,
            classes,
            partial(sketches.write_class_folders, name, per_class=sketches.TRAINING),
            tuple(question for label in classes for question in _sketch_questions(folder / name, name, label, each)),
        )
        for name, classes in chosen.items()
    ]


def _sketch_questions(folder: Path, task: str, label: str, count: int) -> Iterable[Question]:
    from PIL import Image

    from mqmk.learner import sketches

    (folder / label).mkdir(parents=True, exist_ok=True)
    for number, drawing in enumerate(sketches.read(label).held_out[:count], start=sketches.TRAINING):
        path = folder / label / f"{number:03}.png"
        Image.fromarray(drawing).save(path)
        yield Question(path, label, task)


def own_tasks(source: Path, count: int | None, most_questions: int) -> list[DemoTask]:
    """A folder of class folders as several tasks: classes in the order of their names, as many in each as goes."""
    by_label: dict[str, list[Picture]] = {}
    for picture in find_pictures(source):
        by_label.setdefault(picture.label, []).append(picture)
    for label, pictures in by_label.items():
        if len(pictures) < LEAST_PICTURES:
            raise DaemonError(
                f"{source}: expected at least {LEAST_PICTURES} pictures of every class, {label} has {len(pictures)}; "
                "add some, or remove the class"
            )
    labels = sorted(by_label)
    parts = _split(labels, _task_count(source, len(labels), count))
    each = _questions_per_class(labels, most_questions)
    width = len(str(len(parts)))
    return [
        _own_task(f"part-{number:0{width}}", part, by_label, each)
        for number, part in enumerate(parts, start=1)
    ]  # fmt: skip


def _task_count(source: Path, classes: int, wanted: int | None) -> int:
    """Two classes or more in a task, unless there is only one."""
    most = max(1, classes // 2)
    if wanted is None:
        return min(MOST_TASKS, most)
    if not 1 <= wanted <= most:
        raise DaemonError(f"--tasks: {source} has {classes} classes, expected 1 to {most} tasks, got {wanted}")
    return wanted


def _split(labels: Sequence[str], parts: int) -> list[tuple[str, ...]]:
    ends = [len(labels) * number // parts for number in range(parts + 1)]
    return [tuple(labels[begin:end]) for begin, end in pairwise(ends)]


def _own_task(name: str, labels: tuple[str, ...], by_label: Mapping[str, Sequence[Picture]], each: int) -> DemoTask:
    learned: dict[str, list[Path]] = {}
    questions: list[Question] = []
    for label in labels:
        asked, learned[label] = _kept_back([picture.path for picture in by_label[label]])
        questions += [Question(path, label, name) for path in asked[:each]]
    return DemoTask(name, labels, partial(_link, learned), tuple(questions))


def _kept_back(paths: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """Which pictures are asked about, and which are learned from: by content, so that copies stay on one side.

    Those with the largest hashes are asked about: the smallest are what the daemon holds out to judge the task by.
    """
    by_content: dict[str, list[Path]] = {}
    for path in paths:
        by_content.setdefault(hashlib.sha256(path.read_bytes()).hexdigest(), []).append(path)
    contents = sorted(by_content, reverse=True)
    count = max(1, min(QUESTIONS_PER_CLASS, len(contents) // KEPT_BACK))
    asked = [by_content[content][0] for content in contents[:count]]
    return asked, [path for content in contents[count:] for path in by_content[content]]


def _link(pictures: Mapping[str, Sequence[Path]], folder: Path) -> Path:
    for label, paths in pictures.items():
        (folder / label).mkdir(parents=True, exist_ok=True)
        for number, path in enumerate(paths):
            (folder / label / f"{number:06}-{path.name}").symlink_to(path.resolve())
    return folder


def _questions_per_class(labels: Sequence[str], most: int) -> int:
    """The same pictures are asked about after every task, so that what was forgotten is told picture by picture."""
    if most < len(labels):
        raise DaemonError(f"--questions: expected at least one for each of {len(labels)} classes, got {most}")
    return min(QUESTIONS_PER_CLASS, most // len(labels))
