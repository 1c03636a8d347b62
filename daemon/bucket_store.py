"""What must a place that holds tasks be able to do? The contract that a local folder and an fsspec store both keep.

Places are relative to the bucket (`tasks/birds`). What is not there is an empty list, or FileNotFoundError where bytes
were asked for; everything else that goes wrong is BucketError. Writing, moving and deleting may be done twice.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, Protocol

TASKS: Final = "tasks"
LEARNED: Final = "learned"


@dataclass(frozen=True)
class StoredFile:
    """One file as a listing shows it; `print` changes with its content, `changed_at` is in the store's own seconds."""

    name: str
    bytes: int
    print: str
    changed_at: float


class Store(Protocol):
    """A bucket as files in folders."""

    def folders(self) -> list[str]:
        """The names under `tasks/`, without looking into them; some may be no folders."""

    def files(self, place: str) -> list[StoredFile]:
        """The files of a folder, not those of folders in it, not hidden ones."""

    def everything(self) -> Iterator[tuple[str, list[StoredFile]]]:
        """Every folder under `tasks/` with its files, as cheaply as the store can."""

    def open(self, place: str, name: str) -> BinaryIO:
        """A file, to be read once from its beginning."""

    def write(self, place: str, name: str, data: bytes) -> None:
        """Put a file there, whole or not at all."""

    def move(self, place: str, name: str, to: str) -> None:
        """Put a file into another folder under the same name."""

    def delete(self, place: str, name: str) -> None:
        """Remove a file."""

    def delete_folder(self, place: str) -> None:
        """Remove a folder if it is empty and the store knows empty folders."""


def local_folder(url: str) -> Path | None:
    """The folder of a `bucket.url` that is one; None for the URL of a store."""
    if url.startswith("file://"):
        return Path(url.removeprefix("file://"))
    return None if "://" in url else Path(url).expanduser()


def open_store(url: str, *, timeout_seconds: float) -> Store:
    """The store of a `bucket.url`; nothing is connected yet."""
    folder = local_folder(url)
    if folder is not None:
        from mqmk.daemon.bucket_folder import FolderStore

        return FolderStore(folder)
    from mqmk.daemon.bucket_remote import open_remote  # imports fsspec, which a local bucket does not need

    return open_remote(url, timeout_seconds=timeout_seconds)
