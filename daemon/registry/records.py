"""What a registry records about training runs and pool versions, as values."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from mqmk.daemon.errors import RegistryError
from mqmk.matcher.pool_cards import CardTask

LAYERS: Final = "layers"
"""The folder of layers among the artifacts of a run."""
Value = str | int | float | bool
_EFFECT_ID: Final = re.compile(r"[\w .,:;/+=@()#-]{1,250}")  # used in a search expression: no quotes


@dataclass(frozen=True)
class TrainingRecord:
    """One training run of one task."""

    effect_id: str
    task: str
    parameters: Mapping[str, Value]
    epochs: Sequence[Mapping[str, float]]
    """The metrics of each epoch, in order."""
    manifest: bytes
    """TASK.json."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Tables and figures by name; a name may have folders."""
    layers: Mapping[str, bytes] = field(default_factory=dict)
    """The layers that the task added to the pool, by their names in `layers/`."""
    tags: Mapping[str, str] = field(default_factory=dict)
    """Such as the git and data hashes."""
    started: float | None = None
    """Unix time; None is the time of recording."""
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
    changed: Sequence[str]
    """The names of the tasks that were learned, in order, or of the one that was forgotten."""
    run_ids: Sequence[str]
    """The trainings of the tasks that were learned."""
    card: bytes | None
    """Its card; None if it was removed before it could be recorded."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Files of `layers/` that came with this version, but for task layers, which belong to trainings."""
    tasks: Sequence[CardTask] = ()
    """All tasks of the card, for people."""
    tags: Mapping[str, str] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    former_digest: str | None = None
    """Of the same version in the store of release 0.1, which may have recorded it."""

    def __post_init__(self) -> None:
        _check_effect_id(self.effect_id)


@dataclass(frozen=True)
class RegisteredVersion:
    """A version as recorded in a registry."""

    version: int
    digest: str
    parent: int | None
    kind: str
    effect_id: str


@dataclass(frozen=True)
class Deletion:
    """A task that was forgotten, and since which version."""

    effect_id: str
    task: str
    version: int
    exact: bool
    """Whether the pool is what it would be if the task had never been learned."""


def version_tags(record: VersionRecord) -> dict[str, str]:
    """The tags of a version; None has no tag. Long ones are why `publish.together` has a maximum."""
    own = {
        "digest": record.digest,
        "parent": record.parent,
        "kind": record.kind,
        "task": ", ".join(record.changed) or None,
        "effect_id": record.effect_id,
        "training_run": " ".join(record.run_ids) or None,
    }
    return dict(record.tags) | {name: str(value) for name, value in own.items() if value is not None}


def version_from_tags(version: int, tags: Mapping[str, str]) -> RegisteredVersion:
    """The version with these tags."""
    try:
        parent = int(tags["parent"]) if "parent" in tags else None
        return RegisteredVersion(version, tags["digest"], parent, tags["kind"], tags["effect_id"])
    except (KeyError, ValueError) as error:
        raise RegistryError(
            f"version {version}: expected the tags digest, parent, kind and effect_id, got {dict(tags)}; it was not "
            "recorded by mqmk-daemon: configure another model name",
            transient=False,
        ) from error


def _check_effect_id(effect_id: str) -> None:
    if not _EFFECT_ID.fullmatch(effect_id):
        raise RegistryError(
            f"expected an effect id of letters, digits and - _ . : /, got {effect_id!r}", transient=False
        )
