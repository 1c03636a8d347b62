"""Which settings there are, what each accepts, and how text becomes its value.

A file, a variable and a flag all give text, so that all three have the same rules and YAML's own guesses (`no` is
false, `1e-3` is text, a hash of digits is a number) play no part.
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

from mqmk.daemon.config import Config, Place, Range, S3Url, Sha256
from mqmk.daemon.passwords import hidden

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
    "similarity.near_bits": Range(0, 63),
    "similarity.imbalance": Range(1),
    "train.epochs": Range(1),
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
"""The learner's settings are plain values; what an operator may give them is said here."""

LEARNER_DESCRIPTIONS: Final[Mapping[str, str]] = {
    "limits.members": "Most files in one shard.",
    "limits.member_bytes": "Largest file in a shard.",
    "limits.shard_bytes": "Largest shard.",
    "limits.pixels": "Most pixels of one picture, read from its header before it is decoded.",
    "limits.seconds": "Longest time to read and check one shard.",
    "limits.min_samples": "Least pictures of every class, held-out ones included.",
    "similarity.near_bits": "Pictures whose 63-bit hashes differ in no more bits are nearly the same; "
    "none looks for exact duplicates only.",
    "similarity.imbalance": "Pictures of the largest class for each one of the smallest, from which "
    "`bucket.imbalance` applies.",
    "train.epochs": "Passes over the pictures of a task.",
    "train.batch": "Pictures for one step.",
    "train.learning_rate": "Step size at the start.",
    "train.clip": "Largest norm of a gradient.",
    "train.g_length": "Rows of the g-prompt, in each of its layers.",
    "train.e_length": "Rows of an e-prompt, in each of its layers.",
    "train.keys": "Keys as class means after training, or learned with the prompt.",
    "train.keys_per_task": "Average a task's class keys into this many; none keeps one for each class.",
    "train.head_scale": "Factor on the cosines that become logits.",
    "train.augmentation.mirror": "Mirror half of the pictures.",
    "train.seed": "Of every random choice in training.",
}
"""Of settings that have no line of their own in learner/settings.py."""


@dataclass(frozen=True)
class Kind:
    """A sort of value: its name for people, and its reader, given the folder that relative paths start from."""

    words: str
    read: Callable[[str, Path], object]


def _whole(text: str, _folder: Path) -> int:
    if not re.fullmatch(r"[+-]?[0-9][0-9_]{0,30}", text):
        raise ValueError(text)
    return int(text)


def _number(text: str, _folder: Path) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def _truth(text: str, _folder: Path) -> bool:
    if text.lower() not in TRUTH:
        raise ValueError(text)
    return TRUTH[text.lower()]


def _words(text: str, _folder: Path) -> str:
    if not text.isprintable() or not text:
        raise ValueError(text)
    return text


def _path(text: str, folder: Path) -> Path:
    try:
        return folder / Path(_words(text, folder)).expanduser()
    except RuntimeError as error:  # ~ of nobody
        raise ValueError(text) from error


def _place(text: str, folder: Path) -> str:
    return _words(text, folder) if "://" in text else str(_path(text, folder))


def _s3_url(text: str, _folder: Path) -> str:
    if not re.fullmatch(r"s3://[a-zA-Z0-9._-]+(/[^\s@?#]*)?", text):
        raise ValueError(text)
    return text.rstrip("/")


def _sha256(text: str, _folder: Path) -> str:
    if not re.fullmatch(r"[0-9a-f]{64}", text.lower()):
        raise ValueError(text)
    return text.lower()


KINDS: Final[Mapping[object, Kind]] = {
    int: Kind("a whole number", _whole),
    float: Kind("a number", _number),
    bool: Kind("true or false", _truth),
    str: Kind("text", _words),
    Path: Kind("a path", _path),
    Place: Kind("a folder or a URL", _place),
    S3Url: Kind("a URL s3://bucket/prefix", _s3_url),
    Sha256: Kind("a sha256 of 64 hexadecimal digits", _sha256),
}


