"""How a folder of images becomes a task: WebDataset shards and TASK.json, complete or not there at all.

Packing the same images twice gives the same bytes: fixed times and owners, and an order by the hash of the path,
which also mixes the classes, so that a small shuffle buffer is enough in training.
"""

import hashlib
import io
import os
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from webdataset.writer import ShardWriter

from mqmk.learner.data.manifest import DEFAULT_HOLDOUT, FILE_NAME, Manifest, Shard, is_safe_name
from mqmk.learner.data.pack_sources import ImageFile, find_images, layout_warnings
from mqmk.learner.data.shards import open_image
from mqmk.learner.errors import PackError, TaskRejected
from mqmk.learner.settings import DEFAULT_LIMITS, ShardLimits
from mqmk.matcher.durable import sync_folder, write_file
from mqmk.matcher.errors import ImageError
from mqmk.matcher.image_formats import explain_refusal, name_format, suffixes

DEFAULT_SHARD_BYTES: Final = 256 * 2**20
_MAX_NAMED = 5  # classes in a warning

Progress = Callable[[int, int], None]  # images done, images in all


@dataclass(frozen=True)
class BadFile:
    """A file that cannot be packed."""

    path: Path
    reason: str


@dataclass(frozen=True)
class Packed:
    """What was written, and what is odd about it."""

    manifest: Manifest
    counts: Mapping[str, int]
    """Images of each class."""
    skipped: tuple[BadFile, ...]
    warnings: tuple[str, ...]


def pack(source: Path, dest: Path, task: str, **choices: Any) -> Manifest:
    """As `pack_images`, but returns the manifest only."""
    return pack_images(source, dest, task, **choices).manifest


