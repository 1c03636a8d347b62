"""How a folder of pictures becomes a task: WebDataset shards and TASK.json, complete or not there at all.

Four kinds of source are understood:
- class folders, `CLASS/**/*.jpg` (torchvision ImageFolder), also inside split folders `train/ test/ validation/`;
- `metadata.csv` or `metadata.jsonl` with `file_name` and `label` (Hugging Face imagefolder), also in split folders;
- a .csv file, or a folder with a single one, with a column image, file, path or file_name and a column label or class.
Splits are put together: which pictures are held out is decided by their content, so that it never changes.

Packing the same pictures twice gives the same bytes: fixed times and owners, and an order by the hash of the path,
which also mixes the classes, so that a small shuffle buffer is enough in training.
"""

import csv
import hashlib
import io
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from webdataset.writer import ShardWriter

from mqmk.learner.errors import PackError, TaskRejected
from mqmk.learner.manifest import DEFAULT_HOLDOUT, FILE_NAME, Manifest, Shard, is_class_name, is_safe_name
from mqmk.learner.shards import IMAGES, open_picture
from mqmk.matcher.durable import sync_folder, write_file
from mqmk.matcher.errors import ImageError

DEFAULT_SHARD_BYTES: Final = 256 * 2**20
SPLITS: Final = ("train", "training", "test", "testing", "val", "valid", "validation", "dev", "eval")
METADATA: Final = ("metadata.csv", "metadata.jsonl")
PATH_COLUMNS: Final = ("file_name", "image", "file", "path", "filename")
LABEL_COLUMNS: Final = ("label", "class")
_JUNK = ("thumbs.db", "desktop.ini")

Progress = Callable[[int, int], None]  # pictures done, pictures in all


@dataclass(frozen=True)
class Picture:
    """A file to pack and the name of its class."""

    path: Path
    label: str


def pack(
    source: Path,
    dest: Path,
    task: str,
    *,
    holdout: float = DEFAULT_HOLDOUT,
    shard_size: int = DEFAULT_SHARD_BYTES,
    progress: Progress | None = None,
    created: str | None = None,
) -> Manifest:
    """Write the task `dest/<task>/` (dest is the bucket's `tasks` folder) and return its manifest.

    A shard is closed once its pictures reach `shard_size` bytes. Nothing appears in dest before everything is written.
    """
    if not is_safe_name(task):
        raise PackError(
            f"expected a task name of letters, digits and - _ . or space, got {task!r}; choose another --task"
        )
    if not 0 <= holdout < 1 or shard_size < 1:
        raise PackError(f"expected 0 <= holdout < 1 and a shard size above 0, got {holdout} and {shard_size}")
    final = dest / task
    if final.exists():
        raise PackError(f"{final} exists, and tasks are never overwritten; choose another --task or remove it yourself")
    pictures = find_pictures(source)
    dest.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=".part-", dir=dest))
    try:
        shards = _write_shards(_in_order(pictures, source), part, task, shard_size, progress)
        classes = tuple(sorted({picture.label for picture in pictures}))
        created = created or datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        manifest = _manifest(task, classes, shards, created, holdout)
        _publish(part, final, manifest)
        return manifest
    finally:
        shutil.rmtree(part, ignore_errors=True)


def find_pictures(source: Path) -> tuple[Picture, ...]:
    """Every picture of a source and its class, sorted; PackError says which file or class is wrong."""
    if not source.exists():
        raise PackError(f"{source}: no such file or folder; expected class folders, or a CSV with pictures")
    pictures = sorted(_listed(source), key=lambda picture: (picture.path, picture.label))
    if not pictures:
        raise PackError(f"{source}: expected folders named after classes, metadata.csv or one .csv; found no picture")
    for before, picture in zip([None, *pictures], pictures, strict=False):
        if before is not None and before.path == picture.path:
            raise PackError(f"{picture.path}: expected every picture once, it is listed twice")
        _check(picture)
    return tuple(pictures)


def _listed(source: Path) -> Iterable[Picture]:
    """One choice for each kind of source, the most explicit first."""
    if source.is_file():
        return _from_table(source)
    folders = _folders(source)
    splits = folders if folders and all(folder.name.lower() in SPLITS for folder in folders) else []
    tables = [folder / name for folder in (source, *splits) for name in METADATA if (folder / name).is_file()]
    if not tables:
        tables = [path for path in sorted(source.glob("*.csv")) if not path.name.startswith(".")]
        if len(tables) > 1:
            raise PackError(f"{source}: expected one .csv, found {len(tables)}; name the one to pack")
    if tables:
        return (picture for table in tables for picture in _from_table(table))
    roots = splits if any(_folders(split) for split in splits) else [source]
    return (picture for root in roots for folder in _folders(root) for picture in _from_class(folder))


def _folders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def _from_class(folder: Path) -> Iterator[Picture]:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and not _is_junk(path.relative_to(folder))]
    if not files:
        raise PackError(f"{folder}: expected pictures of class {folder.name}, the folder is empty; fill or remove it")
    return (Picture(path, folder.name) for path in files)


def _is_junk(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts) or path.name.lower() in _JUNK


