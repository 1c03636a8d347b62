"""How is a local folder used as a bucket?"""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from mqmk.daemon.bucket_store import TASKS, StoredFile
from mqmk.daemon.errors import BucketError
from mqmk.matcher.durable import replace_file, sync_folder


class FolderStore:
    """A bucket on a file system of this machine."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def folders(self) -> list[str]:
        """The names under `tasks/`."""
        with _explained(self._root):
            if not self._root.is_dir():
                raise BucketError(
                    f"{self._root}: expected the bucket here, there is no such folder; `mkdir -p {self._root}`, mount "
                    "it, or correct bucket.url",
                    passing=False,
                )
            try:
                return os.listdir(self._root / TASKS)
            except FileNotFoundError:
                return []

    def files(self, place: str) -> list[StoredFile]:
        """The regular files of a folder; a pipe or a device would be waited for without end."""
        with _explained(self._root / place):
            try:
                if not _is_followed(os.lstat(self._root / place)):
                    return []
                with os.scandir(self._root / place) as entries:
                    return [file for entry in entries if (file := _stored(entry)) is not None]
            except (FileNotFoundError, NotADirectoryError):
                return []

    def everything(self) -> Iterator[tuple[str, list[StoredFile]]]:
        """Folder after folder."""
        return ((folder, self._files_or_none(f"{TASKS}/{folder}")) for folder in self.folders())

    def open(self, place: str, name: str) -> BinaryIO:
        """A regular file."""
        path = self._root / place / name
        with _explained(path):
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe must not block before it is recognised
            except FileNotFoundError:
                self.folders()  # BucketError if it is the whole bucket that is gone: a disk that is not mounted
                raise
            if not stat.S_ISREG(os.fstat(descriptor).st_mode) or not _is_followed(os.lstat(path)):
                os.close(descriptor)
                raise FileNotFoundError(f"{path}: expected a file")
            return os.fdopen(descriptor, "rb")

    def _files_or_none(self, place: str) -> list[StoredFile]:
        """One folder that cannot be read is no reason to overlook the others."""
        try:
            return self.files(place)
        except BucketError as error:
            if error.passing:
                raise
            return []

    def write(self, place: str, name: str, data: bytes) -> None:
        """On disk when this returns."""
        with _explained(self._root / place):
            replace_file(self._root / place / name, data)

    def move(self, place: str, name: str, to: str) -> None:
        """By a rename."""
        target = self._root / to
        with _explained(target), suppress(FileNotFoundError):  # moved before
            target.mkdir(parents=True, exist_ok=True)
            (self._root / place / name).replace(target / name)
            sync_folder(target)

    def delete(self, place: str, name: str) -> None:
        """Unlink it."""
        with _explained(self._root / place):
            (self._root / place / name).unlink(missing_ok=True)

    def delete_folder(self, place: str) -> None:
        """Somebody's hidden files keep it."""
        with suppress(OSError):
            (self._root / place).rmdir()


def _stored(entry: os.DirEntry[str]) -> StoredFile | None:
    """None for a folder, what is hidden, what was removed since it was listed, and links that lead nowhere."""
    if entry.name.startswith(".") or not _is_followed(entry.stat(follow_symlinks=False)):
        return None
    try:
        found = entry.stat()
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP):
            return None
        raise
    if not stat.S_ISREG(found.st_mode):
        return None
    written = f"{found.st_ino}-{found.st_size}-{found.st_mtime_ns}"  # the inode: `cp -p` and `mv` bring their own times
    return StoredFile(entry.name, found.st_size, written, found.st_mtime)


def _is_followed(found: os.stat_result) -> bool:
    """Of links only our own and root's: another user's could lead to what that user may not read, move or delete."""
    return not stat.S_ISLNK(found.st_mode) or found.st_uid in (0, os.getuid())


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """What is absent stays FileNotFoundError; the rest is said as BucketError."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError):
        raise
    except PermissionError as error:
        reason = f"{path}: {error.strerror}; let the daemon's user read and write there"
        raise BucketError(reason, passing=False) from error
    except OSError as error:
        passing = error.errno not in (errno.ELOOP, errno.ENAMETOOLONG)
        raise BucketError(f"{path}: {error.strerror or error}", passing=passing) from error
