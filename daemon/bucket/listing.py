"""The files of one task folder, and the fingerprint that tells whether they changed."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Self

from mqmk.daemon.bucket.store import StoredFile
from mqmk.learner.data.manifest import FILE_NAME, is_safe_name

SUCCESS: Final = "_SUCCESS"
MARKER: Final = "_LEARNED"


@dataclass(frozen=True)
class Contents:
    """The files of `tasks/<folder>/` at one moment."""

    files: tuple[StoredFile, ...]

    @classmethod
    def of(cls, files: Iterable[StoredFile]) -> Self:
        """The files in a fixed order."""
        return cls(tuple(sorted(files, key=lambda file: file.name)))

    def find(self, name: str) -> StoredFile | None:
        """The file of that name."""
        return next((file for file in self.files if file.name == name), None)

    @property
    def manifest(self) -> StoredFile | None:
        """TASK.json."""
        return self.find(FILE_NAME)

    @property
    def shards(self) -> tuple[StoredFile, ...]:
        """The tars, by name."""
        return tuple(sorted((file for file in self.files if file.name.endswith(".tar")), key=lambda file: file.name))

    @property
    def misnamed_shards(self) -> tuple[str, ...]:
        """Tars whose names no shard may have."""
        return tuple(shard.name for shard in self.shards if not is_safe_name(shard.name))

    @property
    def is_marked_complete(self) -> bool:
        """Whether `_SUCCESS` was written after every shard: an older one belongs to an earlier upload."""
        marker = self.find(SUCCESS)
        return marker is not None and all(shard.changed_at <= marker.changed_at for shard in self.shards)

    @property
    def fingerprint(self) -> str | None:
        """Of TASK.json, or of the shards if there is none; None if there are no shards either."""
        if self.manifest is not None:
            return _hash([self.manifest])
        return _hash(self.shards) if self.shards else None

    @property
    def state(self) -> str:
        """Changes when any file does."""
        return _hash(self.files)


def _hash(files: Iterable[StoredFile]) -> str:
    text = "\n".join(f"{file.name}\0{file.etag}" for file in files)
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()
