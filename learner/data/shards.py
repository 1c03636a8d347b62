"""Which labelled images do a task's shards hold? Streamed, with every byte checked: shards are untrusted input.

This is the only file that reads with webdataset, and of it only what is safe: `base_plus_ext` and `group_by_keys` put
members into samples, `shuffle` mixes them. Not its tar iterator (it skips links, folders and `__meta__` members
in silence, takes the end of a truncated tar for the end of the shard, and inflates compressed ones), not its openers
(they run `pipe:` names), not its decoders (they unpickle). The caller opens the streams; members are kept as bytes,
from a list of allowed kinds; everything else is TaskRejected with a code and the place.

    stream -> HashingReader -> tar_members -> allowed members -> group_by_keys -> LabelledImage -> Sample
"""

import hashlib
import json
import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import BinaryIO, Final

from PIL import Image
from webdataset.filters import shuffle
from webdataset.tariterators import base_plus_ext, group_by_keys

from mqmk.learner.data.manifest import Manifest, Shard, ShardSurvey, is_class_name, label_reader
from mqmk.learner.data.split import Split, short_hash
from mqmk.learner.data.tar_members import HashingReader, Member, tar_members
from mqmk.learner.errors import TaskRejected
from mqmk.learner.settings import DEFAULT_LIMITS, ShardLimits
from mqmk.matcher.image_formats import explain_refusal, name_format, suffixes
from mqmk.matcher.images import ImageLimits, decode

Opener = Callable[[str], BinaryIO]
TEXTS: Final = ("cls", "json", "txt")
_TEXT_BYTES = 2**20


@dataclass(frozen=True)
class Sample:
    """One labelled image, still encoded."""

    key: str
    image: bytes
    label: int  # index into the manifest's classes
    held_out: bool  # kept for evaluation, never trained on


@dataclass(frozen=True)
class LabelledImage:
    """An image member, with its place in the shard, under one of the manifest's classes."""

    key: str
    image: Member
    label: int  # index into the manifest's classes
    sha256: bytes  # of the image


@dataclass(frozen=True)
class _RawSample:
    """An image member, and its label as the shard spells it."""

    key: str
    image: Member
    label: str
    labelled_by: Member


def is_held_out(image_sha256: bytes, holdout: float) -> bool:
    """The side of an image in a task that was validated without a Split (0.1): by its bytes, whatever its class."""
    return short_hash(image_sha256) < holdout * 2**64


def training_samples(
    manifest: Manifest,
    open_shard: Opener,
    *,
    seed: int,
    shuffle_buffer: int,
    limits: ShardLimits = DEFAULT_LIMITS,
    split: Split | None = None,
) -> Iterator[Sample]:
    """The training side, each sample once, in an order that depends on the content and the seed only.

    Memory: `shuffle_buffer` encoded images. A shard's hash is known at its end, so TaskRejected may come late.
    """
    rng = random.Random(f"{seed}/0")
    shards = _sort_by_content(manifest)
    rng.shuffle(shards)
    stream = (sample for sample in _all_samples(manifest, shards, open_shard, limits, split) if not sample.held_out)
    mixed: Iterator[Sample] = shuffle(max(1, shuffle_buffer), initial=max(1, shuffle_buffer), rng=rng)(stream)
    return mixed


def held_out_samples(
    manifest: Manifest, open_shard: Opener, *, limits: ShardLimits = DEFAULT_LIMITS, split: Split | None = None
) -> Iterator[Sample]:
    """The held-out side, always in the same order."""
    return (s for s in _all_samples(manifest, _sort_by_content(manifest), open_shard, limits, split) if s.held_out)


def survey_shard(name: str, open_shard: Opener, limits: ShardLimits = DEFAULT_LIMITS) -> ShardSurvey:
    """Read a shard that no manifest describes; for `derive_manifest`."""
    labels, count = set(), 0
    with _open_reader(name, open_shard, limits) as source:
        for found in _read_samples(source, limits, set()):
            count += 1
            labels.add(found.label)
            if not is_class_name(found.label):
                raise source.rejection(
                    "unknown-class", f"expected a class name, got {found.label!r:.80}", found.labelled_by
                )
        if not count:
            raise source.rejection("wrong-count", "expected at least one sample, got none")
        return ShardSurvey(Shard(name, source.offset, source.sha256, count), frozenset(labels))


def labelled_images(
    manifest: Manifest, shard: Shard, open_shard: Opener, limits: ShardLimits, keys: set[bytes]
) -> Iterator[LabelledImage]:
    """The images of a shard; at its end it is checked against the manifest. `keys` collects digests of their keys."""
    read_label, count = label_reader(manifest.classes), 0
    if shard.bytes > limits.shard_bytes:
        reason = f"expected at most {limits.shard_bytes:,} bytes, got {shard.bytes:,}; make smaller shards"
        raise TaskRejected("shard-too-big", reason, shard.name)
    with _open_reader(shard.name, open_shard, limits, shard.bytes) as source:
        for found in _read_samples(source, limits, keys):
            label = read_label(found.label)
            if label is None:
                reason = f"expected one of the manifest's {len(manifest.classes)} classes, got {found.label!r:.80}"
                raise source.rejection("unknown-class", reason, found.labelled_by)
            count += 1
            yield LabelledImage(found.key, found.image, label, hashlib.sha256(found.image.data).digest())
        _check_against_manifest(source, shard, count)


