"""Is a task fit to be learned? Everything is read once, every image decoded; anything odd is rejected or reported."""

from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from PIL import Image

from mqmk.learner.data.manifest import Manifest, Shard
from mqmk.learner.data.shards import LabelledImage, Opener, labelled_images, open_image
from mqmk.learner.data.similarity import Lookalike, Lookalikes, describe_imbalance
from mqmk.learner.data.split import HashedImage, Side, Split, draw_split, short_hash
from mqmk.learner.errors import TaskRejected
from mqmk.learner.settings import DEFAULT_LIMITS, BadSamples, Policy, ShardLimits, SimilaritySettings
from mqmk.matcher.errors import ImageError
from mqmk.matcher.images import pixel_count

_MAX_SHOWN = 20  # contradictions, bad images: the first ones are enough


@dataclass(frozen=True)
class TaskReport:
    """What a valid task holds, by class name, and what is odd about it."""

    samples: Mapping[str, int]
    held_out: Mapping[str, int]
    warnings: tuple[str, ...]
    split: Split | None = None
    """None in a report of 0.1."""

    def to_json(self) -> dict[str, Any]:
        """For the ledger and for workers."""
        return asdict(replace(self, split=None)) | {"split": self.split.to_json() if self.split else None}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "TaskReport":
        """What `to_json` gave, also in version 0.1."""
        split = fields.get("split")
        given = Split.from_json(split) if split else None
        return cls(fields["samples"], fields["held_out"], tuple(fields["warnings"]), given)


def validate_task(
    manifest: Manifest,
    open_shard: Opener,
    limits: ShardLimits = DEFAULT_LIMITS,
    *,
    known_classes: Mapping[str, str] | None = None,
    overlap: Literal["reject", "extend"] = "reject",
    duplicates: Policy = "warn",
    imbalanced: Policy = "warn",
    similarity: SimilaritySettings | None = None,
    bad_samples: BadSamples = "reject",
    max_bad_samples: float = 0.05,
) -> TaskReport:
    """Read everything once, decode every image, and report what the task holds; TaskRejected at the first fault.

    `known_classes` maps each class that is already served to its task. `max_bad_samples` is a share below 1, a count
    from 1. Memory: about 0.3 kB per sample.
    """
    similarity = similarity or SimilaritySettings()
    notes = check_overlap(manifest, known_classes or {}, overlap)
    bad = _BadImages(manifest, bad_samples, max_bad_samples, limits)
    contradictions: list[str] = []
    earlier = Lookalikes(similarity.near_bits)
    numbers = array("Q")  # of the samples that could be read
    for number, (shard, found) in enumerate(_read_samples(manifest, open_shard, limits)):
        image = bad.open_or_record(found, shard)
        if image is None:
            continue
        numbers.append(number)
        twin = earlier.add(found.sha256, image, found.label)
        if twin is not None:
            twin = replace(twin, number=numbers[twin.number])
            contradictions.append(_describe_contradiction(manifest, shard, found, twin, duplicates))
    seen = [HashedImage(*each) for each in zip(earlier.images, earlier.labels, earlier.hashes, strict=True)]
    split, sides = draw_split(seen, len(manifest.classes), manifest.holdout, similarity.near_bits)
    held_out = Counter(each.label for each in seen if split.is_held_out(each.label, each.image))
    counts = Counter(earlier.labels)
    report = TaskReport(
        samples={name: counts[label] for label, name in enumerate(manifest.classes)},
        held_out={name: held_out[label] for label, name in enumerate(manifest.classes)},
        warnings=(
            *notes,
            *bad.warnings,
            *_shorten(contradictions, "images with two labels"),
            *_warn_near_copies(manifest, sides),
        ),
        split=replace(split, left_out=frozenset(bad.images)),
    )
    return _check_counts(report, limits, imbalanced, similarity)


def _read_samples(manifest: Manifest, open_shard: Opener, limits: ShardLimits) -> Iterator[tuple[Shard, LabelledImage]]:
    keys = set[bytes]()
    return (
        (shard, found)
        for shard in manifest.shards
        for found in labelled_images(manifest, shard, open_shard, limits, keys)
    )


