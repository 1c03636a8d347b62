"""What a task says it consists of: TASK.json, read strictly, and the identity of the content it describes.

{"schema": 1, "task": "birds", "classes": ["heron", "owl"], "created": "2026-01-01T00:00:00Z",
 "shards": [{"name": "birds-000000.tar", "bytes": 123, "sha256": "…", "samples": 64}]}

and, optional, `"completeness"` (`manifest`: the file came with the task; `settled`: derived from shards that stopped
changing) and `"holdout"` (the fraction of the images that is kept for evaluation).
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from mqmk.learner.errors import TaskRejected

SCHEMA: Final = 1
FILE_NAME: Final = "TASK.json"
DEFAULT_HOLDOUT: Final = 0.2
COMPLETENESS: Final = ("manifest", "settled")
MAX_FILE_BYTES: Final = 64 * 2**20
MAX_CLASSES: Final = 100_000
MAX_SHARDS: Final = 100_000
MAX_SHARD_BYTES: Final = 2**40
MAX_SHARD_SAMPLES: Final = 10**8
MAX_NAME: Final = 200

# One path component that no file system, shell or URL opener takes for anything else: `..`, `a/b`, `pipe:…` do not fit.
_SAFE_NAME = re.compile(r"\w[\w .,+=@()-]*")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_INDEX = re.compile(r"[0-9]{1,9}")
_HOLDOUT = "holdout as a fraction from 0 to below 1"
_JSON_NAMES = {dict: "a JSON object", list: "a JSON list", str: "a string", int: "an integer"}


@dataclass(frozen=True)
class Shard:
    """One tar of a task, and what must be found in it."""

    name: str
    bytes: int
    sha256: str
    samples: int


@dataclass(frozen=True)
class Manifest:
    """One task in the bucket; `classes[i]` is the name of label i."""

    task: str
    classes: tuple[str, ...]
    shards: tuple[Shard, ...]
    created: str = ""
    completeness: str = "manifest"
    holdout: float = DEFAULT_HOLDOUT

    def __post_init__(self) -> None:
        _check(self)

    @property
    def samples(self) -> int:
        """How many samples all shards together must hold."""
        return sum(shard.samples for shard in self.shards)

    @property
    def identity(self) -> str:
        """The sha256 of the content: the same for other names, another date or another order of the shards."""
        shards = sorted([shard.sha256, shard.bytes, shard.samples] for shard in self.shards)
        content = {"classes": list(self.classes), "shards": shards}
        return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    def to_bytes(self) -> bytes:
        """TASK.json; `parse_manifest` gives the same manifest back."""
        return (json.dumps({"schema": SCHEMA} | asdict(self), indent=2, ensure_ascii=False) + "\n").encode()


@dataclass(frozen=True)
class ShardSurvey:
    """What a shard without a manifest was found to hold; `labels` are as they stand in the shard."""

    shard: Shard
    labels: frozenset[str]


def parse_manifest(data: bytes) -> Manifest:
    """The manifest of TASK.json, or TaskRejected with code `bad-manifest`."""
    fields = _parse_json(data)
    _expect_type(fields, dict, FILE_NAME)
    schema = fields.pop("schema", None)
    if type(schema) is not int or schema != SCHEMA:
        raise _bad_manifest(f'expected "schema": {SCHEMA}, got {schema!r}; upgrade mqmk-daemon or write the file again')
    _expect_fields(fields, {"task", "classes", "shards"}, {"created", "completeness", "holdout"}, FILE_NAME)
    for name, kind in (("task", str), ("classes", list), ("shards", list), ("created", str), ("completeness", str)):
        if name in fields:
            _expect_type(fields[name], kind, name)
    for name in fields["classes"]:
        _expect_type(name, str, "a class")
    holdout = fields.pop("holdout", DEFAULT_HOLDOUT)
    _expect(type(holdout) in (int, float), "holdout as a number", holdout)
    _expect(0 <= holdout < 1, _HOLDOUT, holdout)  # before it becomes a float: an integer may be too large for that
    classes, shards = tuple(fields.pop("classes")), tuple(map(_parse_shard, fields.pop("shards")))
    return Manifest(classes=classes, shards=shards, holdout=float(holdout), **fields)


def derive_manifest(
    task: str, surveys: Iterable[ShardSurvey], *, created: str = "", holdout: float = DEFAULT_HOLDOUT
) -> Manifest:
    """The manifest of shards that came without one: `derive_manifest(name, (survey_shard(...) for ... in ...))`.

    Labels that are integers become classes with the integers' names.
    """
    shards, labels = [], set[str]()
    for survey in surveys:
        shards.append(survey.shard)
        labels |= survey.labels
    numbers = all(map(_INDEX.fullmatch, labels))
    classes = sorted(labels, key=(lambda label: (int(label), label)) if numbers else None)
    shards.sort(key=lambda shard: shard.name)
    return Manifest(task, tuple(classes), tuple(shards), created, "settled", holdout)


def label_reader(classes: tuple[str, ...]) -> Callable[[str], int | None]:
    """From a label as written in a shard to its number, None if it is no class: a class name, else an index."""
    numbers = {name: number for number, name in enumerate(classes)}

    def read(label: str) -> int | None:
        if label in numbers or not _INDEX.fullmatch(label):
            return numbers.get(label)
        return int(label) if int(label) < len(classes) else None

    return read


def is_safe_name(name: str) -> bool:
    """Whether this may name a task or a shard."""
    return len(name) <= MAX_NAME and name.isprintable() and _SAFE_NAME.fullmatch(name) is not None


def is_class_name(name: str) -> bool:
    """Whether this may name a class: printable, not empty, no white space around it."""
    return 0 < len(name) <= MAX_NAME and name.isprintable() and name == name.strip()


def _check(manifest: Manifest) -> None:
    """Everything that can be checked without the shards."""
    _expect(is_safe_name(manifest.task), "a task name of letters, digits and - _ . or space", manifest.task)
    _expect(0 < len(manifest.classes) <= MAX_CLASSES, f"1 to {MAX_CLASSES:,} classes", len(manifest.classes))
    for name in manifest.classes:
        _expect(is_class_name(name), f"class names of 1 to {MAX_NAME} printable characters", name)
    _expect_unique(manifest.classes, "class")
    _expect(0 < len(manifest.shards) <= MAX_SHARDS, f"1 to {MAX_SHARDS:,} shards", len(manifest.shards))
    for shard in manifest.shards:
        _check_shard(shard)
    _expect_unique((shard.name for shard in manifest.shards), "shard name")
    _expect_unique((shard.sha256 for shard in manifest.shards), "shard content")
    _expect(len(manifest.created) <= 64 and manifest.created.isprintable(), "a date in created", manifest.created)
    _expect(manifest.completeness in COMPLETENESS, f"completeness as one of {COMPLETENESS}", manifest.completeness)
    _expect(0 <= manifest.holdout < 1, _HOLDOUT, manifest.holdout)


def _check_shard(shard: Shard) -> None:
    _expect(is_safe_name(shard.name) and shard.name.endswith(".tar"), "shard names like birds-000000.tar", shard.name)
    _expect(0 < shard.bytes <= MAX_SHARD_BYTES, f"{shard.name}: 1 to {MAX_SHARD_BYTES:,} bytes", shard.bytes)
    samples = 0 < shard.samples <= MAX_SHARD_SAMPLES
    _expect(samples, f"{shard.name}: 1 to {MAX_SHARD_SAMPLES:,} samples", shard.samples)
    hashed = _SHA256.fullmatch(shard.sha256) is not None
    _expect(hashed, f"{shard.name}: sha256 as 64 lower-case hex digits", shard.sha256)


def _parse_shard(fields: Any) -> Shard:
    _expect_type(fields, dict, "a shard")
    _expect_fields(fields, {"name", "bytes", "sha256", "samples"}, set(), "a shard")
    for name, kind in (("name", str), ("sha256", str), ("bytes", int), ("samples", int)):
        _expect_type(fields[name], kind, f"a shard's {name}")
    return Shard(**fields)


def _parse_json(data: bytes) -> Any:
    if len(data) > MAX_FILE_BYTES:
        raise _bad_manifest(f"expected at most {MAX_FILE_BYTES:,} bytes, got {len(data):,}")
    try:
        return json.loads(data.decode(), object_pairs_hook=_refuse_duplicates, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise _bad_manifest(f"expected a JSON object, got something else: {error}") from error


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    _expect_unique([name for name, _ in pairs], "field")
    return dict(pairs)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _expect_type(value: object, kind: type, where: str) -> None:
    """Exactly that type: JSON's true is not an integer."""
    _expect(type(value) is kind, f"{where} as {_JSON_NAMES[kind]}", value)


def _expect_fields(fields: Mapping[str, Any], needed: set[str], optional: set[str], where: str) -> None:
    """A misspelt field must not become a default in silence."""
    _expect(needed <= fields.keys(), f"the fields {', '.join(sorted(needed))} in {where}", sorted(fields))
    odd = sorted(fields.keys() - needed - optional)
    _expect(not odd, f"no other fields than {', '.join(sorted(needed | optional))} in {where}", odd)


def _expect(holds: bool, what: str, came: object) -> None:
    if not holds:
        raise _bad_manifest(f"expected {what}, got {ascii(came)[:100]}")


def _expect_unique(names: Iterable[str], kind: str) -> None:
    repeated = [name for name, times in Counter(names).items() if times > 1]
    _expect(not repeated, f"every {kind} once", repeated)


def _bad_manifest(reason: str) -> TaskRejected:
    return TaskRejected("bad-manifest", f"{FILE_NAME}: {reason}")
