"""The interface that a local folder and an fsspec store both implement.

Places are relative to the bucket (`tasks/birds`). What does not exist is an empty list, or FileNotFoundError when bytes
are read; every other failure is BucketError. Writing, moving and deleting are idempotent.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, Protocol

TASKS: Final = "tasks"
LEARNED: Final = "learned"


@dataclass(frozen=True)
class StoredFile:
    """One file of a listing; `etag` changes with its content, `changed_at` is by the store's clock."""

    name: str
    bytes: int
    etag: str
    changed_at: float


class Store(Protocol):
    """A bucket as files in folders."""

    def folders(self) -> list[str]:
        """The names under `tasks/`, not opened; some may not be folders."""

    def files(self, place: str) -> list[StoredFile]:
        """The files of a folder, without subfolders and hidden files."""

    def list_all(self) -> Iterator[tuple[str, list[StoredFile] | None]]:
        """Every folder under `tasks/` with its files, as cheaply as the store allows; None where `files` would fail."""

    def open_file(self, place: str, name: str) -> BinaryIO:
        """A file, to be read once from the start."""

    def write(self, place: str, name: str, data: bytes) -> None:
        """Write a file, whole or not at all."""

    def move(self, place: str, name: str, to: str) -> None:
        """Move a file to another folder under the same name."""

    def delete(self, place: str, name: str) -> None:
        """Remove a file."""

    def delete_folder(self, place: str) -> None:
        """Remove a folder if it is empty and the store has folders."""


def local_folder(url: str) -> Path | None:
    """The path, if `bucket.url` is a local folder; else None."""
    if url.startswith("file://"):
        return Path(url.removeprefix("file://"))
    return None if "://" in url else Path(url).expanduser()


def open_store(url: str, *, timeout_seconds: float) -> Store:
    """The store of a `bucket.url`; nothing is connected yet."""
    folder = local_folder(url)
    if folder is not None:
        from mqmk.daemon.bucket.local import FolderStore

        return FolderStore(folder)
    from mqmk.daemon.bucket.remote import open_remote  # imports fsspec, which a local bucket does not need

    return open_remote(url, timeout_seconds=timeout_seconds)
