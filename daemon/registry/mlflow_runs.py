"""The contents of MLflow runs, and the Markdown notes on runs and versions in `mlflow ui`."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Final

from mqmk.daemon.errors import RegistryError
from mqmk.daemon.registry.records import LAYERS, TrainingRecord, VersionRecord, version_tags
from mqmk.daemon.words import summarize
from mqmk.learner.data.manifest import FILE_NAME, parse_manifest
from mqmk.learner.errors import TaskRejected
from mqmk.matcher.pointer import card_name

POOL_FOLDER: Final = "pool"
SHOWN_NAMES: Final = 20
SHOWN_TASKS: Final = 60  # a description longer than 8,000 characters is cut by MLflow
MODEL_NOTE: Final = (
    "Prompt pools of mqmk-daemon. Version n here is version n of the pool store; the alias `serving` marks the version "
    "that is served. Each version contains `pool.safetensors` and `pool.json`, nothing that runs code."
)
EXPERIMENT_KIND: Final = {"mlflow.experimentKind": "custom_model_development"}  # else shown as a GenAI experiment
TRAININGS_NOTE: Final = "One run per training of a task: settings, metrics of every epoch, evaluation."
POOLS_NOTE: Final = "One run per pool version: its two files and its evaluation on held-out images."
_SPECIAL: Final = re.compile(r"([\\`*_{}\[\]<>#|~])")


Point = tuple[str, float, int]
"""A metric's name, value and step."""


@dataclass(frozen=True)
class RunDraft:
    """The contents of a run, with names that MLflow accepts."""

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
        """A hash of everything: an unfinished run with the same content can be completed, any other is deleted."""
        hashes = {name: hashlib.sha256(data).hexdigest() for name, data in self.files.items()}
        canonical = json.dumps([dict(self.parameters), list(self.points), hashes], sort_keys=True)
        return hashlib.sha256(canonical.encode()).hexdigest()

    def all_tags(self) -> dict[str, str]:
        """Its own tags, those for searching, and those that `mlflow ui` displays specially."""
        found_by = {"effect_id": self.effect_id, "content": self.content}
        shown = {"mlflow.note.content": self.note, "mlflow.source.name": "mqmk-daemon", "mlflow.user": "mqmk-daemon"}
        return dict(self.tags) | found_by | shown


def training_draft(record: TrainingRecord) -> RunDraft:
    """The run of one training."""
    return RunDraft(
        effect_id=record.effect_id,
        name=record.task,
        note=training_note(record),
        tags=dict(record.tags) | {"task": record.task},
        parameters={_metric_name(name): str(value) for name, value in record.parameters.items()},
        points=[
            (_metric_name(name), value, step) for step, row in enumerate(record.epochs) for name, value in row.items()
        ],
        files=dict(record.files)
        | {FILE_NAME: record.manifest}
        | {f"{LAYERS}/{name}": data for name, data in record.layers.items()},
        started=record.started,
        ended=record.ended,
    )


def pool_draft(record: VersionRecord, note: str) -> RunDraft:
    """The run that holds the card of a version, and the layers that came with it."""
    files = {f"{POOL_FOLDER}/{LAYERS}/{name}": data for name, data in record.files.items()}
    if record.card is not None:
        files[f"{POOL_FOLDER}/{card_name(record.version, record.digest)}"] = record.card
    return RunDraft(
        effect_id=record.effect_id,
        name=f"version {record.version}: {record.kind} {summarize(record.changed)}".rstrip(),
        note=note,
        tags=version_tags(record),
        parameters={},
        points=[(_metric_name(name), value, record.version) for name, value in record.metrics.items()],
        files=files,
    )


def training_note(record: TrainingRecord) -> str:
    """What was learned from which data, and how well."""
    rows = {"task": _escape(record.task)} | _data_rows(record.manifest) | {"epochs": str(len(record.epochs))}
    last = record.epochs[-1] if record.epochs else {}
    rows |= {f"{_escape(name)}, last epoch": f"{value:.4g}" for name, value in last.items()}
    rows["effect id"] = _escape(record.effect_id)
    return _table(("training", ""), [*rows.items()])


def version_note(record: VersionRecord) -> str:
    """Where the version came from, and which tasks it knows."""
    before = "the first version" if record.parent is None else f"after version {record.parent}"
    subject = ", ".join(f"**{_escape(name)}**" for name in record.changed)
    heading = f"{f'{record.kind.capitalize()} {subject}'.rstrip()}, {before}. Digest `{record.digest[:12]}`."
    if record.card is None:
        return f"{heading} Its files were removed from the pool store before they could be recorded."
    rows = [
        (str(number + 1), _escape(task.name), str(len(task.classes)), f"{task.samples:,}", task.trained_at)
        for number, task in enumerate(record.tasks[:SHOWN_TASKS])
    ]
    more = len(record.tasks) - SHOWN_TASKS
    parts = [heading, _table(("", "task", "classes", "samples", "trained at"), rows)]
    parts += [_table(("held-out", ""), _numbers(record.metrics))] if record.metrics else []
    return "\n\n".join([*parts, f"… and {more} more tasks."] if more > 0 else parts)


def write_files(files: Mapping[str, bytes], folder: Path) -> None:
    """Write files by name below a folder; RegistryError for a name that leads outside."""
    for name, data in files.items():
        path = PurePosixPath(name)
        if path.is_absolute() or not path.name or ".." in path.parts:
            raise RegistryError(f"expected a file name such as figures/confusion.svg, got {name!r}", transient=False)
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)


def _data_rows(manifest: bytes) -> dict[str, str]:
    try:
        task = parse_manifest(manifest)
    except TaskRejected:  # the file itself is an artifact
        return {}
    names = ", ".join(map(_escape, task.classes[:SHOWN_NAMES])) + (", …" if len(task.classes) > SHOWN_NAMES else "")
    return {
        "classes": f"{len(task.classes)}: {names}",
        "samples": f"{task.samples:,} in {len(task.shards):,} {'shard' if len(task.shards) == 1 else 'shards'}",
        "data": f"`{task.identity}`",
    }


def _numbers(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    return [(_escape(name), f"{value:.4g}") for name, value in list(metrics.items())[:SHOWN_TASKS]]


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _escape(text: str) -> str:
    """Text with Markdown characters escaped."""
    return _SPECIAL.sub(r"\\\1", text)


def _metric_name(name: str) -> str:
    """A name that MLflow accepts for a metric or parameter."""
    return re.sub(r"[^\w.\- :/]", "_", name)[:250]