def pack_images(
    source: Path,
    dest: Path,
    task: str,
    *,
    holdout: float = DEFAULT_HOLDOUT,
    shard_size: int = DEFAULT_SHARD_BYTES,
    progress: Progress | None = None,
    created: str | None = None,
    skip_bad: bool = False,
    limits: ShardLimits = DEFAULT_LIMITS,
) -> Packed:
    """Write the task `dest/<task>/` (dest is the bucket's `tasks` folder).

    A shard is closed once its images reach `shard_size` bytes. Nothing appears in dest before everything is written.
    Bad files are left out with `skip_bad`, else PackError names all of them.
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
    images = _sort_by_hash(find_images(source), source)
    dest.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=".part-", dir=dest))
    try:
        files = _TaskWriter(part, task, shard_size, limits)
        shards = files.write(images, progress or (lambda _done, _total: None))
        if files.bad and (not skip_bad or not files.counts):
            raise PackError(_explain_bad(files.bad, len(images)))
        counts = dict(sorted(files.counts.items()))
        created = created or datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        manifest = _build_manifest(task, tuple(counts), shards, created, holdout)
        warnings = [*layout_warnings(source), *_class_warnings(images, counts)]
        _publish(part, final, manifest)
        return Packed(manifest, counts, tuple(files.bad), tuple(warnings))
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _explain_bad(bad: Sequence[BadFile], total: int) -> str:
    first = f"{len(bad):,} of {total:,} files cannot be packed; fix or remove them, or leave them out with --skip-bad:"
    return "\n  ".join([first, *(f"{each.path}: {each.reason}" for each in bad)])


def _class_warnings(images: Iterable[ImageFile], counts: Mapping[str, int]) -> list[str]:
    least = DEFAULT_LIMITS.min_samples
    small = [name for name, count in counts.items() if count < least]
    gone = sorted({image.label for image in images} - counts.keys())
    warnings = [f"no image of {_list_some(gone)} can be read: left out"] if gone else []
    if small:
        warnings.append(f"only one image of {_list_some(small)}: the daemon will quarantine the task: it needs "
                        f"{least} of every class (limits.min_samples); add some or remove the class")  # fmt: skip
    return warnings


def _list_some(names: Sequence[str]) -> str:
    rest = len(names) - _MAX_NAMED
    return ", ".join(names[:_MAX_NAMED]) + (f" and {rest} more" if rest > 0 else "")


def _sort_by_hash(images: tuple[ImageFile, ...], source: Path) -> list[ImageFile]:
    """By the hash of the path below the source: always the same, and the classes are mixed."""
    home = (source.parent if source.is_file() else source).resolve()

    def place(image: ImageFile) -> bytes:
        return hashlib.sha256(os.path.relpath(image.path.resolve(), home).encode(errors="surrogateescape")).digest()

    return sorted(images, key=place)


class _TaskWriter:
    """Writes the shards of a task into a folder, and collects the files that cannot be packed."""

    def __init__(self, folder: Path, task: str, shard_size: int, limits: ShardLimits) -> None:
        self._folder, self._pattern, self._shard_size = folder, f"{task}-%06d.tar", shard_size
        self._limits = limits
        self._files: list[_HashingFile] = []
        self.counts: Counter[str] = Counter()
        self.bad: list[BadFile] = []

    def write(self, images: Sequence[ImageFile], progress: Progress) -> tuple[Shard, ...]:
        """Every image that can be read, in this order."""
        options = {"encoder": False, "mtime": 0, "compress": False, "user": "mqmk", "group": "mqmk"}
        callbacks = {"opener": self._open_shard, "post": self._close_shard}
        try:
            with ShardWriter(self._pattern, maxsize=self._shard_size, verbose=0, **callbacks, **options) as writer:
                for number, image in enumerate(images):
                    self._add(writer, image)
                    progress(number + 1, len(images))
        finally:
            for file in self._files:
                file.close()
        return tuple(Shard(file.name, file.size, file.sha256, file.samples) for file in self._files if file.samples)

    def _add(self, writer: ShardWriter, image: ImageFile) -> None:
        try:
            data = _read_image(image.path, self._limits)
        except ImageError as error:
            self.bad.append(BadFile(image.path, str(error)))
            return
        writer.write(_to_sample(self.counts.total(), image, data))
        self._files[-1].samples += 1
        self.counts[image.label] += 1

    def _open_shard(self, name: str) -> "_HashingFile":
        self._files.append(_HashingFile((self._folder / name).open("xb"), name))
        return self._files[-1]

    def _close_shard(self, _name: str) -> None:
        self._files[-1].close()  # at once: a large task has more shards than a process may keep open


def _read_image(path: Path, limits: ShardLimits) -> bytes:
    """The bytes of an image that the daemon will accept; ImageError if it would not."""
    formats = limits.formats or ()
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ImageError(str(error.strerror)) from error
    if path.suffix.lower()[1:] not in suffixes(formats):
        endings = f"expected a name that ends in {', '.join(suffixes(formats))}; rename or remove it"
        raise ImageError(explain_refusal(data, formats) if name_format(data) else endings)
    open_image(data, limits)
    return data


def _to_sample(number: int, image: ImageFile, data: bytes) -> dict[str, Any]:
    """As webdataset writes it; the key holds the file's name for people who open the shard."""
    stem = re.sub(r"[^A-Za-z0-9_-]+", "-", image.path.stem)[:60]
    return {"__key__": f"{number:08d}-{stem}", image.path.suffix.lower()[1:]: data, "cls": image.label.encode()}


def _build_manifest(
    task: str, classes: tuple[str, ...], shards: tuple[Shard, ...], created: str, holdout: float
) -> Manifest:
    try:
        return Manifest(task, classes, shards, created, "manifest", holdout)
    except TaskRejected as error:
        raise PackError(f"these images do not make a valid task: {error}") from error


def _publish(part: Path, final: Path, manifest: Manifest) -> None:
    """TASK.json last; then the whole folder under its name by one rename."""
    write_file(part / FILE_NAME, manifest.to_bytes())
    part.chmod(0o755)
    sync_folder(part)
    try:
        part.rename(final)
    except OSError as error:
        raise PackError(
            f"{final}: another process created it meanwhile ({error.strerror}); choose another --task"
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
        with suppress(ValueError):  # already closed
            self._file.flush()
            os.fsync(self._file.fileno())
        self._file.close()
