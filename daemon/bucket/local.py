"""A local folder as a bucket."""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from mqmk.daemon.bucket.store import TASKS, StoredFile
from mqmk.daemon.errors import BucketError
from mqmk.matcher.durable import replace_file, sync_folder


class FolderStore:
    """A bucket in the local file system."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def folders(self) -> list[str]:
        """The names under `tasks/`."""
        with _translate_errors(self._root):
            if not self._root.is_dir():
                raise BucketError(
                    f"{self._root}: the bucket does not exist; `mkdir -p {self._root}`, mount it, or correct "
                    "bucket.url",
                    transient=False,
                )
            try:
                return os.listdir(self._root / TASKS)
            except FileNotFoundError:
                return []

    def files(self, place: str) -> list[StoredFile]:
        """The regular files of a folder: reading a pipe or a device might block forever."""
        with _translate_errors(self._root / place):
            try:
                if not _may_follow(os.lstat(self._root / place)):
                    return []
                with os.scandir(self._root / place) as entries:
                    return [file for entry in entries if (file := _to_stored_file(entry)) is not None]
            except (FileNotFoundError, NotADirectoryError):
                return []

    def list_all(self) -> Iterator[tuple[str, list[StoredFile] | None]]:
        """Folder by folder."""
        return ((folder, self._files_or_none(f"{TASKS}/{folder}")) for folder in self.folders())

    def open_file(self, place: str, name: str) -> BinaryIO:
        """A regular file."""
        path = self._root / place / name
        with _translate_errors(path):
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # opening a pipe must not block
            except FileNotFoundError:
                self.folders()  # BucketError if the whole bucket is gone, such as a disk that is not mounted
                raise
            if not stat.S_ISREG(os.fstat(descriptor).st_mode) or not _may_follow(os.lstat(path)):
                os.close(descriptor)
                raise FileNotFoundError(f"{path}: expected a file")
            return os.fdopen(descriptor, "rb")

    def _files_or_none(self, place: str) -> list[StoredFile] | None:
        """A folder that cannot be read does not hide the others."""
        try:
            return self.files(place)
        except BucketError as error:
            if error.transient:
                raise
            return None

    def write(self, place: str, name: str, data: bytes) -> None:
        """Durable when this returns."""
        with _translate_errors(self._root / place):
            replace_file(self._root / place / name, data)

    def move(self, place: str, name: str, to: str) -> None:
        """Rename it."""
        target = self._root / to
        with _translate_errors(target), suppress(FileNotFoundError):  # already moved
            target.mkdir(parents=True, exist_ok=True)
            (self._root / place / name).replace(target / name)
            sync_folder(target)

    def delete(self, place: str, name: str) -> None:
        """Unlink it."""
        with _translate_errors(self._root / place):
            (self._root / place / name).unlink(missing_ok=True)

    def delete_folder(self, place: str) -> None:
        """Kept if it still contains hidden files."""
        with suppress(OSError):
            (self._root / place).rmdir()


def _to_stored_file(entry: os.DirEntry[str]) -> StoredFile | None:
    """None for a folder, a hidden file, one that was removed since it was listed, and a broken link."""
    if entry.name.startswith(".") or not _may_follow(entry.stat(follow_symlinks=False)):
        return None
    try:
        found = entry.stat()
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP):
            return None
        raise
    if not stat.S_ISREG(found.st_mode):
        return None
    etag = f"{found.st_ino}-{found.st_size}-{found.st_mtime_ns}"  # the inode: `cp -p` and `mv` preserve times
    return StoredFile(entry.name, found.st_size, etag, found.st_mtime)


def _may_follow(found: os.stat_result) -> bool:
    """Only our own links and root's: another user's could point at what that user may not read, move or delete."""
    return not stat.S_ISLNK(found.st_mode) or found.st_uid in (0, os.getuid())


@contextmanager
def _translate_errors(path: Path) -> Iterator[None]:
    """Absence stays FileNotFoundError; other errors become BucketError."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError):
        raise
    except PermissionError as error:
        reason = f"{path}: {error.strerror}; give the daemon's user read and write access"
        raise BucketError(reason, transient=False) from error
    except OSError as error:
        transient = error.errno not in (errno.ELOOP, errno.ENAMETOOLONG)
        raise BucketError(f"{path}: {error.strerror or error}", transient=transient) from error