def open_image(data: bytes, limits: ShardLimits = DEFAULT_LIMITS) -> Image.Image:
    """The image, fully decoded, within the limits of a shard; else ImageError."""
    return decode(data, ImageLimits(limits.member_bytes, limits.pixels, limits.formats or ()))


def _sort_by_content(manifest: Manifest) -> list[Shard]:
    return sorted(manifest.shards, key=lambda shard: shard.sha256)


def _all_samples(
    manifest: Manifest, shards: list[Shard], open_shard: Opener, limits: ShardLimits, split: Split | None
) -> Iterator[Sample]:
    patient = replace(limits, seconds=math.inf)  # training may take any time between two samples
    for shard in shards:
        for found in labelled_images(manifest, shard, open_shard, patient, set()):
            image = short_hash(found.sha256)
            if split is None:
                yield Sample(found.key, found.image.data, found.label, is_held_out(found.sha256, manifest.holdout))
            elif image not in split.left_out:
                yield Sample(found.key, found.image.data, found.label, split.is_held_out(found.label, image))


def _check_against_manifest(source: HashingReader, shard: Shard, count: int) -> None:
    if source.offset != shard.bytes:
        raise source.rejection("wrong-size", f"expected {shard.bytes:,} bytes, got {source.offset:,}; upload it again")
    if source.sha256 != shard.sha256:
        reason = f"expected sha256 {shard.sha256[:12]}…, got {source.sha256[:12]}…; the shard was changed or damaged"
        raise source.rejection("wrong-hash", reason)
    if count != shard.samples:
        raise source.rejection("wrong-count", f"expected {shard.samples:,} samples, got {count:,}")


@contextmanager
def _open_reader(
    name: str, open_shard: Opener, limits: ShardLimits, expected_bytes: int | None = None
) -> Iterator[HashingReader]:
    try:
        stream = open_shard(name)
    except FileNotFoundError as error:
        raise TaskRejected("missing-shard", "expected this shard beside TASK.json, it is not there", name) from error
    with stream:
        yield HashingReader(
            stream, name, max_bytes=limits.shard_bytes, seconds=limits.seconds, expected_bytes=expected_bytes
        )


def _read_samples(source: HashingReader, limits: ShardLimits, keys: set[bytes]) -> Iterator[_RawSample]:
    """The samples of a shard; `keys` collects digests of their keys."""
    files = tar_members(source, max_files=limits.members, max_file_bytes=limits.member_bytes)
    kinds_of_image = suffixes(limits.formats or ())
    members = _check_members(source, files, keys, kinds_of_image)
    for group in group_by_keys({"fname": m.name, "data": m, "__url__": ""} for m in members):
        kinds = {kind: member for kind, member in group.items() if isinstance(member, Member)}
        first = next(iter(kinds.values()))
        images = [kinds[kind] for kind in kinds_of_image if kind in kinds]
        by = kinds.get("cls") or kinds.get("json")
        if len(images) != 1 or by is None:
            found = " and ".join(kinds)
            reason = f"expected one image and one .cls or .json side by side for each key, got {found}"
            raise source.rejection("half-sample" if len(images) < 2 else "two-images", reason, first)
        yield _RawSample(group["__key__"], images[0], _read_label(source, by, is_json="cls" not in kinds), by)


def _read_label(source: HashingReader, member: Member, *, is_json: bool) -> str:
    """The label's text; JSON is parsed only where there is no .cls."""
    try:
        text = member.data.decode()
        if not is_json:
            return text.strip()
        label = json.loads(text)["label"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        reason = 'expected a class name in UTF-8, or JSON with "label"'
        raise source.rejection("bad-label", f"{reason}, got {member.data[:40]!r}", member) from error
    if type(label) not in (str, int):
        raise source.rejection("bad-label", f'expected "label" as a string or an integer, got {label!r:.80}', member)
    return str(label).strip()


def _check_members(
    source: HashingReader, members: Iterator[Member], keys: set[bytes], images: tuple[str, ...]
) -> Iterator[Member]:
    """The members, each of a known kind and none twice."""
    current, kinds = None, set[str]()
    for member in members:
        key, kind = base_plus_ext(member.name)
        kind = (kind or "").lower()
        if kind not in images + TEXTS or any(part.startswith("__") for part in member.name.split("/")):
            raise source.rejection("unknown-member", _explain_member(member, images), member)
        if kind in TEXTS and len(member.data) > _TEXT_BYTES:
            raise source.rejection("member-too-big", f"expected at most {_TEXT_BYTES:,} bytes of text", member)
        if key != current:
            current, kinds = key, set()
            digest = hashlib.blake2b(key.encode(), digest_size=16).digest()
            if digest in keys:
                raise source.rejection(
                    "duplicate-member", "expected every key once in a task, this one came before", member
                )
            keys.add(digest)
        if kind in kinds:
            raise source.rejection("duplicate-member", "expected every member once, this one came before", member)
        kinds.add(kind)
        yield member


def _explain_member(member: Member, images: tuple[str, ...]) -> str:
    expected = f"expected members named <key>.{{{','.join(images + TEXTS)}}} with no other dot in the file name"
    return f"{expected}; {explain_refusal(member.data)}" if name_format(member.data) else expected
