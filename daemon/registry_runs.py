"""What a run is to hold, and what a person reads about runs and versions in `mlflow ui`, as Markdown."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Final

from mqmk.daemon.errors import RegistryError
from mqmk.daemon.registry_records import TrainingRecord, VersionRecord, version_tags
from mqmk.learner.errors import TaskRejected
from mqmk.learner.manifest import FILE_NAME, parse_manifest
from mqmk.matcher.pool import PromptPool
from mqmk.matcher.pool_files import CARD, TENSORS, PoolFiles

POOL_FOLDER: Final = "pool"
SHOWN_NAMES: Final = 20
SHOWN_TASKS: Final = 60  # a description longer than 8,000 characters is cut by MLflow
MODEL_NOTE: Final = (
    "Prompt pools of mqmk-daemon. Version n here is version n of the pool store; the alias `serving` is on the version "
    "that answers requests. Each version holds `pool.safetensors` and `pool.json`, nothing that runs code."
)
EXPERIMENT_KIND: Final = {
    "mlflow.experimentKind": "custom_model_development"
}  # else shown as an experiment with agents
TRAININGS_NOTE: Final = "One run for each training of a task: settings, metrics of every epoch, evaluation."
POOLS_NOTE: Final = "One run for each pool version: its two files, and what held-out pictures say about it."
_SPECIAL: Final = re.compile(r"([\\`*_{}\[\]<>#|~])")


Point = tuple[str, float, int]
"""A metric's name, value and step."""


@dataclass(frozen=True)
class RunDraft:
    """Everything that a run is to hold; the names are such as MLflow takes."""

    effect_id: str
    name: str
    note: str
    tags: Mapping[str, str]
    parameters: Mapping[str, str]
    points: Sequence[Point]
    files: Mapping[str, bytes] = field(repr=False)
    started: float | None = None
    ended: float | None = None

    @cached_property
    def content(self) -> str:
        """All of it in one hash: a half-made run of the same content can be completed, another must go."""
        hashes = {name: hashlib.sha256(data).hexdigest() for name, data in self.files.items()}
        canonical = json.dumps([dict(self.parameters), list(self.points), hashes], sort_keys=True)
        return hashlib.sha256(canonical.encode()).hexdigest()

    def all_tags(self) -> dict[str, str]:
        """Its own tags, those it is found by, and those that `mlflow ui` shows in places of their own."""
        found_by = {"effect_id": self.effect_id, "content": self.content}
        shown = {"mlflow.note.content": self.note, "mlflow.source.name": "mqmk-daemon", "mlflow.user": "mqmk-daemon"}
        return dict(self.tags) | found_by | shown


def training_draft(record: TrainingRecord) -> RunDraft:
    """The run of a training."""
    return RunDraft(
        effect_id=record.effect_id,
        name=record.task,
        note=training_note(record),
        tags=dict(record.tags) | {"task": record.task},
        parameters={_key(name): str(value) for name, value in record.parameters.items()},
        points=[(_key(name), value, step) for step, row in enumerate(record.epochs) for name, value in row.items()],
        files=dict(record.files) | {FILE_NAME: record.manifest},
        started=record.started,
        ended=record.ended,
    )


def pool_draft(record: VersionRecord, files: PoolFiles | None, note: str) -> RunDraft:
    """The run that holds the files of a version."""
    return RunDraft(
        effect_id=record.effect_id,
        name=" ".join(part for part in (f"version {record.version}:", record.kind, record.task) if part),
        note=note,
        tags=version_tags(record),
        parameters={},
        points=[(_key(name), value, record.version) for name, value in record.metrics.items()],
        files={f"{POOL_FOLDER}/{TENSORS}": files.tensors, f"{POOL_FOLDER}/{CARD}": files.card} if files else {},
    )


def training_note(record: TrainingRecord) -> str:
    """What was learned from what, and how well."""
    rows = {"task": _plain(record.task)} | _data_rows(record.manifest) | {"epochs": str(len(record.epochs))}
    last = record.epochs[-1] if record.epochs else {}
    rows |= {f"{_plain(name)}, last epoch": f"{value:.4g}" for name, value in last.items()}
    rows["effect id"] = _plain(record.effect_id)
    return _table(("training", ""), [*rows.items()])


def version_note(record: VersionRecord, pool: PromptPool | None) -> str:
    """Where the version came from, and which tasks it knows."""
    before = "the first version" if record.parent is None else f"after version {record.parent}"
    subject = f" **{_plain(record.task)}**" if record.task else ""
    heading = f"{record.kind.capitalize()}{subject}, {before}. Digest `{record.digest[:12]}`."
    if pool is None:
        return f"{heading} Its files were removed from the pool store before they could be recorded."
    rows = [
        (str(number + 1), _plain(task.name), str(len(task.classes)), f"{task.samples:,}", task.trained_at)
        for number, task in enumerate(pool.tasks[:SHOWN_TASKS])
    ]
    more = len(pool.tasks) - SHOWN_TASKS
    parts = [heading, _table(("", "task", "classes", "samples", "trained at"), rows)]
    parts += [_table(("held-out", ""), _numbers(record.metrics))] if record.metrics else []
    return "\n\n".join([*parts, f"… and {more} tasks more."] if more > 0 else parts)


def write_files(files: Mapping[str, bytes], folder: Path) -> None:
    """Files by name below a folder, none outside it."""
    for name, data in files.items():
        path = PurePosixPath(name)
        if path.is_absolute() or not path.name or ".." in path.parts:
            raise RegistryError(f"expected a file name such as figures/confusion.svg, got {name!r}", passing=False)
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)


def _data_rows(manifest: bytes) -> dict[str, str]:
    try:
        task = parse_manifest(manifest)
    except TaskRejected:  # the file itself is among the artifacts
        return {}
    names = ", ".join(map(_plain, task.classes[:SHOWN_NAMES])) + (", …" if len(task.classes) > SHOWN_NAMES else "")
    return {
        "classes": f"{len(task.classes)}: {names}",
        "samples": f"{task.samples:,} in {len(task.shards):,} {'shard' if len(task.shards) == 1 else 'shards'}",
        "data": f"`{task.identity}`",
    }


def _numbers(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    return [(_plain(name), f"{value:.4g}") for name, value in list(metrics.items())[:SHOWN_TASKS]]


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _plain(text: str) -> str:
    """Text that Markdown leaves as it is."""
    return _SPECIAL.sub(r"\\\1", text)


def _key(name: str) -> str:
    """A name that MLflow takes for a metric or a parameter."""
    return re.sub(r"[^\w.\- :/]", "_", name)[:250]
