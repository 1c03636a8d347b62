"""How labelled pictures are read from shards: streamed, checked byte by byte, and never more trusted than a stranger.

This is the only file that reads with webdataset, and of it only what is safe: `base_plus_ext` and `group_by_keys` put
members together to samples, `shuffle` mixes them. Not its tar iterator (it skips links, folders and `__meta__` members
in silence, takes the end of a truncated tar for the end of the shard, and inflates compressed ones), not its openers
(they run `pipe:` names), not its decoders (they unpickle). The caller opens the streams; members are kept as bytes,
from a list of allowed kinds; everything else is TaskRejected with a code and the place. An OSError of a stream is not:
that is the network's fault, not the data's, and may be tried again.

    stream -> HashingReader -> tar members -> allowed members -> group_by_keys -> Sample
"""

import hashlib
import io
import json
import math
import random
import re
import sys
import tarfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import BinaryIO, Final, Literal, Protocol, runtime_checkable

from PIL import Image
from webdataset.filters import shuffle
from webdataset.tariterators import base_plus_ext, group_by_keys

from mqmk.learner.errors import TaskRejected
from mqmk.learner.manifest import Manifest, Shard, ShardSurvey, is_class_name, label_reader
from mqmk.learner.similarity import Lookalike, Lookalikes, Policy, SimilaritySettings, imbalance
from mqmk.matcher.errors import ImageError
from mqmk.matcher.images import FORMATS, ImageLimits, decode

Opener = Callable[[str], BinaryIO]
IMAGES: Final = ("jpg", "jpeg", "png", "webp")
TEXTS: Final = ("cls", "json", "txt")
BLOCK: Final = 512  # a tar is made of these
_CHUNK = 2**20
_TEXT_BYTES = 2**20
_COMPRESSED = {
    b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ\x00": "xz", b"\x28\xb5\x2f\xfd": "zstd", b"PK\x03\x04": "zip",
    b"\x04\x22\x4d\x18": "lz4", b"\x5d\x00\x00": "lzma",
}  # fmt: skip
_SIZE = re.compile(r"[0-9]{1,15}")
_SHOWN = 20  # contradictions; of a task that is full of them, the first ones say enough


@dataclass(frozen=True)
class ShardLimits:
    """What a task may cost, and the least it must bring."""

    members: int = 1_000_000  # files in one shard
    member_bytes: int = 16 * 2**20
    shard_bytes: int = 8 * 2**30
    pixels: int = 40_000_000  # of one picture, from its header
    seconds: float = 3600.0  # to read and check one shard; a read that never returns is for the opener to end
    min_samples: int = 2  # of every class, held-out ones included


DEFAULT_LIMITS: Final = ShardLimits()


@dataclass(frozen=True)
class Sample:
    """One labelled picture, still encoded."""

    key: str
    image: bytes
    label: int  # index into the manifest's classes
    held_out: bool  # kept for evaluation, never trained on


@dataclass(frozen=True)
class TaskReport:
    """What a valid task holds, by class name, and what is odd about it."""

    samples: Mapping[str, int]
    held_out: Mapping[str, int]
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class _Member:
    """One file of a tar; `offset` is that of its header."""

    name: str
    offset: int
    data: bytes


@dataclass(frozen=True)
class _Labelled:
    """An image member and its label as it is written in the shard."""

    key: str
    image: _Member
    label: str
    labelled_by: _Member


def is_held_out(image_sha256: bytes, holdout: float) -> bool:
    """The side of the split: from the picture's bytes only, whatever its name, shard, task or order."""
    return int.from_bytes(image_sha256[:8], "big") < holdout * 2**64


def training_samples(
    manifest: Manifest,
    open: Opener,
    *,
    seed: int,
    epoch: int,
    shuffle_buffer: int,
    limits: ShardLimits = DEFAULT_LIMITS,
) -> Iterator[Sample]:
    """What may be trained on, once, in an order that depends on the content, the seed and the epoch only.

    Memory: `shuffle_buffer` encoded pictures. A shard's hash is known at its end, so TaskRejected may come late.
    """
    rng = random.Random(f"{seed}/{epoch}")
    shards = _by_content(manifest)
    rng.shuffle(shards)
    stream = (sample for sample in _all_samples(manifest, shards, open, limits) if not sample.held_out)
    mixed: Iterator[Sample] = shuffle(max(1, shuffle_buffer), initial=max(1, shuffle_buffer), rng=rng)(stream)
    return mixed


