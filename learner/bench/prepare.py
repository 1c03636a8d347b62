"""The paper's data sets as `{train,test}/CLASS/*`, split as published: `mqmk-daemon bench prepare`.

| data set   | what SRC is                                                    | split                                 |
|------------|----------------------------------------------------------------|---------------------------------------|
| cifar100   | `cifar-100-binary`: train.bin, test.bin, fine_label_names.txt  | its own                               |
| imagenet-r | `imagenet-r`: a folder for each class                          | lists in SRC, else drawn as published |
| domainnet  | `domainnet`: clipart/CLASS/*, ..., with train.txt and test.txt | lists in SRC                          |

Lists are train.txt and test.txt with a file and a label a line, as ESN publishes them for DomainNet-200 and CPrompt for
ImageNet-R (CODA's split). Without lists ImageNet-R is split as the published code of MQMK does it: four fifths of all
images, sorted by class and name, in torch's random order of seed 42.
"""

import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Final

import numpy as np
import torch
from PIL import Image

from mqmk.learner.bench.presets import CIFAR100, DOMAINNET, IMAGENET_R
from mqmk.learner.data.streams import IMAGE_SUFFIXES
from mqmk.learner.errors import LearnerError

SEED: Final = 42
RECORD: Final = 2 + 3 * 32 * 32  # bytes: coarse label, fine label, pixels
LISTS: Final = ("train.txt", "test.txt")


@dataclass(frozen=True)
class Item:
    """One image to write."""

    side: str
    label: str
    name: str
    write: Callable[[Path], object]


@dataclass(frozen=True)
class Size:
    """Classes, and images to train on and to test with."""

    classes: int
    train: int
    test: int

    def __str__(self) -> str:
        return f"{self.classes:,} classes, {self.train:,} and {self.test:,} images"


def prepare(name: str, source: Path, target: Path, expected: Size | None = None) -> Size:
    """Write the data set; LearnerError if anything is not as published, and then nothing is left in the target."""
    expected = expected or SIZES[name]
    if target.exists() and any(target.iterdir()):
        raise LearnerError(f"{target}: expected an empty folder or none; choose another one")
    items = list(READERS[name](source))
    found = _measure(items)
    if found != expected:
        raise LearnerError(f"{source}: expected {expected} as published, found {found}; is it the whole data set?")
    target.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as folder:
        written = Path(folder) / "data"
        for item in items:
            path = written / item.side / item.label / item.name
            path.parent.mkdir(parents=True, exist_ok=True)
            item.write(path)
        if target.exists():
            target.rmdir()
        written.rename(target)
    return found


def _measure(items: list[Item]) -> Size:
    """The size; refuses two images of one name and a class that is on one side only."""
    twice = [place for place, count in Counter((each.label, each.name) for each in items).items() if count > 1]
    if twice:
        raise LearnerError(f"expected every image once, found {'/'.join(twice[0])} twice, and {len(twice) - 1} more")
    sides = {side: {each.label for each in items if each.side == side} for side in ("train", "test")}
    if alone := sides["train"] ^ sides["test"]:
        raise LearnerError(f"expected every class on both sides, found {', '.join(sorted(alone)[:5])} on one only")
    counts = Counter(each.side for each in items)
    return Size(len(sides["train"]), counts["train"], counts["test"])


def _read_cifar100(source: Path) -> Iterator[Item]:
    if (source / "meta").exists():
        raise LearnerError(
            f"{source}: expected the binary version (cifar-100-binary.tar.gz), found the Python version, a pickle, "
            "which can run code when it is read"
        )
    names = _read_lines(source / "fine_label_names.txt")
    for side in ("train", "test"):
        data = _read_bytes(source / f"{side}.bin")
        if len(data) % RECORD:
            raise LearnerError(f"{source / side}.bin: expected records of {RECORD} bytes, found {len(data)} bytes")
        for number, record in enumerate(np.frombuffer(data, dtype=np.uint8).reshape(-1, RECORD)):
            if record[1] >= len(names):
                raise LearnerError(f"{source / side}.bin: expected labels below {len(names)}, found {record[1]}")
            image = Image.fromarray(record[2:].reshape(3, 32, 32).transpose(1, 2, 0).copy())
            yield Item(side, names[record[1]], f"{side}-{number:05}.png", image.save)


def _read_imagenet_r(source: Path) -> Iterator[Item]:
    if any((source / name).exists() for name in LISTS):
        yield from _read_lists(source, numbered=False)
        return
    classes = sorted(path for path in source.glob("[!.]*") if path.is_dir())
    files = [path for folder in classes for path in sorted(folder.iterdir()) if path.suffix.lower() in IMAGE_SUFFIXES]
    if not files:
        raise LearnerError(f"{source}: expected a folder of images for each class, found no image")
    order = torch.randperm(len(files), generator=torch.Generator().manual_seed(SEED)).tolist()
    for place, number in enumerate(order):
        side = "train" if place < int(0.8 * len(files)) else "test"
        yield _copy(side, files[number].parent.name, files[number])


def _read_lists(source: Path, numbered: bool = True) -> Iterator[Item]:
    """The files that train.txt and test.txt name; numbered, folders sort in the order of the labels."""
    names: dict[int, str] = {}
    for side, name in (("train", LISTS[0]), ("test", LISTS[1])):
        for number, line in enumerate(_read_lines(source / name), start=1):
            where = f"{source / name}, line {number}"
            file, _, label = line.rpartition(" ")
            path = PurePosixPath(file)
            if not label.isdecimal() or path.is_absolute() or ".." in path.parts or len(path.parts) < 2:
                raise LearnerError(f"{where}: expected a file below {source} and a label, not {line!r}")
            folder = path.parts[-2]
            if names.setdefault(int(label), folder) != folder:
                raise LearnerError(f"{where}: label {label} is {names[int(label)]} elsewhere, and {folder} here")
            if not (source / path).is_file():
                raise LearnerError(f"{where}: no such file: {source / path}")
            yield _copy(side, f"{int(label):03}_{folder}" if numbered else folder, source / path)


def _copy(side: str, label: str, path: Path) -> Item:
    return Item(side, label, path.name, lambda target: shutil.copyfile(path, target))


def _read_lines(path: Path) -> list[str]:
    return [line.strip() for line in _read_bytes(path).decode(errors="replace").splitlines() if line.strip()]


def _read_bytes(path: Path) -> bytes:
    if not path.is_file():
        raise LearnerError(f"{path}: no such file; `mqmk-daemon bench prepare --help` says what a source consists of")
    return path.read_bytes()


READERS: Final[dict[str, Callable[[Path], Iterator[Item]]]] = {
    "cifar100": _read_cifar100,
    "imagenet-r": _read_imagenet_r,
    "domainnet": _read_lists,
}
SIZES: Final = {
    "cifar100": Size(100, *CIFAR100),
    "imagenet-r": Size(200, *IMAGENET_R),
    "domainnet": Size(200, *DOMAINNET),
}