@dataclass(frozen=True)
class Key:
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
        """What it accepts, in words."""
        words = f"one of {', '.join(self.choices)}" if self.choices else self.kind.words
        if self.several:
            words = words.replace("one of", "any of") + " (a list, or separated by commas)"
        return f"{words}{self._limits()}{', or none' if self.optional else ''}"

    def _limits(self) -> str:
        if self.range is None:
            return ""
        least, most = (f"{end:.15g}" for end in (self.range.least, self.range.most))
        return f" of at least {least}" if math.isinf(self.range.most) else f" from {least} to {most}"

    def read(self, text: str, folder: Path) -> object:
        """The value that the text stands for; ValueError if it stands for none that is accepted."""
        if self.optional and text.strip().lower() in NOTHING:
            return None
        if not self.several:
            return self._read_one(text.strip(), folder)
        values = [self._read_one(part.strip(), folder) for part in text.split(",")]
        return tuple(dict.fromkeys(values))

    def _read_one(self, text: str, folder: Path) -> object:
        value = self.kind.read(text, folder)
        if self.choices and value not in self.choices:
            raise ValueError(text)
        if self.range and isinstance(value, int | float) and not self.range.least <= value <= self.range.most:
            raise ValueError(text)
        return value


@cache
def all_keys() -> Mapping[str, Key]:
    """Every setting by its dotted name, in the order of the sections."""
    return {name: _key(name, hint, default) for name, hint, default in _leaves(Config(), "")}


def flat(config: Config) -> Mapping[str, object]:
    """Every value by its dotted name."""
    return {name: value for name, _, value in _leaves(config, "")}


def built(values: Mapping[str, object]) -> Config:
    """The configuration with these values; every key must be there."""
    built = _built(Config, "", values)
    assert isinstance(built, Config)
    return built


@cache
def descriptions() -> Mapping[str, str]:
    """What every setting is for: the line under its field."""
    return {**LEARNER_DESCRIPTIONS, **dict(_documented(Config, ""))}


def written(value: object) -> str:
    """A value as text that reads back as the same value."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(written, value)) if isinstance(value, tuple) else str(value)


def shown(value: object) -> str:
    """A value for people's eyes: as `written`, with passwords in URLs hidden."""
    return hidden(written(value))


def _leaves(section: Any, prefix: str) -> Iterator[tuple[str, Any, object]]:
    hints = get_type_hints(type(section), include_extras=True)
    for entry in fields(section):
        name, value = prefix + entry.name, getattr(section, entry.name)
        if is_dataclass(value):
            yield from _leaves(value, f"{name}.")
        else:
            yield name, hints[entry.name], value


def _built(section: Any, prefix: str, values: Mapping[str, object]) -> object:
    hints = get_type_hints(section)
    parts = {
        entry.name: _built(hints[entry.name], f"{prefix}{entry.name}.", values)
        if is_dataclass(hints[entry.name])
        else values[prefix + entry.name]
        for entry in fields(section)
    }
    return section(**parts)


def _key(name: str, hint: Any, default: object) -> Key:
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
    return Key(name, KINDS[hint], default, optional, several, choices, span)


def _documented(section: Any, prefix: str) -> Iterator[tuple[str, str]]:
    hints = get_type_hints(section)
    tree = ast.parse(inspect.getsource(section)).body[0]
    assert isinstance(tree, ast.ClassDef)
    for line, after in zip(tree.body, [*tree.body[1:], None], strict=True):
        if not isinstance(line, ast.AnnAssign) or not isinstance(line.target, ast.Name):
            continue
        name = line.target.id
        if is_dataclass(hints[name]):
            yield from _documented(hints[name], f"{prefix}{name}.")
        elif isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            yield prefix + name, " ".join(str(after.value.value).split())