def _from_table(table: Path) -> Iterator[Picture]:
    """The rows of a .csv or .jsonl; paths are relative to its folder and stay inside it."""
    home = table.parent.resolve()
    for number, row in _rows(table):
        name, label = _column(row, PATH_COLUMNS), _column(row, LABEL_COLUMNS)
        if not name or not label:
            wanted = f"a column {'/'.join(PATH_COLUMNS)} and a column {'/'.join(LABEL_COLUMNS)}"
            raise PackError(f"{table}, line {number}: expected {wanted}, both filled; got {str(row)[:100]}")
        path = (home / name).resolve()
        if not path.is_relative_to(home):
            raise PackError(f"{table}, line {number}: expected a picture below {home}, got {name}")
        yield Picture(path, label)


def _rows(table: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        with table.open(encoding="utf-8-sig", newline="") as lines:
            if table.suffix.lower() == ".csv":
                yield from enumerate(csv.DictReader(lines), start=2)
            elif table.suffix.lower() == ".jsonl":
                yield from ((number, dict(json.loads(line))) for number, line in enumerate(lines, 1) if line.strip())
            else:
                raise PackError(f"{table}: expected a folder, a .csv or a .jsonl file")
    except (ValueError, TypeError, RecursionError, csv.Error) as error:
        raise PackError(f"{table}: expected rows with a picture and a label: {error}") from error


def _column(row: dict[str, Any], names: tuple[str, ...]) -> str:
    """The first of these columns that the row has, as text; `0` is a label too."""
    values = {str(name).strip().lower(): value for name, value in row.items()}
    value = next((values[name] for name in names if name in values), None)
    return str(value).strip() if isinstance(value, str | int) and not isinstance(value, bool) else ""


def _check(picture: Picture) -> None:
    if not is_class_name(picture.label):
        raise PackError(f"{picture.path}: expected a printable class name, got {picture.label!r}; rename it")
    if picture.path.suffix.lower()[1:] not in IMAGES:
        raise PackError(
            f"{picture.path}: expected jpg, png or webp; convert it (`magick mogrify -format png`) or remove it"
        )


def _in_order(pictures: tuple[Picture, ...], source: Path) -> list[Picture]:
    """By the hash of the path below the source: always the same, and the classes are mixed."""
    home = (source.parent if source.is_file() else source).resolve()

    def place(picture: Picture) -> bytes:
        return hashlib.sha256(os.path.relpath(picture.path.resolve(), home).encode(errors="surrogateescape")).digest()

    return sorted(pictures, key=place)


def _write_shards(
    pictures: list[Picture], folder: Path, task: str, shard_size: int, progress: Progress | None
) -> tuple[Shard, ...]:
    files: list[_HashingFile] = []

    def opened(name: str) -> _HashingFile:
        files.append(_HashingFile((folder / name).open("xb"), name))
        return files[-1]

    def written(_name: str) -> None:
        files[-1].close()  # at once: a large task has more shards than a process may hold open

    options = {"encoder": False, "mtime": 0, "compress": False, "user": "mqmk", "group": "mqmk"}
    pattern = f"{task}-%06d.tar"
    try:
        with ShardWriter(pattern, maxsize=shard_size, opener=opened, post=written, verbose=0, **options) as writer:
            for number, picture in enumerate(pictures):
                writer.write(_sample(number, picture))
                files[-1].samples += 1
                if progress is not None:
                    progress(number + 1, len(pictures))
    finally:
        for file in files:
            file.close()
    return tuple(Shard(file.name, file.size, file.sha256, file.samples) for file in files)


def _sample(number: int, picture: Picture) -> dict[str, Any]:
    """As webdataset writes it; the key holds the file's name for people who look into the shard."""
    try:
        data = picture.path.read_bytes()
        open_picture(data)
    except OSError as error:
        raise PackError(f"{picture.path}: {error.strerror}") from error
    except ImageError as error:
        raise PackError(f"{picture.path}: {error}; repair or remove it") from error
    stem = re.sub(r"[^A-Za-z0-9_-]+", "-", picture.path.stem)[:60]
    return {"__key__": f"{number:08d}-{stem}", picture.path.suffix.lower()[1:]: data, "cls": picture.label.encode()}


def _manifest(task: str, classes: tuple[str, ...], shards: tuple[Shard, ...], created: str, holdout: float) -> Manifest:
    try:
        return Manifest(task, classes, shards, created, "manifest", holdout)
    except TaskRejected as error:
        raise PackError(f"these pictures make no task: {error}") from error


def _publish(part: Path, final: Path, manifest: Manifest) -> None:
    """TASK.json last; then the whole folder under its name by one rename."""
    write_file(part / FILE_NAME, manifest.to_bytes())
    part.chmod(0o755)
    sync_folder(part)
    try:
        part.rename(final)
    except OSError as error:
        raise PackError(
            f"{final}: somebody else made it meanwhile ({error.strerror}); choose another --task"
        ) from error
    sync_folder(final.parent)


class _HashingFile:
    """A shard that is being written; webdataset closes the tar in it, not the file itself."""

    def __init__(self, file: io.BufferedWriter, name: str) -> None:
        self._file, self.name = file, name
        self._hash = hashlib.sha256()
        self.size = self.samples = 0

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest()

    def write(self, data: bytes) -> int:
        self._hash.update(data)
        self.size += len(data)
        return self._file.write(data)

    def close(self) -> None:
        """Durable when this returns."""
        with suppress(ValueError):  # closed before
            self._file.flush()
            os.fsync(self._file.fileno())
        self._file.close()
