"""Which settings there are, what each accepts, and how text becomes its value.

Files, variables and flags all give text, so that the same rules apply to all three, and YAML's own guesses (`no` is
false, `1e-3` is text, a hash of digits is a number) do not matter.
"""

import ast
import inspect
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Final, Literal, get_args, get_origin, get_type_hints

from mqmk.daemon.config.sections import Config, Place, S3Url, Sha256
from mqmk.daemon.redaction import redact
from mqmk.deploy.serving.ranges import Range

PREFIX: Final = "MQMK_"
NOTHING: Final = frozenset({"", "none", "null", "~"})
TRUTH: Final[Mapping[str, bool]] = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}

LEARNER_RANGES: Final[Mapping[str, Range]] = {
    "limits.members": Range(1),
    "limits.member_bytes": Range(1),
    "limits.shard_bytes": Range(1),
    "limits.pixels": Range(1),
    "limits.seconds": Range(0),
    "limits.min_samples": Range(1),
    "similarity.near_bits": Range(0, 7),
    "similarity.imbalance": Range(1),
    "train.epochs": Range(1),
    "train.steps": Range(1),
    "train.anchor_length": Range(1),
    "train.anchor_steps": Range(0),
    "train.batch": Range(1),
    "train.accumulate": Range(1),
    "train.learning_rate": Range(0),
    "train.clip": Range(0),
    "train.g_length": Range(1),
    "train.e_length": Range(1),
    "train.spread": Range(0),
    "train.keys_per_task": Range(1),
    "train.head_scale": Range(0),
    "train.patience": Range(1),
    "train.augmentation.least_area": Range(0, 1),
    "train.patches": Range(0, 1),
    "train.e_layers": Range(0),
    "train.seed": Range(0, 2**32 - 1),
}
"""Accepted ranges of the learner's settings, which are plain values there."""

LEARNER_DESCRIPTIONS: Final[Mapping[str, str]] = {
    "limits.members": "Maximum number of files in one shard.",
    "limits.member_bytes": "Maximum size of a file in a shard.",
    "limits.shard_bytes": "Maximum size of a shard.",
    "limits.pixels": "Maximum number of pixels of an image, read from its header before it is decoded.",
    "limits.seconds": "Maximum time to read and validate one shard.",
    "limits.min_samples": "Minimum number of images per class, held-out ones included.",
    "limits.formats": "Image formats to accept besides JPEG, PNG and WebP, in tasks and requests; "
    "of several frames, the first is used.",
    "similarity.near_bits": "Images whose 63-bit hashes differ in at most this many bits are near duplicates; "
    "none detects only exact duplicates.",
    "similarity.imbalance": "Ratio of the largest class to the smallest, from which `bucket.imbalance` applies.",
    "train.batch": "Images per training step.",
    "train.learning_rate": "Initial learning rate.",
    "train.clip": "Maximum gradient norm.",
    "train.g_length": "Length of the g-prompt, in each of its layers.",
    "train.keys": "Class keys: closed-form class means after training, or learned with the prompt.",
    "train.head_scale": "Scale of the cosines that become logits.",
    "train.augmentation.mirror": "Mirror half of the images at random.",
    "train.seed": "Random seed of training.",
}
"""Of settings without a description in learner/settings.py."""


@dataclass(frozen=True)
class Kind:
    """A type of value: its name, and its parser, which gets the folder that relative paths start from."""

    name: str
    parse: Callable[[str, Path], object]


def _parse_int(text: str, _folder: Path) -> int:
    if not re.fullmatch(r"[+-]?[0-9][0-9_]{0,30}", text):
        raise ValueError(text)
    return int(text)


def _parse_float(text: str, _folder: Path) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def _parse_bool(text: str, _folder: Path) -> bool:
    if text.lower() not in TRUTH:
        raise ValueError(text)
    return TRUTH[text.lower()]


def _parse_text(text: str, _folder: Path) -> str:
    if not text.isprintable() or not text:
        raise ValueError(text)
    return text


def _parse_path(text: str, folder: Path) -> Path:
    try:
        return folder / Path(_parse_text(text, folder)).expanduser()
    except RuntimeError as error:  # ~ of an unknown user
        raise ValueError(text) from error


def _parse_place(text: str, folder: Path) -> str:
    return _parse_text(text, folder) if "://" in text else str(_parse_path(text, folder))


def _parse_s3_url(text: str, _folder: Path) -> str:
    if not re.fullmatch(r"s3://[a-zA-Z0-9._-]+(/[^\s@?#]*)?", text):
        raise ValueError(text)
    return text.rstrip("/")


def _parse_sha256(text: str, _folder: Path) -> str:
    if not re.fullmatch(r"[0-9a-f]{64}", text.lower()):
        raise ValueError(text)
    return text.lower()


