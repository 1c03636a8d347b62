"""The interface of a registry, and the checks that every implementation shares.

Every call is idempotent: it is identified by its effect id, and what is already recorded stays as it is. Versions are
recorded in order and without gaps. Absent is `None` or an empty list, never an error.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from mqmk.daemon.errors import RegistryError
from mqmk.daemon.registry.records import LAYERS, Deletion, RegisteredVersion, TrainingRecord, VersionRecord
from mqmk.matcher.pool_cards import CardTask, check_card, check_content
from mqmk.matcher.pool_files import CARD, TENSORS, PoolFiles, PoolVersion, as_pool_error, decode
from mqmk.matcher.pool_store import PoolStore


class Registry(Protocol):
    """The door to whatever keeps records; used by one thread at a time."""

    def record_training(self, record: TrainingRecord) -> str:
        """Write a training down; returns its run id, the same for the same effect id."""

    def record_version(self, record: VersionRecord) -> None:
        """Write a version down with its two files, if it has them; its number must be the next one."""

    def point_serving(self, version: int) -> None:
        """Say which version is served."""

    def record_deletion(self, effect_id: str, task: str, version: int, exact: bool) -> None:
        """Record that a task is gone from this version on."""

    def erase_task(self, identity: str, versions: Sequence[int]) -> list[str]:
        """Delete every stored layer of the task with these data, and the whole pools of these versions.

        Returns what was deleted for these data, now or by an earlier call whose answer was lost.
        """

    def erased_data(self) -> set[str]:
        """The data whose trainings were all erased: of tasks that are forgotten."""

    def versions(self) -> list[RegisteredVersion]:
        """All versions, in order."""

    def deletions(self) -> list[Deletion]:
        """All deletions, in order of their versions."""

    def serving(self) -> int | None:
        """The version that is said to be served; None before the first."""

    def fetch_pool(self, version: int, store: PoolStore) -> PoolVersion:
        """Put a version into a pool store, with the layers that the store lacks; complete and checked, or not at all.

        One that release 0.1 recorded as a whole gets another digest.
        """

    def fetch_tasks(self, version: int, store: PoolStore) -> tuple[CardTask, ...]:
        """The tasks of a version, whose layers may have been erased; pages that it needs are put into the store."""

    def close(self) -> None:
        """Let go of files and connections; the next call opens them again."""


def check_record(record: VersionRecord) -> None:
    """PoolError if the card is not the one that the record names, or a file not what its name says."""
    for name, data in record.files.items():
        check_content(name, data)
    if record.card is not None:
        check_card(PoolVersion(record.version, record.digest, record.parent), record.card)


def require_same(known: RegisteredVersion, record: VersionRecord) -> None:
    """Recording a version again is fine if it is the same version."""
    if known.digest == record.former_digest:
        return
    if (known.effect_id, known.digest) != (record.effect_id, record.digest):
        raise RegistryError(
            f"version {record.version} is recorded already, with digest {known.digest[:12]} and effect id "
            f"{known.effect_id}; got {record.digest[:12]} and {record.effect_id}; the registry belongs to another "
            "pool store: configure another model name or tracking URI",
            transient=False,
        )


def require_next(record: VersionRecord, highest: int) -> None:
    """RegistryError unless a new version is the one after the highest."""
    if record.version > highest + 1:
        raise RegistryError(
            f"expected version {highest + 1} next, got {record.version}; record the versions before it first",
            transient=False,
        )
    if record.version <= highest:
        raise version_number_taken(record.version, highest + 1)


def artifacts_missing(version: int) -> RegistryError:
    """The files were removed from the pool store before they were recorded, or deleted in the registry since."""
    return RegistryError(f"version {version} is recorded, but its files are missing", transient=False)


def version_number_taken(version: int, following: int) -> RegistryError:
    """The registry cannot reuse this number, because the version was deleted there."""
    return RegistryError(
        f"version {version} was deleted in the registry, which would now number it {following}; delete the whole "
        "registered model there, or configure another model name: then every version is recorded again",
        transient=False,
    )


def install_pool(files: Mapping[str, bytes], expected: RegisteredVersion, store: PoolStore) -> PoolVersion:
    """Put what a registry holds of a version into a pool store; PoolError if something of it is in neither."""
    if CARD in files and TENSORS in files:
        return _install_whole_pool(PoolFiles(files[TENSORS], files[CARD]), expected, store)
    identity = PoolVersion(expected.version, expected.digest, expected.parent)
    add_layers(files, store)
    if identity.card in files:
        check_card(identity, files[identity.card])
        store.assemble(store.parse(files[identity.card]))  # every layer is there and sound
        store.add_card(identity, files[identity.card])
    elif not store.holds(identity):
        raise artifacts_missing(expected.version)
    return identity


def recorded_tasks(files: Mapping[str, bytes], expected: RegisteredVersion, store: PoolStore) -> tuple[CardTask, ...]:
    """The tasks of a version as a registry holds it, whether or not their layers are there."""
    identity = PoolVersion(expected.version, expected.digest, expected.parent)
    add_layers(files, store)
    if identity.card in files:
        return store.parse(check_card(identity, files[identity.card])).tasks
    if CARD not in files:
        raise artifacts_missing(expected.version)
    with as_pool_error():
        return tuple(
            CardTask(row["name"], tuple(row["classes"]), "", 0, row["manifest_sha256"], metrics=row["metrics"])
            for row in json.loads(files[CARD])["tasks"]
        )


def add_layers(files: Mapping[str, bytes], store: PoolStore) -> None:
    """Store the layers among some files."""
    for path, data in files.items():
        folder, _, name = path.rpartition("/")
        if folder == LAYERS:
            store.add_layer(name, data)


def _install_whole_pool(files: PoolFiles, expected: RegisteredVersion, store: PoolStore) -> PoolVersion:
    found, pool = decode(files)
    if found != PoolVersion(expected.version, expected.digest, expected.parent):
        raise RegistryError(f"version {expected.version}: expected {expected.digest}, got {found}", transient=False)
    first: dict[tuple[str, str], Mapping[str, Any]] = {}
    for number in store.paths():  # as the upgrade of the store does, so that digests are the same
        rows = [row for card in store.cards(number) for row in card.tasks] if number < found.version else []
        first = {(row.name, row.trained_at): row.metrics for row in rows} | first
    tasks = [replace(task, metrics=first.get((task.name, task.trained_at), task.metrics)) for task in pool.tasks]
    return store.write(replace(pool, tasks=tuple(tasks)), found.version, found.parent)
