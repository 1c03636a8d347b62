"""S3 objects of a pool store. The only file of serving that knows fsspec; every failure leaves it as PoolError.

Names are relative to the store. Objects appear atomically, so every write is idempotent. Absent: None, or an empty
listing.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import fsspec  # type: ignore[import-untyped]
from fsspec.asyn import sync  # type: ignore[import-untyped]

from mqmk.deploy.serving.pools.object_store_errors import NO_SUCH_BUCKET, error_code, explain
from mqmk.matcher.errors import PoolError

_SETTING: Final = "pools.url"
_TRIES: Final = 3  # of a piece of a transfer
_STALLED_SECONDS: Final = 30.0
_CHANGED: Final = ("PreconditionFailed", "ConditionalRequestConflict", "412", "409")
_NOT_MODIFIED: Final = "304"
_ABSENT: Final = ("NoSuchKey", "404")


@dataclass(frozen=True)
class Stamped:
    """An object's content, and its ETag, which changes when it is replaced."""

    data: bytes
    stamp: str


class ChangedError(PoolError):
    """Another writer has replaced the object in the meantime."""


class ObjectStore:
    """A prefix of a bucket. Small objects have `timeout_seconds`; large ones may take as long as data moves."""

    def __init__(self, files: Any, root: str, name: str, timeout_seconds: float) -> None:
        self._files, self._root, self.name = files, root.rstrip("/"), name
        self._timeout = timeout_seconds

    def read(self, name: str, known: Stamped | None = None) -> Stamped | None:
        """A small object; `known` itself if it has not changed, in which case no content is transferred."""
        conditions = {"IfNoneMatch": known.stamp} if known else {}
        with self._translate_errors():
            try:
                found: Stamped = sync(self._files.loop, self._get, name, conditions, timeout=self._timeout)
                return found
            except Exception as error:
                if error_code(error) == _NOT_MODIFIED:
                    return known
                if error_code(error) in _ABSENT:
                    return None
                raise

    def replace(self, name: str, data: bytes, known: Stamped | None) -> None:
        """Replace the `known` object, or create it where None; ChangedError if the store has another one by now."""
        conditions = {"IfMatch": known.stamp} if known else {"IfNoneMatch": "*"}
        with self._translate_errors():
            try:
                sync(self._files.loop, self._put, name, data, conditions, timeout=self._timeout)
            except Exception as error:
                if error_code(error) in _CHANGED or (known and error_code(error) in _ABSENT):
                    raise ChangedError(f"{self.name}/{name}: another writer replaced it at the same time") from error
                raise

    def sizes(self, folder: str, prefix: str = "") -> dict[str, int]:
        """The objects of a folder whose names start with the prefix, and their sizes; others are not listed."""
        path = self._path(folder)
        with self._translate_errors():
            try:
                if prefix:  # `ls` knows none
                    found = list(self._files.find(path, prefix=prefix, detail=True).values())
                else:
                    found = self._files.ls(path, detail=True)
            except FileNotFoundError as error:
                if error_code(error) == NO_SUCH_BUCKET:
                    raise
                return {}
        return {info["name"].rsplit("/", 1)[1]: int(info["size"]) for info in found if info["type"] == "file"}

    def upload(self, file: Path, name: str) -> None:
        """Upload a file, a large one in parts."""
        with self._translate_errors():
            self._files.put_file(str(file), self._path(name))

    def download(self, name: str, file: Path) -> None:
        """Download an object into a file."""
        with self._translate_errors():
            self._files.get_file(self._path(name), str(file))

    def remove(self, name: str) -> None:
        """Delete an object; nothing happens if it is absent."""
        with self._translate_errors(), suppress(FileNotFoundError):
            self._files.rm_file(self._path(name))

    def reconnect(self) -> None:
        """Use the credentials that this process has now: a session keeps those it was opened with."""
        with self._translate_errors():
            sync(self._files.loop, self._files.set_session, refresh=True, timeout=self._timeout)

    async def _get(self, name: str, conditions: dict[str, str]) -> Stamped:
        client = await self._files.set_session()
        answer = await client.get_object(**self._place(name), **conditions)
        async with answer["Body"] as body:
            return Stamped(await body.read(), answer["ETag"])

    async def _put(self, name: str, data: bytes, conditions: dict[str, str]) -> None:
        client = await self._files.set_session()
        await client.put_object(**self._place(name), Body=data, **conditions)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _place(self, name: str) -> dict[str, str]:
        bucket, _, path = self._path(name).partition("/")
        return {"Bucket": bucket, "Key": path}

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        try:
            yield
        except PoolError:
            raise
        except Exception as error:
            raise PoolError(f"{self.name}: {explain(error, _SETTING).reason}") from error


def open_objects(url: str, *, timeout_seconds: float = 5.0) -> ObjectStore:
    """The store of an `s3://bucket/prefix`; endpoint and credentials come from the AWS_… environment."""
    times = {"connect_timeout": timeout_seconds, "read_timeout": _STALLED_SECONDS}
    once = {"total_max_attempts": 1}  # s3fs retries itself, and the pointer is polled again anyway
    options = {"use_listings_cache": False, "skip_instance_cache": True, "config_kwargs": times | {"retries": once}}
    try:
        files, root = fsspec.url_to_fs(url, **options)
    except ImportError as error:
        raise PoolError(f"{url}: s3:// needs another package ({error}): pip install 'mqmk-daemon[s3]'") from error
    except Exception as error:
        raise PoolError(
            f"{url}: expected s3://bucket/prefix in pools.url: {explain(error, _SETTING).reason}"
        ) from error
    files.retries = _TRIES
    return ObjectStore(files, root, url.rstrip("/"), timeout_seconds)
