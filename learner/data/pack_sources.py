"""Which images does a source list, and under which labels?

Four kinds of source are understood:
- class folders, `CLASS/**/*.jpg` (torchvision ImageFolder), also inside split folders `train/ test/ validation/`;
- `metadata.csv` or `metadata.jsonl` with `file_name` and `label` (Hugging Face imagefolder), also in split folders;
- a .csv file, or a folder with a single one, with a column image, file, path or file_name and a column label or class.
Splits are merged: which images are held out is decided by their content, so that it never changes.
"""

import csv
import json
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from mqmk.learner.data.manifest import is_class_name
from mqmk.learner.errors import PackError
from mqmk.matcher.image_formats import EXTRA, suffixes

SPLITS: Final = ("train", "training", "test", "testing", "val", "valid", "validation", "dev", "eval")
METADATA: Final = ("metadata.csv", "metadata.jsonl")
PATH_COLUMNS: Final = ("file_name", "image", "file", "path", "filename")
LABEL_COLUMNS: Final = ("label", "class")
_JUNK = ("thumbs.db", "desktop.ini")


@dataclass(frozen=True)
class ImageFile:
    """A file to pack and the name of its class."""

    path: Path
    label: str


def find_images(source: Path) -> tuple[ImageFile, ...]:
    """Every file of a source and its class, sorted, whatever it holds; PackError says which row or class is wrong."""
    if not source.exists():
        raise PackError(f"{source}: no such file or folder; expected class folders, or a CSV with images")
    images = sorted(_list_images(source), key=lambda image: (image.path, image.label))
    if not images:
        raise PackError(_explain_empty(source))
    for before, image in zip([None, *images], images, strict=False):
        if before is not None and before.path == image.path:
            raise PackError(f"{image.path}: expected every image once, it is listed twice")
        if not is_class_name(image.label):
            raise PackError(f"{image.path}: expected a printable class name, got {image.label!r}; rename it")
    return tuple(images)


def expect_image_names(images: Iterable[ImageFile]) -> None:
    """PackError with every file that is not named like an image."""
    odd = [str(image.path) for image in images if image.path.suffix.lower()[1:] not in suffixes(())]
    if odd:
        raise PackError("\n  ".join([f"expected names that end in {', '.join(suffixes(()))}; rename or remove:", *odd]))


def layout_warnings(source: Path) -> list[str]:
    """Warnings about a layout that is probably not intended."""
    if not source.is_dir() or _find_tables(source):
        return []
    folders, loose = _list_folders(source), _find_loose_images(source)
    splits = [folder for folder in folders if folder.name.lower() in SPLITS]
    names = ", ".join(folder.name for folder in splits)
    nested = [folder for folder in splits if _list_folders(folder)]
    warnings = [f"{len(loose):,} images beside the class folders have no class and are left out, e.g. {loose[0].name}"
                ] if loose else []  # fmt: skip
    if nested and _find_splits(source):
        one = shlex.quote(str(nested[0]))
        warnings.append(f"{names} are merged: the daemon chooses its own held-out images (--holdout); to pack "
                        f"only one of them, run `mqmk-daemon pack {one} ...`")  # fmt: skip
    elif splits:
        one = shlex.quote(str((nested or splits)[0]))
        warnings.append(f"{names}: taken for the name of a class, but it looks like a train/test layout; to pack the "
                        f"classes in it, run `mqmk-daemon pack {one} ...`")  # fmt: skip
    return warnings


def _explain_empty(source: Path) -> str:
    if source.is_dir() and not _find_tables(source) and _find_loose_images(source):
        parent = shlex.quote(str(source.resolve().parent))
        return (
            f"{source}: holds images, not a folder for each class; type `mqmk-daemon pack {parent} ...` to pack all "
            f"classes beside {source.resolve().name}, or move the images into a folder named after their class"
        )
    return f"{source}: expected folders named after classes, metadata.csv or one .csv; found no image"


def _find_loose_images(folder: Path) -> list[Path]:
    """Files that look like images, directly in a folder."""
    endings = {f".{suffix}" for suffix in (*suffixes(EXTRA), "heic", "heif")}
    return sorted(path for path in folder.iterdir() if path.suffix.lower() in endings and path.is_file())


def _list_images(source: Path) -> Iterable[ImageFile]:
    """One choice for each kind of source, the most explicit first."""
    if source.is_file():
        return _read_table(source)
    if tables := _find_tables(source):
        return (image for table in tables for image in _read_table(table))
    splits = _find_splits(source)
    roots = splits if any(_list_folders(split) for split in splits) else [source]
    return (image for root in roots for folder in _list_folders(root) for image in _read_class(folder))


def _find_tables(source: Path) -> list[Path]:
    """The tables that say what is what, if there are any."""
    places = (source, *_find_splits(source))
    tables = [folder / name for folder in places for name in METADATA if (folder / name).is_file()]
    if not tables:
        tables = [path for path in sorted(source.glob("*.csv")) if not path.name.startswith(".")]
        if len(tables) > 1:
            raise PackError(f"{source}: expected one .csv, found {len(tables)}; name the one to pack")
    return tables


def _find_splits(source: Path) -> list[Path]:
    """The folders of a source if all of them are called like splits."""
    folders = _list_folders(source)
    return folders if all(folder.name.lower() in SPLITS for folder in folders) else []


def _list_folders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def _read_class(folder: Path) -> Iterator[ImageFile]:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and not _is_junk(path.relative_to(folder))]
    if not files:
        raise PackError(f"{folder}: expected images of class {folder.name}, the folder is empty; fill or remove it")
    return (ImageFile(path, folder.name) for path in files)


def _is_junk(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts) or path.name.lower() in _JUNK


def _read_table(table: Path) -> Iterator[ImageFile]:
    """The rows of a .csv or .jsonl; paths are relative to its folder and stay inside it."""
    home = table.parent.resolve()
    for number, row in _read_rows(table):
        name, label = _read_column(row, PATH_COLUMNS), _read_column(row, LABEL_COLUMNS)
        if not name or not label:
            wanted = f"a column {'/'.join(PATH_COLUMNS)} and a column {'/'.join(LABEL_COLUMNS)}"
            raise PackError(f"{table}, line {number}: expected {wanted}, both filled; got {str(row)[:100]}")
        path = (home / name).resolve()
        if not path.is_relative_to(home):
            raise PackError(f"{table}, line {number}: expected an image below {home}, got {name}")
        yield ImageFile(path, label)


def _read_rows(table: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        with table.open(encoding="utf-8-sig", newline="") as lines:
            if table.suffix.lower() == ".csv":
                yield from enumerate(csv.DictReader(lines), start=2)
            elif table.suffix.lower() == ".jsonl":
                yield from ((number, dict(json.loads(line))) for number, line in enumerate(lines, 1) if line.strip())
            else:
                raise PackError(f"{table}: expected a folder, a .csv or a .jsonl file")
    except (ValueError, TypeError, RecursionError, csv.Error) as error:
        raise PackError(f"{table}: expected rows with an image and a label: {error}") from error


def _read_column(row: dict[str, Any], names: tuple[str, ...]) -> str:
    """The first of these columns that the row has, as text; `0` is a label too."""
    values = {str(name).strip().lower(): value for name, value in row.items()}
    value = next((values[name] for name in names if name in values), None)
    return str(value).strip() if isinstance(value, str | int) and not isinstance(value, bool) else ""
