"""What is written down about trainings and pool versions, whoever keeps it: the records, the door, its checks.

Every call may be made twice: it is known by its effect id, and what is there already is left as it is. Versions come in
order and without gaps. Absent is `None` or an empty list, never an error.
"""

import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from mqmk.daemon.errors import RegistryError
from mqmk.matcher.durable import sync_folder, write_file
from mqmk.matcher.errors import PoolError
from mqmk.matcher.pool import PromptPool
from mqmk.matcher.pool_files import CARD, TENSORS, PoolFiles, PoolVersion, decode, read_pool

Value = str | int | float | bool
_EFFECT_ID: Final = re.compile(r"[\w .,:;/+=@()#-]{1,250}")  # it stands in a search expression: no quotes


@dataclass(frozen=True)
class TrainingRecord:
    """One training of one task."""

    effect_id: str
    task: str
    parameters: Mapping[str, Value]
    epochs: Sequence[Mapping[str, float]]
    """The metrics of each epoch, in order."""
    manifest: bytes
    """TASK.json."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Tables and figures by name; a name may have folders."""
    tags: Mapping[str, str] = field(default_factory=dict)
    """Such as the git and data hashes."""
    started: float | None = None
    """Seconds since 1970; None is when it is recorded."""
    ended: float | None = None

    def __post_init__(self) -> None:
        _check_effect_id(self.effect_id)


@dataclass(frozen=True)
class VersionRecord:
    """One pool version."""

    effect_id: str
    version: int
    digest: str
    parent: int | None
    kind: str
    """What made it: `learn`, `forget`, …"""
    task: str | None
    """The task that was learned or forgotten."""
    run_id: str | None
    """The training that it came from."""
    folder: Path | None
    """Holds its two files; None if they were removed before they could be recorded."""
    tags: Mapping[str, str] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_effect_id(self.effect_id)


@dataclass(frozen=True)
class RegisteredVersion:
    """What a registry knows of a version, in the order of versions."""

    version: int
    digest: str
    parent: int | None
    kind: str
    task: str | None
    effect_id: str


@dataclass(frozen=True)
class Deletion:
    """A task that was forgotten, and from which version on."""

    effect_id: str
    task: str
    version: int
    exact: bool
    """Whether the pool is what it would be if the task had never been learned."""


class Registry(Protocol):
    """The door to whatever keeps records; used by one thread at a time."""

    def record_training(self, record: TrainingRecord) -> str:
        """Write a training down; returns its run id, the same for the same effect id."""

    def record_version(self, record: VersionRecord) -> None:
        """Write a version down with its two files, if it has them; its number must be the next one."""

    def point_serving(self, version: int) -> None:
        """Say which version is served."""

    def record_deletion(self, effect_id: str, task: str, version: int, exact: bool) -> None:
        """Write down that a task is gone from this version on."""

    def versions(self) -> list[RegisteredVersion]:
        """All versions, in order."""

    def deletions(self) -> list[Deletion]:
        """All deletions, in order of their versions."""

    def serving(self) -> int | None:
        """The version that is said to be served; None before the first."""

    def fetch_pool(self, version: int, into: Path) -> Path:
        """Rebuild `into/<n>-<digest12>/` from the registry alone; complete and checked, or not there at all."""

    def close(self) -> None:
        """Let go of files and connections; the next call opens them again."""


def version_tags(record: VersionRecord) -> dict[str, str]:
    """What is written beside a version; nothing stands for what is None."""
    own = {
        "digest": record.digest,
        "parent": record.parent,
        "kind": record.kind,
        "task": record.task,
        "effect_id": record.effect_id,
        "training_run": record.run_id,
    }
    return dict(record.tags) | {name: str(value) for name, value in own.items() if value is not None}


def version_from_tags(version: int, tags: Mapping[str, str]) -> RegisteredVersion:
    """The same read back."""
    try:
        parent = int(tags["parent"]) if "parent" in tags else None
        return RegisteredVersion(version, tags["digest"], parent, tags["kind"], tags.get("task"), tags["effect_id"])
    except (KeyError, ValueError) as error:
        raise RegistryError(
            f"version {version}: expected the tags digest, parent, kind and effect_id, got {dict(tags)}; it was not "
            "recorded by mqmk-daemon: configure another model name",
            passing=False,
        ) from error


def read_files(record: VersionRecord) -> tuple[PromptPool, PoolFiles] | None:
    """The two files of a version, once they are what the record says; None where they were removed."""
    if record.folder is None:
        return None
    try:
        files = PoolFiles((record.folder / TENSORS).read_bytes(), (record.folder / CARD).read_bytes())
    except OSError as error:
        raise PoolError(f"{record.folder}: {error.strerror}: {error.filename}") from error
    found, pool = decode(files)
    if found != PoolVersion(record.version, record.digest, record.parent):
        raise RegistryError(
            f"{record.folder}: expected version {record.version} ({record.digest[:12]}, parent {record.parent}), "
            f"got version {found.version} ({found.digest[:12]}, parent {found.parent})",
            passing=False,
        )
    return pool, files


def expect_same(known: RegisteredVersion, record: VersionRecord) -> None:
    """Recording a version again is fine if it is the same version."""
    if (known.effect_id, known.digest) != (record.effect_id, record.digest):
        raise RegistryError(
            f"version {record.version} is recorded already, with digest {known.digest[:12]} and effect id "
            f"{known.effect_id}; came {record.digest[:12]} and {record.effect_id}; the registry belongs to another "
            "pool store: configure another model name or tracking URI",
            passing=False,
        )


def expect_next(record: VersionRecord, highest: int) -> None:
    """A version that is not recorded yet must be the one after the highest."""
    if record.version > highest + 1:
        raise RegistryError(
            f"expected version {highest + 1} next, got {record.version}; record the versions before it first",
            passing=False,
        )
    if record.version <= highest:
        raise number_gone(record.version, highest + 1)


def files_gone(version: int) -> RegistryError:
    """They were removed from the pool store before they were recorded, or deleted in the registry since."""
    return RegistryError(f"version {version} is recorded, but its files are not there", passing=False)


def number_gone(version: int, following: int) -> RegistryError:
    """A number that the registry has used up, because somebody deleted that version there."""
    return RegistryError(
        f"version {version} was deleted in the registry, which would now number it {following}; delete the whole "
        "registered model there, or configure another model name, and every version is recorded again",
        passing=False,
    )


def place_pool(files: PoolFiles, expected: RegisteredVersion, into: Path) -> Path:
    """Put a fetched version into a pool store; a folder that is there stays if it is sound, and is replaced if not."""
    identity = PoolVersion(expected.version, expected.digest, expected.parent)
    final = into / identity.folder
    if _holds(final, identity):
        return final
    into.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=".part-", dir=into))
    try:
        fresh = part / "fresh"
        fresh.mkdir()
        for name, data in ((TENSORS, files.tensors), (CARD, files.card)):
            write_file(fresh / name, data)
        sync_folder(fresh)
        found, _ = read_pool(fresh)
        if found != identity:
            raise RegistryError(f"version {expected.version}: expected {identity}, got {found}", passing=False)
        if final.exists():
            final.rename(part / "damaged")
        fresh.rename(final)
        sync_folder(into)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return final


def _holds(folder: Path, identity: PoolVersion) -> bool:
    try:
        return read_pool(folder)[0] == identity
    except PoolError:
        return False


def _check_effect_id(effect_id: str) -> None:
    if not _EFFECT_ID.fullmatch(effect_id):
        raise RegistryError(f"expected an effect id of letters, digits and - _ . : /, got {effect_id!r}", passing=False)