def held_out_samples(manifest: Manifest, open: Opener, *, limits: ShardLimits = DEFAULT_LIMITS) -> Iterator[Sample]:
    """What is kept for evaluation, always in the same order."""
    return (s for s in _all_samples(manifest, _by_content(manifest), open, limits) if s.held_out)


def survey_shard(name: str, open: Opener, limits: ShardLimits = DEFAULT_LIMITS) -> ShardSurvey:
    """Read a shard that no manifest describes; for `derive_manifest`."""
    labels, count = set(), 0
    with _opened(name, open, limits) as source:
        for found in _labelled(source, limits, set()):
            count += 1
            labels.add(found.label)
            if not is_class_name(found.label):
                raise source.rejected(
                    "unknown-class", f"expected a class name, got {found.label!r:.80}", found.labelled_by
                )
        if not count:
            raise source.rejected("wrong-count", "expected at least one sample, got none")
        return ShardSurvey(Shard(name, source.offset, source.sha256, count), frozenset(labels))


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
        for found, label, digest in _located(manifest, shard, open, limits, keys):
            picture = _picture(found, shard, limits)
            twin = earlier.add(digest, picture, label)
            if twin is not None:
                contradictions.append(_contradiction(manifest, shard, found, label, twin, duplicates))
            counts[label] += 1
            held_out[label] += is_held_out(digest, manifest.holdout)
    if len(contradictions) > _SHOWN:
        contradictions[_SHOWN:] = [f"and {len(contradictions) - _SHOWN:,} more pictures with two labels"]
    report = TaskReport(
        samples=dict(zip(manifest.classes, counts, strict=True)),
        held_out=dict(zip(manifest.classes, held_out, strict=True)),
        warnings=(*notes, *contradictions),
    )
    return _enough(report, limits, imbalanced, similarity)


