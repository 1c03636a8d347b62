"""How is an object store used as a bucket? The only file that knows fsspec; none of its errors leaves it."""

import io
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import Any, BinaryIO, Final, cast

import fsspec  # type: ignore[import-untyped]

from mqmk.daemon.bucket_store import TASKS, StoredFile
from mqmk.daemon.errors import BucketError
from mqmk.daemon.passwords import hidden

BLOCK_BYTES: Final = 8 * 2**20  # what one request of a stream brings
_TRIES = 3
_HASHES = ("ETag", "etag", "md5Hash", "content_md5", "generation")
_TIMES = ("LastModified", "mtime", "last_modified", "updated", "created")
_EXTRAS = {"s3": "pip install 'mqmk-daemon[s3]'"}
_NO_CREDENTIALS = ("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "DefaultCredentialsError")
_MISTAKES = ("ParamValidationError", "InvalidRegionError", "InvalidBucketName", "InvalidConfigError")


def open_remote(url: str, *, timeout_seconds: float) -> "RemoteStore":
    """The store of an fsspec URL; nothing is connected yet."""
    scheme = url.split("://")[0].split("::")[-1]
    options: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
    if scheme in ("s3", "s3a"):
        once = {"total_max_attempts": 1}  # s3fs tries again by itself; together they would try 25 times
        times = {"connect_timeout": min(5.0, timeout_seconds), "read_timeout": timeout_seconds}
        options["config_kwargs"] = times | {"retries": once}
    try:
        files, path = fsspec.url_to_fs(url, **options)
    except ImportError as error:
        how = _EXTRAS.get(scheme, "install its fsspec package")
        reason = f"{hidden(url)}: {scheme}:// needs another package ({error}): {how}"
        raise BucketError(reason, passing=False) from error
    except Exception as error:
        reason = f"{url}: expected a folder or an fsspec URL in bucket.url, e.g. s3://bucket/prefix: {error}"
        raise BucketError(hidden(reason), passing=False) from error
    if hasattr(files, "retries"):
        files.retries = _TRIES
    return RemoteStore(files, path, hidden(url))


class RemoteStore:
    """A bucket behind fsspec."""

    def __init__(self, files: Any, root: str, name: str) -> None:
        self._files, self._root, self._name = files, root.rstrip("/"), name
        self._flat = hasattr(files, "call_s3")  # s3fs would ask for the bucket, and make one that is missing

    def folders(self) -> list[str]:
        """The common prefixes under `tasks/`: one request for a thousand of them."""
        path = self._path(TASKS)
        with suppress(FileNotFoundError), self._explained():
            found = self._files.ls(path, detail=True)
            return [name for info in found if info["type"] == "directory" and (name := _below(path, info))]
        return []

    def files(self, place: str) -> list[StoredFile]:
        """The objects with that prefix and no further slash."""
        path = self._path(place)
        with suppress(FileNotFoundError), self._explained():
            return [file for info in self._files.ls(path, detail=True) if (file := _stored(path, info))]
        return []

    def everything(self) -> Iterator[tuple[str, list[StoredFile]]]:
        """One flat listing: a request for every thousand objects, and not one for every task."""
        path = self._path(TASKS)
        folders: dict[str, list[StoredFile]] = {}
        with suppress(FileNotFoundError), self._explained():
            for info in self._files.find(path, detail=True).values():
                folder = _below(path, info).split("/")[0]
                file = _stored(f"{path}/{folder}", info)
                if file is not None:
                    folders.setdefault(folder, []).append(file)
        return iter(folders.items())

    def open(self, place: str, name: str) -> BinaryIO:
        """Read in blocks; an object that changes meanwhile is noticed where the store has ETags."""
        try:
            with self._explained():
                file = self._files.open(self._path(place, name), "rb", block_size=BLOCK_BYTES, cache_type="readahead")
        except FileNotFoundError:
            self.files(place)  # BucketError if it is the whole bucket that is gone
            raise
        return io.BufferedReader(_Stream(file, self), buffer_size=2**20)

    def write(self, place: str, name: str, data: bytes) -> None:
        """One put, which is atomic."""
        with self._explained():
            self._files.pipe_file(self._path(place, name), data)

    def move(self, place: str, name: str, to: str) -> None:
        """A copy within the store, then a delete."""
        with suppress(FileNotFoundError), self._explained():  # moved before
            if not self._flat:
                self._files.makedirs(self._path(to), exist_ok=True)
            self._files.cp_file(self._path(place, name), self._path(to, name))
            self._files.rm_file(self._path(place, name))

    def delete(self, place: str, name: str) -> None:
        """Remove the object."""
        with suppress(FileNotFoundError), self._explained():
            self._files.rm_file(self._path(place, name))

    def delete_folder(self, place: str) -> None:
        """Most stores have none; an empty one does no harm."""

    def _path(self, *parts: str) -> str:
        return "/".join((self._root, *parts))

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """What is absent stays FileNotFoundError; whatever else is raised becomes BucketError."""
        try:
            yield
        except BucketError:
            raise
        except FileNotFoundError as error:
            if _code(error) != "NoSuchBucket":
                raise
            raise explained(self._name, error) from error
        except Exception as error:
            raise explained(self._name, error) from error


class _Stream(io.RawIOBase):
    """A file of the store; its errors are said as BucketError."""

    def __init__(self, file: Any, store: RemoteStore) -> None:
        self._file, self._store = file, store

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        with self._store._explained():
            data = self._file.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


def explained(name: str, error: BaseException) -> BucketError:
    """What an error of the store means, what to do about it, and whether it may pass."""
    code, kind = _code(error), type(error).__name__
    said = f"{name}: {code or kind}: {hidden(str(error))[:300]}"
    if code == "NoSuchBucket":
        return BucketError(f"{name}: no such bucket; create it, or correct bucket.url", passing=False)
    if kind in _NO_CREDENTIALS:
        reason = f"{name}: no credentials found; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or what the store uses"
        return BucketError(reason, passing=False)
    if isinstance(error, PermissionError) or code in ("401", "403"):
        reason = f"{said}; check the credentials (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY) and what they may do"
        return BucketError(reason, passing=False)
    if isinstance(error, ValueError | TypeError) or kind in _MISTAKES or code in _MISTAKES:
        return BucketError(f"{said}; check bucket.url and the AWS_… environment", passing=False)
    return BucketError(said, passing=True)


def _code(error: BaseException) -> str:
    """The store's own error code, from the answer that s3fs keeps as the cause."""
    answer = getattr(error, "response", None) or getattr(error.__cause__, "response", None)
    return str(answer.get("Error", {}).get("Code", "")) if isinstance(answer, dict) else ""


def _below(path: str, info: dict[str, Any]) -> str:
    return cast(str, info["name"])[len(path) + 1 :]


def _stored(path: str, info: dict[str, Any]) -> StoredFile | None:
    """None for a folder, the placeholder of one, what lies deeper, and what is hidden."""
    name = _below(path, info)
    if info["type"] != "file" or not name or "/" in name or name.startswith("."):
        return None
    changed = next((info[key] for key in _TIMES if info.get(key)), 0.0)
    changed_at = changed.timestamp() if isinstance(changed, datetime) else float(changed)
    written = next((str(info[key]) for key in _HASHES if info.get(key)), str(changed_at))
    return StoredFile(name, int(info["size"]), f"{written}-{info['size']}", changed_at)
