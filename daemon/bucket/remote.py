"""An object store as a bucket. The only file that uses fsspec for tasks; none of its errors leaves it."""

import io
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import Any, BinaryIO, Final, cast

import fsspec  # type: ignore[import-untyped]

from mqmk.daemon.bucket.store import TASKS, StoredFile
from mqmk.daemon.errors import BucketError
from mqmk.daemon.redaction import redact
from mqmk.deploy.serving.pools.object_store_errors import NO_SUCH_BUCKET, error_code, explain

BLOCK_BYTES: Final = 8 * 2**20  # of one request of a stream
_TRIES = 3
_HASHES = ("ETag", "etag", "md5Hash", "content_md5", "generation")
_TIMES = ("LastModified", "mtime", "last_modified", "updated", "created")
_EXTRAS = {"s3": "pip install 'mqmk-daemon[s3]'"}


def open_remote(url: str, *, timeout_seconds: float) -> "RemoteStore":
    """The store of an fsspec URL; nothing is connected yet."""
    scheme = url.split("://")[0].split("::")[-1]
    options: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
    if scheme in ("s3", "s3a"):
        once = {"total_max_attempts": 1}  # s3fs retries on its own; together they would try 25 times
        times = {"connect_timeout": min(5.0, timeout_seconds), "read_timeout": timeout_seconds}
        options["config_kwargs"] = times | {"retries": once}
    try:
        files, path = fsspec.url_to_fs(url, **options)
    except ImportError as error:
        how = _EXTRAS.get(scheme, "install its fsspec package")
        reason = f"{redact(url)}: {scheme}:// needs another package ({error}): {how}"
        raise BucketError(reason, transient=False) from error
    except Exception as error:
        reason = f"{url}: expected a folder or an fsspec URL in bucket.url, e.g. s3://bucket/prefix: {error}"
        raise BucketError(redact(reason), transient=False) from error
    if hasattr(files, "retries"):
        files.retries = _TRIES
    return RemoteStore(files, path, redact(url))


class RemoteStore:
    """A bucket behind fsspec."""

    def __init__(self, files: Any, root: str, name: str) -> None:
        self._files, self._root, self._name = files, root.rstrip("/"), name
        self._flat = hasattr(files, "call_s3")  # s3fs.makedirs would look for the bucket, and create a missing one

    def folders(self) -> list[str]:
        """The common prefixes under `tasks/`: one request per thousand."""
        path = self._path(TASKS)
        with suppress(FileNotFoundError), self._translate_errors():
            found = self._files.ls(path, detail=True)
            return [name for info in found if info["type"] == "directory" and (name := _relative_name(path, info))]
        return []

    def files(self, place: str) -> list[StoredFile]:
        """The objects with that prefix and no further slash."""
        path = self._path(place)
        with suppress(FileNotFoundError), self._translate_errors():
            return [file for info in self._files.ls(path, detail=True) if (file := _to_stored_file(path, info))]
        return []

    def list_all(self) -> Iterator[tuple[str, list[StoredFile] | None]]:
        """One flat listing: a request per thousand objects instead of one per task."""
        path = self._path(TASKS)
        folders: dict[str, list[StoredFile]] = {}
        with suppress(FileNotFoundError), self._translate_errors():
            for info in self._files.find(path, detail=True).values():
                folder = _relative_name(path, info).split("/")[0]
                file = _to_stored_file(f"{path}/{folder}", info)
                if file is not None:
                    folders.setdefault(folder, []).append(file)
        yield from folders.items()

    def open_file(self, place: str, name: str) -> BinaryIO:
        """Reads in blocks; where the store has ETags, a change during the read is an error."""
        try:
            with self._translate_errors():
                file = self._files.open(self._path(place, name), "rb", block_size=BLOCK_BYTES, cache_type="readahead")
        except FileNotFoundError:
            self.files(place)  # BucketError if the whole bucket is gone
            raise
        return io.BufferedReader(_Stream(file, self), buffer_size=2**20)

    def write(self, place: str, name: str, data: bytes) -> None:
        """One put, which is atomic."""
        with self._translate_errors():
            self._files.pipe_file(self._path(place, name), data)

    def move(self, place: str, name: str, to: str) -> None:
        """A copy within the store, then a delete."""
        with suppress(FileNotFoundError), self._translate_errors():  # already moved
            if not self._flat:
                self._files.makedirs(self._path(to), exist_ok=True)
            self._files.cp_file(self._path(place, name), self._path(to, name))
            self._files.rm_file(self._path(place, name))

    def delete(self, place: str, name: str) -> None:
        """Remove the object."""
        with suppress(FileNotFoundError), self._translate_errors():
            self._files.rm_file(self._path(place, name))

    def delete_folder(self, place: str) -> None:
        """Most stores have no folders; an empty one does no harm."""

    def _path(self, *parts: str) -> str:
        return "/".join((self._root, *parts))

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Absence stays FileNotFoundError; every other error becomes BucketError."""
        try:
            yield
        except BucketError:
            raise
        except FileNotFoundError as error:
            if error_code(error) != NO_SUCH_BUCKET:
                raise
            raise to_bucket_error(self._name, error) from error
        except Exception as error:
            raise to_bucket_error(self._name, error) from error


class _Stream(io.RawIOBase):
    """A file of the store; its errors become BucketError."""

    def __init__(self, file: Any, store: RemoteStore) -> None:
        self._file, self._store = file, store

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        with self._store._translate_errors():
            data = self._file.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


def to_bucket_error(name: str, error: BaseException) -> BucketError:
    """What an error of the store means, what to do about it, and whether it is transient."""
    failure = explain(error, "bucket.url", redact(str(error)))
    return BucketError(f"{name}: {failure.reason}", transient=failure.is_transient)


def _relative_name(path: str, info: dict[str, Any]) -> str:
    return cast(str, info["name"])[len(path) + 1 :]


def _to_stored_file(path: str, info: dict[str, Any]) -> StoredFile | None:
    """None for a folder or its placeholder, a deeper object, and a hidden one."""
    name = _relative_name(path, info)
    if info["type"] != "file" or not name or "/" in name or name.startswith("."):
        return None
    changed = next((info[field] for field in _TIMES if info.get(field)), 0.0)
    changed_at = changed.timestamp() if isinstance(changed, datetime) else float(changed)
    etag = next((str(info[field]) for field in _HASHES if info.get(field)), str(changed_at))
    return StoredFile(name, int(info["size"]), f"{etag}-{info['size']}", changed_at)
