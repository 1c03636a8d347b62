"""A registry that lives as long as its process: the twin of MLflow for tests that need speed."""

from dataclasses import dataclass, field
from pathlib import Path

from mqmk.daemon.errors import RegistryError
from mqmk.daemon.registry_records import (
    Deletion,
    RegisteredVersion,
    TrainingRecord,
    VersionRecord,
    expect_next,
    expect_same,
    files_gone,
    place_pool,
    read_files,
    version_from_tags,
    version_tags,
)
from mqmk.matcher.pool_files import PoolFiles


@dataclass
class MemoryRegistry:
    """What was recorded can be read from its fields, too."""

    trainings: dict[str, TrainingRecord] = field(default_factory=dict)
    """By effect id."""
    recorded: dict[int, tuple[VersionRecord, PoolFiles | None]] = field(default_factory=dict)
    forgotten: dict[int, Deletion] = field(default_factory=dict)
    pointer: int | None = None

    def record_training(self, record: TrainingRecord) -> str:
        """The first record of an effect id stays."""
        self.trainings.setdefault(record.effect_id, record)
        return f"run-{[*self.trainings].index(record.effect_id) + 1}"

    def record_version(self, record: VersionRecord) -> None:
        """Keep the version and a copy of its files."""
        if record.version in self.recorded:
            return expect_same(self._registered(record.version), record)
        expect_next(record, max(self.recorded, default=0))
        _, files = read_files(record) or (None, None)
        self.recorded[record.version] = (record, files)
        return None

    def point_serving(self, version: int) -> None:
        """Remember which version is served."""
        self._registered(version)
        self.pointer = version

    def record_deletion(self, effect_id: str, task: str, version: int, exact: bool) -> None:
        """Remember a deletion."""
        self._registered(version)
        deletion = Deletion(effect_id, task, version, exact)
        known = self.forgotten.setdefault(version, deletion)
        if known != deletion:
            raise RegistryError(f"version {version}: expected no other deletion, got {known}", passing=False)

    def versions(self) -> list[RegisteredVersion]:
        """All versions, in order."""
        return [self._registered(version) for version in sorted(self.recorded)]

    def deletions(self) -> list[Deletion]:
        """All deletions, in order of their versions."""
        return [self.forgotten[version] for version in sorted(self.forgotten)]

    def serving(self) -> int | None:
        """Where the pointer is."""
        return self.pointer

    def fetch_pool(self, version: int, into: Path) -> Path:
        """Write the remembered files."""
        expected, files = self._registered(version), self.recorded[version][1]
        if files is None:
            raise files_gone(version)
        return place_pool(files, expected, into)

    def close(self) -> None:
        """Nothing to let go of."""

    def _registered(self, version: int) -> RegisteredVersion:
        if version not in self.recorded:
            raise RegistryError(f"version {version} is not recorded", passing=False)
        return version_from_tags(version, version_tags(self.recorded[version][0]))
