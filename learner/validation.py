"""Is a task fit to be learned? Everything is read once, every picture opened, and what is odd refused or reported."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from PIL import Image

from mqmk.learner.errors import TaskRejected
from mqmk.learner.manifest import Manifest, Shard
from mqmk.learner.settings import DEFAULT_LIMITS, Policy, ShardLimits, SimilaritySettings
from mqmk.learner.shards import (
    LabelledPicture,
    Opener,
    is_held_out,
    labelled_pictures,
    open_picture,
)
from mqmk.learner.similarity import Lookalike, Lookalikes, imbalance
from mqmk.matcher.errors import ImageError
from mqmk.matcher.images import pixel_count

_SHOWN = 20  # contradictions; of a task that is full of them, the first ones say enough


@dataclass(frozen=True)
class TaskReport:
    """What a valid task holds, by class name, and what is odd about it."""

    samples: Mapping[str, int]
    held_out: Mapping[str, int]
    warnings: tuple[str, ...]


def validate_task(
    manifest: Manifest,
    open: Opener,
    limits: ShardLimits = DEFAULT_LIMITS,
    *,
    known_classes: Mapping[str, str] | None = None,
    overlap: Literal["reject", "extend"] = "reject",
    duplicates: Policy = "warn",
    imbalanced: Policy = "warn",
    similarity: SimilaritySettings | None = None,
) -> TaskReport:
    """Read everything once, open every picture, and say what the task holds; or TaskRejected at the first fault.

    `known_classes` maps each class that is already served to its task. Memory: about 0.3 kB per sample.
    """
    similarity = similarity or SimilaritySettings()
    notes = _overlap(manifest, known_classes or {}, overlap)
    contradictions: list[str] = []
    counts, held_out = [0] * len(manifest.classes), [0] * len(manifest.classes)
    earlier, keys = Lookalikes(similarity.near_bits), set[bytes]()
    for shard in manifest.shards:
        for found in labelled_pictures(manifest, shard, open, limits, keys):
            twin = earlier.add(found.sha256, _opened(found, shard, limits), found.label)
            if twin is not None:
                contradictions.append(_contradiction(manifest, shard, found, twin, duplicates))
            counts[found.label] += 1
            held_out[found.label] += is_held_out(found.sha256, manifest.holdout)
    if len(contradictions) > _SHOWN:
        contradictions[_SHOWN:] = [f"and {len(contradictions) - _SHOWN:,} more pictures with two labels"]
    report = TaskReport(
        samples=dict(zip(manifest.classes, counts, strict=True)),
        held_out=dict(zip(manifest.classes, held_out, strict=True)),
        warnings=(*notes, *contradictions),
    )
    return _enough(report, limits, imbalanced, similarity)


def _opened(found: LabelledPicture, shard: Shard, limits: ShardLimits) -> Image.Image:
    try:
        return open_picture(found.image.data, limits)
    except ImageError as error:
        code = "too-many-pixels" if pixel_count(found.image.data) > limits.pixels else "unreadable-image"
        raise TaskRejected(code, str(error), shard.name, found.image.name, found.image.offset) from error


def _overlap(manifest: Manifest, known: Mapping[str, str], overlap: str) -> list[str]:
    shared = [f"{name} (task {known[name]})" for name in manifest.classes if name in known]
    if shared and overlap == "reject":
        reason = (
            f"expected new classes, got {', '.join(shared[:5])} and perhaps more; rename them or set overlap: extend"
        )
        raise TaskRejected("class-overlap", reason)
    return [f"{len(shared)} classes are known already, e.g. {shared[0]}: answers carry the one label"] if shared else []


def _contradiction(manifest: Manifest, shard: Shard, found: LabelledPicture, twin: Lookalike, policy: Policy) -> str:
    """A sentence about two pictures with two labels; by policy an error."""
    number, home = twin.number, 0
    while number >= manifest.shards[home].samples:
        number -= manifest.shards[home].samples
        home += 1
    what = "the same picture" if twin.distance is None else f"nearly the same picture ({twin.distance} bits)"
    reason = (
        f"labelled {manifest.classes[found.label]}, but {what} is labelled {manifest.classes[twin.label]} "
        f"as sample {number} of {manifest.shards[home].name}"
    )
    code = "same-image-two-labels" if twin.distance is None else "similar-image-two-labels"
    error = TaskRejected(code, reason, shard.name, found.image.name, found.image.offset)
    if policy == "reject":
        raise error
    return str(error)


def _enough(report: TaskReport, limits: ShardLimits, policy: Policy, similarity: SimilaritySettings) -> TaskReport:
    """The report, with what can be said only when everything was counted."""
    notes = list(report.warnings)
    for name, count in report.samples.items():
        if count < limits.min_samples or count == report.held_out[name]:
            reason = f"expected at least {limits.min_samples} samples of class {name}, one of them to train on, "
            reason += f"got {count}, {report.held_out[name]} of them held out"
            raise TaskRejected("too-few-samples", reason)
    without = [name for name, count in report.held_out.items() if not count]
    if without:
        notes.append(f"{len(without)} classes have no held-out sample to be judged by, e.g. {without[0]}")
    uneven = imbalance(report.samples, similarity.imbalance)
    if uneven and policy == "reject":
        raise TaskRejected("class-imbalance", uneven)
    return replace(report, warnings=tuple([*notes, uneven] if uneven else notes))
