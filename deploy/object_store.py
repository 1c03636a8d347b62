"""How is S3 used for pools? The only file of serving that knows fsspec; whatever goes wrong leaves it as PoolError.

Keys are relative to the store. An object appears whole or not at all, so every write may be done twice. What is absent
is None, or an empty listing.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import fsspec  # type: ignore[import-untyped]
from fsspec.asyn import sync  # type: ignore[import-untyped]

from mqmk.matcher.errors import PoolError

_TRIES: Final = 3  # of a piece of a transfer
_STALLED_SECONDS: Final = 30.0
_CHANGED: Final = ("PreconditionFailed", "ConditionalRequestConflict", "412", "409")
_NOT_MODIFIED: Final = "304"
_ABSENT: Final = ("NoSuchKey", "404")
_NO_CREDENTIALS: Final = ("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound")
_REFUSED: Final = ("401", "403", "AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "Forbidden")


@dataclass(frozen=True)
class Stamped:
    """An object's content, and the stamp (ETag) that it has as long as nobody replaces it."""

    data: bytes
    stamp: str


class ChangedError(PoolError):
    """Somebody else has written the object in the meantime."""


class ObjectStore:
    """A prefix of a bucket; small objects have `timeout_seconds`, every piece of a large one as long as it moves."""

    def __init__(self, files: Any, root: str, name: str, timeout_seconds: float) -> None:
        self._files, self._root, self.name = files, root.rstrip("/"), name
        self._patience = timeout_seconds

    def read(self, key: str, known: Stamped | None = None) -> Stamped | None:
        """A small object as it is now; `known` itself while it has not changed, for which no content is sent."""
        conditions = {"IfNoneMatch": known.stamp} if known else {}
        with self._explained():
            try:
                found: Stamped = sync(self._files.loop, self._get, key, conditions, timeout=self._patience)
                return found
            except Exception as error:
                if _code(error) == _NOT_MODIFIED:
                    return known
                if _code(error) in _ABSENT:
                    return None
                raise

    def replace(self, key: str, data: bytes, known: Stamped | None) -> None:
        """Write a small object over the one that is known, or where none is; ChangedError if that is no longer so."""
        conditions = {"IfMatch": known.stamp} if known else {"IfNoneMatch": "*"}
        with self._explained():
            try:
                sync(self._files.loop, self._put, key, data, conditions, timeout=self._patience)
            except Exception as error:
                if _code(error) in _CHANGED or (known and _code(error) in _ABSENT):
                    raise ChangedError(f"{self.name}/{key}: somebody else has written it in this moment") from error
                raise

    def sizes(self, folder: str) -> dict[str, int]:
        """The objects of a folder, and how long they are."""
        with self._explained():
            try:
                found = self._files.ls(self._path(folder), detail=True)
            except FileNotFoundError as error:
                if _code(error) == "NoSuchBucket":
                    raise
                return {}
        return {info["name"].rsplit("/", 1)[1]: int(info["size"]) for info in found if info["type"] == "file"}

    def upload(self, file: Path, key: str) -> None:
        """Write an object from a file, a large one in several pieces."""
        with self._explained():
            self._files.put_file(str(file), self._path(key))

    def download(self, key: str, file: Path) -> None:
        """Write a file from an object."""
        with self._explained():
            self._files.get_file(self._path(key), str(file))

    async def _get(self, key: str, conditions: dict[str, str]) -> Stamped:
        client = await self._files.set_session()
        answer = await client.get_object(**self._place(key), **conditions)
        async with answer["Body"] as body:
            return Stamped(await body.read(), answer["ETag"])

    async def _put(self, key: str, data: bytes, conditions: dict[str, str]) -> None:
        client = await self._files.set_session()
        await client.put_object(**self._place(key), Body=data, **conditions)

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}"

    def _place(self, key: str) -> dict[str, str]:
        bucket, _, path = self._path(key).partition("/")
        return {"Bucket": bucket, "Key": path}

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except PoolError:
            raise
        except Exception as error:
            raise PoolError(f"{self.name}: {_reason(error)}") from error


def open_objects(url: str, *, timeout_seconds: float = 5.0) -> ObjectStore:
    """The store of an `s3://bucket/prefix`; endpoint and credentials come from the AWS_… environment."""
    times = {"connect_timeout": timeout_seconds, "read_timeout": _STALLED_SECONDS}
    once = {"total_max_attempts": 1}  # s3fs tries again by itself, and whoever watches the pointer looks again anyway
    options = {"use_listings_cache": False, "skip_instance_cache": True, "config_kwargs": times | {"retries": once}}
    try:
        files, root = fsspec.url_to_fs(url, **options)
    except ImportError as error:
        raise PoolError(f"{url}: s3:// needs another package ({error}): pip install 'mqmk-daemon[s3]'") from error
    except Exception as error:
        raise PoolError(f"{url}: expected s3://bucket/prefix in pools.url: {_reason(error)}") from error
    files.retries = _TRIES
    return ObjectStore(files, root, url.rstrip("/"), timeout_seconds)


def _reason(error: Exception) -> str:
    """What happened, and what to do about it."""
    code, kind = _code(error), type(error).__name__
    said = f"{code or kind}: {str(error)[:300]}"
    if code == "NoSuchBucket":
        return "no such bucket; create it, or correct pools.url"
    if kind in _NO_CREDENTIALS:
        return "no credentials found; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
    if isinstance(error, PermissionError) or code in _REFUSED:
        return f"{said}; check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and what they may do"
    if isinstance(error, TimeoutError):
        return f"no answer in time; check AWS_ENDPOINT_URL and the network ({kind})"
    return said


def _code(error: BaseException) -> str:
    """The store's own error code, from its answer or from the one that s3fs keeps as the cause."""
    answer = getattr(error, "response", None) or getattr(error.__cause__, "response", None)
    return str(answer.get("Error", {}).get("Code", "")) if isinstance(answer, dict) else ""
