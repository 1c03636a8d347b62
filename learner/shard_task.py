"""How a validated task in shards becomes the pictures that training and evaluation read."""

from collections.abc import Iterable, Iterator
from typing import Final

from mqmk.learner.manifest import Manifest
from mqmk.learner.settings import DEFAULT_LIMITS, ShardLimits
from mqmk.learner.shards import (
    Opener,
    Sample,
    held_out_samples,
    open_picture,
    training_samples,
)
from mqmk.learner.tasks import Decoded, Task, pictures
from mqmk.learner.validation import TaskReport
from mqmk.matcher.prompted_vit import BackboneInfo

SHUFFLE_BUFFER: Final = 2048  # encoded pictures that are mixed at a time


def shard_task(
    manifest: Manifest,
    open: Opener,
    report: TaskReport,
    info: BackboneInfo,
    *,
    limits: ShardLimits = DEFAULT_LIMITS,
    shuffle_buffer: int = SHUFFLE_BUFFER,
) -> Task:
    """The task as training takes it; `report` is what validation said of it."""
    held_out = tuple(report.held_out[name] for name in manifest.classes)
    training = tuple(report.samples[name] - kept for name, kept in zip(manifest.classes, held_out, strict=True))

    def read_training(seed: int | None) -> Iterable[Decoded]:
        buffer = 1 if seed is None else shuffle_buffer
        mixed = training_samples(manifest, open, seed=seed or 0, epoch=0, shuffle_buffer=buffer, limits=limits)
        return _decoded(mixed, limits)

    return Task(
        name=manifest.task,
        classes=manifest.classes,
        training=pictures(training, read_training, info),
        held_out=pictures(held_out, lambda _: _decoded(held_out_samples(manifest, open, limits=limits), limits), info),
        manifest_sha256=manifest.identity,
    )


def _decoded(samples: Iterator[Sample], limits: ShardLimits) -> Iterator[Decoded]:
    return ((open_picture(sample.image, limits), sample.label) for sample in samples)