def open_picture(data: bytes, limits: ShardLimits = DEFAULT_LIMITS) -> Image.Image:
    """The picture, fully decoded; ImageError for whatever a decoder may do with a stranger's bytes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a decoder's remarks on odd metadata; a fault is raised
        try:
            return decode(data, ImageLimits(bytes=limits.member_bytes, pixels=limits.pixels))
        except (ImageError, MemoryError):
            raise
        except Exception as error:  # damaged metadata ends in KeyError, struct.error, ZeroDivisionError and others
            raise ImageError(f"unreadable picture: {type(error).__name__}: {error}") from error


@runtime_checkable
class Readable(Protocol):
    """The least a stream must do; any binary file does."""

    def read(self, count: int, /) -> bytes:
        """Up to `count` bytes, none only at the end."""


class HashingReader:
    """Reads a shard once and forwards only; knows its place and the sha256 of everything that was read."""

    def __init__(self, stream: Readable, shard: str, limits: ShardLimits, promised: int | None = None) -> None:
        self._stream, self._shard = stream, shard
        self._most, self._too_long = (
            (limits.shard_bytes, "shard-too-big") if promised is None else (promised, "wrong-size")
        )
        self._seconds, self._deadline = limits.seconds, time.monotonic() + limits.seconds
        self._hash = hashlib.sha256()
        self.offset = 0

    @property
    def sha256(self) -> str:
        """Of the bytes up to here."""
        return self._hash.hexdigest()

    def read(self, count: int) -> bytes:
        """The next `count` bytes; fewer only at the end of the stream."""
        if time.monotonic() > self._deadline:
            raise self.rejected("too-slow", f"expected to check the shard in {self._seconds:g} s; raise limits.seconds")
        parts = []
        while count and (part := self._stream.read(min(count, _CHUNK))):
            parts.append(part)
            count -= len(part)
        data = b"".join(parts)
        self._hash.update(data)
        self.offset += len(data)
        if self.offset > self._most:
            raise self.rejected(self._too_long, f"expected at most {self._most:,} bytes, got more")
        return data

    def rejected(
        self, code: str, reason: str, member: _Member | None = None, offset: int | None = None
    ) -> TaskRejected:
        """The error for this place, or for a member of the shard."""
        if member is not None:
            return TaskRejected(code, reason, self._shard, member.name, member.offset)
        return TaskRejected(code, reason, self._shard, None, self.offset if offset is None else offset)


def _by_content(manifest: Manifest) -> list[Shard]:
    return sorted(manifest.shards, key=lambda shard: shard.sha256)


def _all_samples(manifest: Manifest, shards: list[Shard], open: Opener, limits: ShardLimits) -> Iterator[Sample]:
    patient = replace(limits, seconds=math.inf)  # the trainer takes its time between two samples
    for shard in shards:
        for found, label, digest in _located(manifest, shard, open, patient, set()):
            yield Sample(found.key, found.image.data, label, is_held_out(digest, manifest.holdout))


def _located(
    manifest: Manifest, shard: Shard, open: Opener, limits: ShardLimits, keys: set[bytes]
) -> Iterator[tuple[_Labelled, int, bytes]]:
    """The samples of a shard with their label numbers and image sha256s; at its end, all that the manifest promised."""
    read_label, count = label_reader(manifest.classes), 0
    if shard.bytes > limits.shard_bytes:
        reason = f"expected at most {limits.shard_bytes:,} bytes, got {shard.bytes:,}; make smaller shards"
        raise TaskRejected("shard-too-big", reason, shard.name)
    with _opened(shard.name, open, limits, shard.bytes) as source:
        for found in _labelled(source, limits, keys):
            label = read_label(found.label)
            if label is None:
                reason = f"expected one of the manifest's {len(manifest.classes)} classes, got {found.label!r:.80}"
                raise source.rejected("unknown-class", reason, found.labelled_by)
            count += 1
            yield found, label, hashlib.sha256(found.image.data).digest()
        _kept_its_promise(source, shard, count)


def _kept_its_promise(source: HashingReader, shard: Shard, count: int) -> None:
    if source.offset != shard.bytes:
        raise source.rejected("wrong-size", f"expected {shard.bytes:,} bytes, got {source.offset:,}; upload it again")
    if source.sha256 != shard.sha256:
        reason = f"expected sha256 {shard.sha256[:12]}…, got {source.sha256[:12]}…; the shard was changed or damaged"
        raise source.rejected("wrong-hash", reason)
    if count != shard.samples:
        raise source.rejected("wrong-count", f"expected {shard.samples:,} samples, got {count:,}")


@contextmanager
def _opened(name: str, open: Opener, limits: ShardLimits, promised: int | None = None) -> Iterator[HashingReader]:
    try:
        stream = open(name)
    except FileNotFoundError as error:
        raise TaskRejected("missing-shard", "expected this shard beside TASK.json, it is not there", name) from error
    with stream:
        yield HashingReader(stream, name, limits, promised)


def _labelled(source: HashingReader, limits: ShardLimits, keys: set[bytes]) -> Iterator[_Labelled]:
    """The samples of a shard; `keys` collects digests of their keys."""
    members = _allowed(source, _tar_members(source, limits), keys)
    for group in group_by_keys({"fname": m.name, "data": m, "__url__": ""} for m in members):
        kinds = {kind: member for kind, member in group.items() if isinstance(member, _Member)}
        first = next(iter(kinds.values()))
        images = [kinds[kind] for kind in IMAGES if kind in kinds]
        by = kinds.get("cls") or kinds.get("json")
        if len(images) != 1 or by is None:
            found = " and ".join(kinds)
            reason = f"expected one image and one .cls or .json side by side for each key, got {found}"
            raise source.rejected("half-sample" if len(images) < 2 else "two-images", reason, first)
        yield _Labelled(group["__key__"], images[0], _label(source, by, is_json="cls" not in kinds), by)


def _label(source: HashingReader, member: _Member, *, is_json: bool) -> str:
    """The label's text; JSON is parsed only where no .cls says it."""
    try:
        text = member.data.decode()
        if not is_json:
            return text.strip()
        label = json.loads(text)["label"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        reason = 'expected a class name in UTF-8, or JSON with "label"'
        raise source.rejected("bad-label", f"{reason}, got {member.data[:40]!r}", member) from error
    if type(label) not in (str, int):
        raise source.rejected("bad-label", f'expected "label" as a string or an integer, got {label!r:.80}', member)
    return str(label).strip()


def _allowed(source: HashingReader, members: Iterator[_Member], keys: set[bytes]) -> Iterator[_Member]:
    """The members, each of a kind we know and none twice."""
    current, kinds = None, set[str]()
    for member in members:
        key, kind = base_plus_ext(member.name)
        kind = (kind or "").lower()
        if kind not in IMAGES + TEXTS or any(part.startswith("__") for part in member.name.split("/")):
            reason = f"expected members named <key>.{{{','.join(IMAGES + TEXTS)}}} with no other dot in the file name"
            raise source.rejected("unknown-member", reason, member)
        if kind in TEXTS and len(member.data) > _TEXT_BYTES:
            raise source.rejected("member-too-big", f"expected at most {_TEXT_BYTES:,} bytes of text", member)
        if key != current:
            current, kinds = key, set()
            digest = hashlib.blake2b(key.encode(), digest_size=16).digest()
            if digest in keys:
                raise source.rejected(
                    "duplicate-member", "expected every key once in a task, this one came before", member
                )
            keys.add(digest)
        if kind in kinds:
            raise source.rejected("duplicate-member", "expected every member once, this one came before", member)
        kinds.add(kind)
        yield member


def _tar_members(source: HashingReader, limits: ShardLimits) -> Iterator[_Member]:
    """The files of an uncompressed tar that is whole: regular files, plain names, an end mark, nothing after it."""
    count = 0
    while (header := _next_header(source)) is not None:
        info, offset = header
        count += 1
        _refuse_odd(source, info, offset, limits)
        if count > limits.members:
            raise source.rejected("too-many-members", f"expected at most {limits.members:,} files", offset=offset)
        data = source.read(info.size)
        padding = source.read(-info.size % BLOCK)
        if len(data) + len(padding) < info.size + -info.size % BLOCK:
            reason = f"expected {info.size:,} bytes and padding, the shard ends after {len(data):,}; upload it again"
            raise source.rejected("truncated-tar", reason, _Member(info.name, offset, b""))
        yield _Member(info.name, offset, data)
    while block := source.read(_CHUNK):
        if block.count(0) != len(block):
            raise source.rejected("data-after-end", "expected nothing after the end mark of the tar, got more data")


def _next_header(source: HashingReader) -> tuple[tarfile.TarInfo, int] | None:
    """The next file's header with the long name and size that headers before it may bring; None at the end mark."""
    extra: dict[str, str] = {}
    while True:
        offset = source.offset
        block = source.read(BLOCK)
        if len(block) == BLOCK and not any(block):
            block = source.read(BLOCK)
            if len(block) == BLOCK and (any(block) or extra):
                raise source.rejected("damaged-header", "expected the second half of the end mark", offset=offset)
            if len(block) == BLOCK:
                return None
        if len(block) < BLOCK:
            raise source.rejected("truncated-tar", "expected a header or the end mark, the shard ends; upload it again")
        info = _parsed(source, block, offset)
        if info.type in (tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME):
            extra |= _extra(source, info, offset)
            continue
        info.name = extra.get("path", info.name)
        info.size = int(extra.get("size", info.size))
        return info, offset


def _parsed(source: HashingReader, block: bytes, offset: int) -> tarfile.TarInfo:
    kind = next((name for magic, name in _COMPRESSED.items() if block.startswith(magic)), None)
    if kind is not None and offset == 0:
        raise source.rejected("compressed-tar", f"expected a plain tar, got {kind}; unpack it once first", offset=0)
    try:
        return tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except tarfile.HeaderError as error:
        code = "damaged-header" if offset else "not-a-tar"
        raise source.rejected(code, f"expected a tar header, got {block[:16]!r}… ({error})", offset=offset) from error


def _extra(source: HashingReader, info: tarfile.TarInfo, offset: int) -> dict[str, str]:
    """What a pax header or GNU long name says about the next file; only its name and size are of interest."""
    if not 0 <= info.size <= 2**16:
        raise source.rejected(
            "damaged-header", f"expected a header of at most 64 KiB, got {info.size:,}", offset=offset
        )
    data = source.read(info.size + -info.size % BLOCK)[: info.size]
    try:
        fields = {"path": data.rstrip(b"\0").decode()} if info.type == tarfile.GNUTYPE_LONGNAME else _pax(data)
        if any(name.startswith("GNU.sparse") for name in fields) or not _SIZE.fullmatch(fields.get("size", "0")):
            raise ValueError("a size that is not the number of bytes that follow")
        return {name: value for name, value in fields.items() if name in ("path", "size")}
    except ValueError as error:
        raise source.rejected("damaged-header", f"expected a pax header, got {error}", offset=offset) from error


def _pax(data: bytes) -> dict[str, str]:
    """The records `<length> <name>=<value>\\n` of a pax header."""
    fields = {}
    while data:
        length = int(data[: data.index(b" ")])
        record, data = data[:length], data[length:]
        if length < 5 or len(record) < length or not record.endswith(b"\n"):
            raise ValueError("a record of another length than it says")
        name, _, value = record[record.index(b" ") + 1 : -1].decode().partition("=")
        fields[name] = value
    return fields


def _refuse_odd(source: HashingReader, info: tarfile.TarInfo, offset: int, limits: ShardLimits) -> None:
    """Links, folders, devices, odd names, and sizes nobody should allocate."""
    place = _Member(ascii(info.name)[1:-1][:200], offset, b"")
    parts = info.name.split("/")
    if info.type in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.GNUTYPE_LONGLINK):
        raise source.rejected("link", "expected regular files only, got a link; pack the file itself", place)
    if info.type not in (tarfile.REGTYPE, tarfile.AREGTYPE):
        reason = f"expected regular files only, got an entry of type {info.type!r}; use `tar --sort=name -cf x.tar *`"
        raise source.rejected("not-a-file", reason, place)
    if ".." in parts or not parts[0] or "\\" in info.name or not info.name.isprintable() or len(info.name) > 1000:
        raise source.rejected("bad-name", "expected a relative, printable name without `..`", place)
    if not 0 <= info.size <= limits.member_bytes:
        raise source.rejected(
            "member-too-big", f"expected 0 to {limits.member_bytes:,} bytes, got {info.size:,}", place
        )


