"""What does one task folder hold, and is it the same as before?"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from mqmk.daemon.bucket_store import StoredFile
from mqmk.learner.manifest import FILE_NAME, is_safe_name

SUCCESS: Final = "_SUCCESS"
MARKER: Final = "_LEARNED"


@dataclass(frozen=True)
class Contents:
    """The files of `tasks/<folder>/` at one moment."""

    files: tuple[StoredFile, ...]

    def named(self, name: str) -> StoredFile | None:
        """The file of that name."""
        return next((file for file in self.files if file.name == name), None)

    @property
    def manifest(self) -> StoredFile | None:
        """TASK.json."""
        return self.named(FILE_NAME)

    @property
    def shards(self) -> tuple[StoredFile, ...]:
        """The tars, by name."""
        return tuple(sorted((file for file in self.files if file.name.endswith(".tar")), key=lambda file: file.name))

    @property
    def odd_shards(self) -> tuple[str, ...]:
        """Tars that no task may have."""
        return tuple(shard.name for shard in self.shards if not is_safe_name(shard.name))

    @property
    def says_success(self) -> bool:
        """`_SUCCESS` came after every shard: one that was there before them speaks of something else."""
        said = self.named(SUCCESS)
        return said is not None and all(shard.changed_at <= said.changed_at for shard in self.shards)

    @property
    def fingerprint(self) -> str | None:
        """Of TASK.json, or of the shards where there is none; None where there is no task at all."""
        if self.manifest is not None:
            return _hash([self.manifest])
        return _hash(self.shards) if self.shards else None

    @property
    def state(self) -> str:
        """Changes when anything does."""
        return _hash(self.files)


def contents(files: Iterable[StoredFile]) -> Contents:
    """The folder, in a fixed order."""
    return Contents(tuple(sorted(files, key=lambda file: file.name)))


def _hash(files: Iterable[StoredFile]) -> str:
    text = "\n".join(f"{file.name}\0{file.print}" for file in files)
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()