KINDS: Final[Mapping[object, Kind]] = {
    int: Kind("a whole number", _parse_int),
    float: Kind("a number", _parse_float),
    bool: Kind("true or false", _parse_bool),
    str: Kind("text", _parse_text),
    Path: Kind("a path", _parse_path),
    Place: Kind("a folder or a URL", _parse_place),
    S3Url: Kind("a URL s3://bucket/prefix", _parse_s3_url),
    Sha256: Kind("a sha256 of 64 hexadecimal digits", _parse_sha256),
}


@dataclass(frozen=True)
class Setting:
    """One setting: its dotted name, what it accepts, and its default."""

    name: str
    kind: Kind
    default: object
    optional: bool
    several: bool
    choices: tuple[str, ...]
    range: Range | None

    @property
    def variable(self) -> str:
        """Its environment variable: the name in capitals, dots as underscores."""
        return PREFIX + self.name.upper().replace(".", "_")

    @property
    def accepted(self) -> str:
        """What it accepts, as text."""
        text = f"one of {', '.join(self.choices)}" if self.choices else self.kind.name
        if self.several:
            text = text.replace("one of", "any of") + " (a list, or separated by commas)"
        return f"{text}{self._limits()}{', or none' if self.optional else ''}"

    def _limits(self) -> str:
        if self.range is None:
            return ""
        least, most = (f"{end:.15g}" for end in (self.range.least, self.range.most))
        return f" of at least {least}" if math.isinf(self.range.most) else f" from {least} to {most}"

    def parse(self, text: str, folder: Path) -> object:
        """The value of the text; ValueError if it is not accepted."""
        if self.optional and text.strip().lower() in NOTHING:
            return None
        if not self.several:
            return self._parse_one(text.strip(), folder)
        values = [self._parse_one(part.strip(), folder) for part in text.split(",")]
        return tuple(dict.fromkeys(values))

    def _parse_one(self, text: str, folder: Path) -> object:
        value = self.kind.parse(text, folder)
        if self.choices and value not in self.choices:
            raise ValueError(text)
        if self.range and isinstance(value, int | float) and not self.range.least <= value <= self.range.most:
            raise ValueError(text)
        return value


@cache
def all_settings() -> Mapping[str, Setting]:
    """Every setting by its dotted name, in the order of the sections."""
    return {name: _make_setting(name, hint, default) for name, hint, default in _leaves(Config(), "")}


def flatten(config: Config) -> Mapping[str, object]:
    """Every value by its dotted name."""
    return {name: value for name, _, value in _leaves(config, "")}


def build(values: Mapping[str, object]) -> Config:
    """The configuration with these values, which must be complete."""
    config = _build_section(Config, "", values)
    assert isinstance(config, Config)
    return config


@cache
def descriptions() -> Mapping[str, str]:
    """The description of every setting: the line under its field."""
    return {**LEARNER_DESCRIPTIONS, **dict(_read_docstrings(Config, ""))}


def serialize(value: object) -> str:
    """A value as text that reads back as the same value."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(serialize, value)) if isinstance(value, tuple) else str(value)


def display(value: object) -> str:
    """A value as text for users, with passwords in URLs redacted."""
    return redact(serialize(value))


def _leaves(section: Any, prefix: str) -> Iterator[tuple[str, Any, object]]:
    hints = get_type_hints(type(section), include_extras=True)
    for entry in fields(section):
        name, value = prefix + entry.name, getattr(section, entry.name)
        if is_dataclass(value):
            yield from _leaves(value, f"{name}.")
        else:
            yield name, hints[entry.name], value


def _build_section(section: Any, prefix: str, values: Mapping[str, object]) -> object:
    hints = get_type_hints(section)
    parts = {
        entry.name: _build_section(hints[entry.name], f"{prefix}{entry.name}.", values)
        if is_dataclass(hints[entry.name])
        else values[prefix + entry.name]
        for entry in fields(section)
    }
    return section(**parts)


def _make_setting(name: str, hint: Any, default: object) -> Setting:
    optional = several = False
    choices: tuple[str, ...] = ()
    span = LEARNER_RANGES.get(name)
    while hint not in KINDS:
        if get_origin(hint) is Annotated:
            hint, span = get_args(hint)
        elif get_origin(hint) is Literal:
            hint, choices = str, get_args(hint)
        elif get_origin(hint) is tuple:
            hint, several = get_args(hint)[0], True
        else:
            (hint,) = (part for part in get_args(hint) if part is not NoneType)
            optional = True
    return Setting(name, KINDS[hint], default, optional, several, choices, span)


def _read_docstrings(section: Any, prefix: str) -> Iterator[tuple[str, str]]:
    hints = get_type_hints(section)
    tree = ast.parse(inspect.getsource(section)).body[0]
    assert isinstance(tree, ast.ClassDef)
    for line, after in zip(tree.body, [*tree.body[1:], None], strict=True):
        if not isinstance(line, ast.AnnAssign) or not isinstance(line.target, ast.Name):
            continue
        name = line.target.id
        if is_dataclass(hints[name]):
            yield from _read_docstrings(hints[name], f"{prefix}{name}.")
        elif isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            yield prefix + name, " ".join(str(after.value.value).split())