def _picture(found: _Labelled, shard: Shard, limits: ShardLimits) -> Image.Image:
    try:
        return open_picture(found.image.data, limits)
    except ImageError as error:
        code = "too-many-pixels" if _pixels(found.image.data) > limits.pixels else "unreadable-image"
        raise TaskRejected(code, str(error), shard.name, found.image.name, found.image.offset) from error


def _pixels(data: bytes) -> int:
    """From the header only; for Pillow's own bomb alarm, more than any limit."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                return image.width * image.height
        except Image.DecompressionBombError:
            return sys.maxsize
        except Exception:  # unreadable, as the caller has just found
            return 0


def _overlap(manifest: Manifest, known: Mapping[str, str], overlap: str) -> list[str]:
    shared = [f"{name} (task {known[name]})" for name in manifest.classes if name in known]
    if shared and overlap == "reject":
        reason = (
            f"expected new classes, got {', '.join(shared[:5])} and perhaps more; rename them or set overlap: extend"
        )
        raise TaskRejected("class-overlap", reason)
    return [f"{len(shared)} classes are known already, e.g. {shared[0]}: answers carry the one label"] if shared else []


def _contradiction(
    manifest: Manifest, shard: Shard, found: _Labelled, label: int, twin: Lookalike, policy: Policy
) -> str:
    """A sentence about two pictures with two labels; by policy an error."""
    number, home = twin.number, 0
    while number >= manifest.shards[home].samples:
        number -= manifest.shards[home].samples
        home += 1
    what = "the same picture" if twin.distance is None else f"nearly the same picture ({twin.distance} bits)"
    reason = (
        f"labelled {manifest.classes[label]}, but {what} is labelled {manifest.classes[twin.label]} "
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