class _BadImages:
    """Images that cannot be read: the task is rejected at the first one, or at the first one too many."""

    def __init__(self, manifest: Manifest, policy: BadSamples, most: float, limits: ShardLimits) -> None:
        self._limits, self._total = limits, manifest.samples
        self._max_bad = 0 if policy == "reject" else most if most >= 1 else most * manifest.samples
        self._policy = policy
        self._reasons: list[str] = []
        self.images: list[int] = []

    def open_or_record(self, found: LabelledImage, shard: Shard) -> Image.Image | None:
        """The image; None if it is left out."""
        try:
            return open_image(found.image.data, self._limits)
        except ImageError as error:
            self._record(found, shard, error)
            return None

    def _record(self, found: LabelledImage, shard: Shard, error: ImageError) -> None:
        too_large = pixel_count(found.image.data, self._limits.formats or ()) > self._limits.pixels
        code = "too-many-pixels" if too_large else "unreadable-image"
        rejected = TaskRejected(code, str(error), shard.name, found.image.name, found.image.offset)
        if self._policy == "reject":
            raise rejected from error
        self.images.append(short_hash(found.sha256))
        self._reasons.append(str(rejected))
        if len(self.images) > self._max_bad:
            reason = f"expected at most {self._max_bad:g} of {self._total:,} images that cannot be read "
            reason += f"(bucket.max_bad_samples), got more: {'; '.join(self._reasons[:_MAX_SHOWN])}"
            raise TaskRejected("too-many-bad-samples", reason)

    @property
    def warnings(self) -> list[str]:
        return _shorten([f"left out {reason}" for reason in self._reasons], "images that cannot be read")


def _shorten(sentences: Sequence[str], what: str) -> list[str]:
    rest = len(sentences) - _MAX_SHOWN
    return [*sentences[:_MAX_SHOWN], *([f"and {rest:,} more {what}"] if rest > 0 else [])]


def _warn_near_copies(manifest: Manifest, sides: Sequence[Side]) -> list[str]:
    """Classes of near copies that could not be kept on one side of the split."""
    named = [(name, side.most_alike) for name, side in zip(manifest.classes, sides, strict=True) if side.most_alike]
    if not named:
        return []
    name, count = named[0]
    return [f"{_count_classes(len(named))} with mostly near copies of one image, e.g. {count:,} images of {name}: "
            "some are held out and some trained on, so accuracy looks better than it is"]  # fmt: skip


def _count_classes(count: int) -> str:
    return "1 class" if count == 1 else f"{count:,} classes"


def check_overlap(manifest: Manifest, known: Mapping[str, str], overlap: str) -> list[str]:
    """A warning about classes that are known from other tasks; TaskRejected unless that is allowed."""
    shared = [f"{name} (task {known[name]})" for name in manifest.classes if name in known]
    if shared and overlap == "reject":
        more = f" and {len(shared) - 5} more" if len(shared) > 5 else ""
        reason = f"expected new classes, got {', '.join(shared[:5])}{more}; rename them, or set bucket.overlap: extend"
        raise TaskRejected("class-overlap", f"{reason} and restart the daemon")
    return (
        [f"{_count_classes(len(shared))} that other tasks have, too, e.g. {shared[0]}: both answer with it"]
        if shared
        else []
    )


def _describe_contradiction(
    manifest: Manifest, shard: Shard, found: LabelledImage, twin: Lookalike, policy: Policy
) -> str:
    """A sentence about two images with two labels; by policy an error."""
    number, home = twin.number, 0
    while number >= manifest.shards[home].samples:
        number -= manifest.shards[home].samples
        home += 1
    what = "the same image" if twin.distance is None else f"nearly the same image ({twin.distance} bits)"
    reason = (
        f"labelled {manifest.classes[found.label]}, but {what} is labelled {manifest.classes[twin.label]} "
        f"as sample {number} of {manifest.shards[home].name}"
    )
    code = "same-image-two-labels" if twin.distance is None else "similar-image-two-labels"
    error = TaskRejected(code, reason, shard.name, found.image.name, found.image.offset)
    if policy == "reject":
        raise error
    return str(error)


def _check_counts(
    report: TaskReport, limits: ShardLimits, policy: Policy, similarity: SimilaritySettings
) -> TaskReport:
    """The report, with the checks that need all counts."""
    notes = list(report.warnings)
    for name, count in report.samples.items():
        if count < max(1, limits.min_samples):
            reason = (
                f"expected at least {limits.min_samples} samples of class {name}, got {count}; add some or remove it"
            )
            raise TaskRejected("too-few-samples", reason)
    without = [name for name, count in report.held_out.items() if not count]
    if without:
        notes.append(f"{_count_classes(len(without))} without a held-out image to test on, e.g. {without[0]}")
    uneven = describe_imbalance(report.samples, similarity.imbalance)
    if uneven and policy == "reject":
        raise TaskRejected("class-imbalance", uneven)
    return replace(report, warnings=tuple([*notes, uneven] if uneven else notes))
