"""Pools that must not be served, each broken in its own way."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

import torch
from safetensors.torch import load, save

from mqmk.matcher.pool import PromptPool
from mqmk.matcher.pool_files import CARD, TENSORS, encode
from mqmk.matcher.pool_store import Pointer, PoolStore


@dataclass
class Parts:
    """The card's fields and the tensors of a pool, to be changed in place."""

    card: dict
    tensors: dict


Breaker = Callable[[Parts], None]


def write_raw(folder: Path, card: dict, tensors: bytes, version: int) -> Pointer:
    """Write a version with a right digest, whatever its fields and tensors are."""
    fields = {key: value for key, value in card.items() if key != "digest"} | {"version": version}
    digest = sha256(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    pointer = Pointer(version, digest)
    home = folder / pointer.folder
    home.mkdir(parents=True, exist_ok=True)
    (home / CARD).write_text(json.dumps({"digest": digest} | fields))
    (home / TENSORS).write_bytes(tensors)
    return pointer


def broken(folder: Path, pool: PromptPool, version: int, change: Breaker) -> Pointer:
    """A pool that was consistent until `change`, with hashes that fit what came out."""
    _, files = encode(pool, version, None)
    parts = Parts(json.loads(files.card), load(files.tensors))
    change(parts)
    data = save({name: tensor.contiguous() for name, tensor in parts.tensors.items()})
    return write_raw(folder, parts.card | {"tensors_sha256": sha256(data).hexdigest()}, data, version)


def nan(parts: Parts) -> None:
    parts.tensors["tasks.0.head"][0, 0] = torch.nan


def infinite(parts: Parts) -> None:
    parts.tensors["g_prompt"][0, 0, 0, 0] = torch.inf


def wrong_width(parts: Parts) -> None:
    for name in parts.tensors:
        parts.tensors[name] = parts.tensors[name][..., :64].clone()


def wrong_rank(parts: Parts) -> None:
    parts.tensors["tasks.0.keys"] = parts.tensors["tasks.0.keys"][0].clone()


def other_backbone(parts: Parts) -> None:
    parts.card["backbone"]["weights_sha256"] = "0" * 64


def missing_class(parts: Parts) -> None:
    parts.card["tasks"][0]["classes"].pop()


def renamed_class(parts: Parts) -> None:
    parts.card["tasks"][0]["classes"][0] = "somebody else"


def missing_tensor(parts: Parts) -> None:
    del parts.tensors["tasks.0.means"]


def unknown_tensor(parts: Parts) -> None:
    parts.tensors["tasks.99.head"] = torch.zeros(2, 2)


def double_precision(parts: Parts) -> None:
    parts.tensors["tasks.0.head"] = parts.tensors["tasks.0.head"].double()


def other_schema(parts: Parts) -> None:
    parts.card["schema"] = 2


def deep_layers(parts: Parts) -> None:
    parts.card["e_layers"] = [layer + 10 for layer in parts.card["e_layers"]]


def changed_old_task(parts: Parts) -> None:
    parts.tensors["tasks.0.e_prompt"][0, 0, 0, 0] += 1e-3


def changed_old_keys(parts: Parts) -> None:
    parts.tensors["tasks.0.keys"][0, 0] += 1e-3


BREAKERS: dict[str, tuple[str, Breaker]] = {
    breaker.__name__: (stage, breaker)
    for stage, breaker in [
        ("read", nan), ("read", infinite), ("read", wrong_rank), ("read", other_backbone), ("read", missing_class),
        ("read", missing_tensor), ("read", unknown_tensor), ("read", double_precision), ("read", other_schema),
        ("fit", wrong_width), ("fit", deep_layers), ("replay", renamed_class), ("replay", changed_old_task),
        ("replay", changed_old_keys),
    ]
}  # fmt: skip
"""Name of the damage -> the stage that must refuse it, and the damage."""


def damaged_file(folder: Path, pool: PromptPool, version: int, name: str, damage: Callable[[bytes], bytes]) -> Pointer:
    """A version whose file was damaged after it was written."""
    identity = PoolStore(folder).write(pool, version, None)
    path = folder / identity.folder / name
    path.write_bytes(damage(path.read_bytes()))
    return Pointer(identity.version, identity.digest)


DAMAGES: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "truncated": (TENSORS, lambda data: data[: len(data) // 2]),
    "empty": (TENSORS, lambda _: b""),
    "flipped bit": (TENSORS, lambda data: data[:-5] + bytes([data[-5] ^ 1]) + data[-4:]),
    "truncated card": (CARD, lambda data: data[: len(data) // 2]),
    "changed card": (CARD, lambda data: data.replace(b"kept0", b"other")),
}
"""Name of the damage -> the file, and what happens to it."""


def bad_pointers(folder: Path, pool: PromptPool, version: int) -> list[tuple[str, Pointer]]:
    """Every kind of bad pool, written as versions from `version` on."""
    found = [
        (name, broken(folder, pool, version + number, change))
        for number, (name, (_, change)) in enumerate(BREAKERS.items())
    ]
    first = version + len(found)
    for number, (name, (file, damage)) in enumerate(DAMAGES.items()):
        found.append((name, damaged_file(folder, pool, first + number, file, damage)))
    found.append(("no such folder", Pointer(version + 999, "0" * 64)))
    return found


def wrong_digest(pool: PromptPool, folder: Path, version: int) -> Pointer:
    """The pointer's digest agrees with the folder's name and not with what is in it."""
    identity = PoolStore(folder).write(replace(pool), version, None)
    return Pointer(version, identity.digest[:12] + "0" * 52)
