"""An in-memory registry: a fast replacement for MLflow in tests."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from mqmk.daemon.errors import RegistryError
from mqmk.daemon.registry.interface import (
    add_layers,
    artifacts_missing,
    check_record,
    install_pool,
    recorded_tasks,
    require_next,
    require_same,
)
from mqmk.daemon.registry.records import (
    LAYERS,
    Deletion,
    RegisteredVersion,
    TrainingRecord,
    VersionRecord,
    version_from_tags,
    version_tags,
)
from mqmk.matcher.pool_cards import CardTask
from mqmk.matcher.pool_files import PoolVersion
from mqmk.matcher.pool_store import PoolStore


@dataclass
class MemoryRegistry:
    """Its fields show what was recorded."""

    trainings: dict[str, TrainingRecord] = field(default_factory=dict)
    """By effect id."""
    recorded: dict[int, VersionRecord] = field(default_factory=dict)
    forgotten: dict[int, Deletion] = field(default_factory=dict)
    erased: dict[str, list[str]] = field(default_factory=dict)
    """What was deleted of each training that was erased, by effect id."""
    pointer: int | None = None

    def record_training(self, record: TrainingRecord) -> str:
        """Keep the first record of an effect id."""
        self.trainings.setdefault(record.effect_id, record)
        return f"run-{[*self.trainings].index(record.effect_id) + 1}"

    def record_version(self, record: VersionRecord) -> None:
        """Keep the version and a copy of its files."""
        if record.version in self.recorded:
            return require_same(self._require(record.version), record)
        require_next(record, max(self.recorded, default=0))
        check_record(record)
        self.recorded[record.version] = record
        return None

    def point_serving(self, version: int) -> None:
        """Remember which version is served."""
        self._require(version)
        self.pointer = version

    def record_deletion(self, effect_id: str, task: str, version: int, exact: bool) -> None:
        """Remember a deletion."""
        self._require(version)
        deletion = Deletion(effect_id, task, version, exact)
        known = self.forgotten.setdefault(version, deletion)
        if known != deletion:
            raise RegistryError(f"version {version}: expected no other deletion, got {known}", transient=False)

    def versions(self) -> list[RegisteredVersion]:
        """All versions, in order."""
        return [self._require(version) for version in sorted(self.recorded)]

    def deletions(self) -> list[Deletion]:
        """All deletions, in order of their versions."""
        return [self.forgotten[version] for version in sorted(self.forgotten)]

    def serving(self) -> int | None:
        """The version that was set as served."""
        return self.pointer

    def fetch_pool(self, version: int, store: PoolStore) -> PoolVersion:
        """From the recorded files of this version and those before it."""
        files = self._files(version, store)
        return install_pool(files, self._require(version), store)

    def fetch_tasks(self, version: int, store: PoolStore) -> tuple[CardTask, ...]:
        """From the recorded card."""
        return recorded_tasks(self._files(version, store), self._require(version), store)

    def _files(self, version: int, store: PoolStore) -> dict[str, bytes]:
        expected, record = self._require(version), self.recorded[version]
        if record.card is None:
            raise artifacts_missing(version)
        for number in sorted(self.recorded):
            add_layers({f"{LAYERS}/{name}": data for name, data in self.recorded[number].files.items()}, store)
        for training in self.trainings.values():
            add_layers({f"{LAYERS}/{name}": data for name, data in training.layers.items()}, store)
        return {PoolVersion(expected.version, expected.digest, expected.parent).card: record.card}

    def erase_task(self, identity: str, versions: Sequence[int]) -> list[str]:
        """Drop the layers of the task's trainings."""
        own = [record for record in self.trainings.values() if record.tags.get("data") == identity]
        for record in own:
            layers = [f"{record.effect_id}/{LAYERS}/{name}" for name in record.layers]
            self.erased.setdefault(record.effect_id, layers)
            self.trainings[record.effect_id] = replace(record, layers={})
        return [name for record in own for name in self.erased[record.effect_id]]

    def erased_data(self) -> set[str]:
        """The data of trainings that were erased, but for those that were trained again."""
        kept = {record.tags.get("data") for effect, record in self.trainings.items() if effect not in self.erased}
        return {self.trainings[effect].tags["data"] for effect in self.erased} - kept

    def close(self) -> None:
        """Nothing to release."""

    def _require(self, version: int) -> RegisteredVersion:
        if version not in self.recorded:
            raise RegistryError(f"version {version} is not recorded", transient=False)
        return version_from_tags(version, version_tags(self.recorded[version]))
