"""How a validated task in shards becomes the images that training and evaluation read."""

from collections.abc import Iterable, Iterator
from typing import Final

from mqmk.learner.data.manifest import Manifest
from mqmk.learner.data.shards import (
    Opener,
    Sample,
    held_out_samples,
    open_image,
    training_samples,
)
from mqmk.learner.data.tasks import Decoded, Task, load_images
from mqmk.learner.data.validation import TaskReport
from mqmk.learner.settings import DEFAULT_LIMITS, ShardLimits
from mqmk.matcher.prompted_vit import BackboneInfo

SHUFFLE_BUFFER: Final = 2048  # encoded images that are mixed at a time


def shard_task(
    manifest: Manifest,
    open_shard: Opener,
    report: TaskReport,
    info: BackboneInfo,
    *,
    limits: ShardLimits = DEFAULT_LIMITS,
    shuffle_buffer: int = SHUFFLE_BUFFER,
) -> Task:
    """The task, ready for training; `report` comes from its validation."""
    held_out = tuple(report.held_out[name] for name in manifest.classes)
    training = tuple(report.samples[name] - kept for name, kept in zip(manifest.classes, held_out, strict=True))

    def read_training(seed: int | None) -> Iterable[Decoded]:
        buffer = 1 if seed is None else shuffle_buffer
        mixed = training_samples(
            manifest, open_shard, seed=seed or 0, shuffle_buffer=buffer, limits=limits, split=report.split
        )
        return _decode(mixed, limits)

    def read_held_out(_seed: int | None) -> Iterable[Decoded]:
        return _decode(held_out_samples(manifest, open_shard, limits=limits, split=report.split), limits)

    return Task(
        name=manifest.task,
        classes=manifest.classes,
        training=load_images(training, read_training, info),
        held_out=load_images(held_out, read_held_out, info),
        manifest_sha256=manifest.identity,
    )


def _decode(samples: Iterator[Sample], limits: ShardLimits) -> Iterator[Decoded]:
    return ((open_image(sample.image, limits), sample.label) for sample in samples)
