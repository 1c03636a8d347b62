"""Pools that must be rejected, each broken in its own way."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

import torch
from safetensors.torch import load, save

from mqmk.matcher.pool import PromptPool
from mqmk.matcher.pool_cards import PoolCard
from mqmk.matcher.pool_store import Pointer, PoolStore


@dataclass
class Parts:
    """The card's fields and the tensors of a pool, to be changed in place."""

    card: dict
    tensors: dict


Breaker = Callable[[Parts], None]


def broken(folder: Path, pool: PromptPool, version: int, change: Breaker) -> Pointer:
    """A pool that was consistent until `change`, with hashes that fit what came out."""
    store = PoolStore(folder)
    card = store.card(store.write(pool, version, None))
    fields = json.loads((store.versions / card.identity.card).read_bytes())
    (store.versions / card.identity.card).unlink()
    parts = Parts(fields, {"g_prompt": load(store.read_layer(f"{card.g}.safetensors"))["g_prompt"]})
    for number, task in enumerate(card.tasks):
        tensors = load(store.read_layer(f"{task.layer}.safetensors"))
        parts.tensors |= {f"tasks.{number}.{name}": tensor for name, tensor in tensors.items()}
    change(parts)
    parts.card["g"] = _add_layer(store, {"g_prompt": parts.tensors["g_prompt"]})
    for number, row in enumerate(parts.card["tasks"]):
        prefix = f"tasks.{number}."
        own = {name.removeprefix(prefix): value for name, value in parts.tensors.items() if name.startswith(prefix)}
        row["layer"] = _add_layer(store, own)
    data = json.dumps(parts.card).encode()
    pointer = Pointer(version, sha256(data).hexdigest())
    (store.versions / pointer.card).write_bytes(data)
    return pointer


def _add_layer(store: PoolStore, tensors: dict) -> str:
    data = save({name: tensor.contiguous() for name, tensor in tensors.items()})
    name = sha256(data).hexdigest()
    store.add_layer(f"{name}.safetensors", data)
    return name


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
    parts.tensors["tasks.0.secret"] = torch.zeros(2, 2)


def double_precision(parts: Parts) -> None:
    parts.tensors["tasks.0.head"] = parts.tensors["tasks.0.head"].double()


def other_schema(parts: Parts) -> None:
    parts.card["schema"] = 3


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
"""Name of the damage -> the stage that must reject it, and the damage."""


def damaged_file(folder: Path, pool: PromptPool, version: int, name: str, damage: Callable[[bytes], bytes]) -> Pointer:
    """A version whose file was damaged after it was written: its card, or the layer of the task that is its own."""
    store = PoolStore(folder)
    identity = store.write(pool, version, None)
    path = store.folder / file_of(store.card(identity), name)
    path.write_bytes(damage(path.read_bytes()))
    return Pointer(identity.version, identity.digest)


def file_of(card: PoolCard, name: str) -> str:
    """The path in the store of a version's card, or of the layer of its last task, which is its own."""
    return f"versions/{card.identity.card}" if name == CARD else f"layers/{card.tasks[-1].layer}.safetensors"


LAYER, CARD = "layer", "card"
DAMAGES: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "truncated": (LAYER, lambda data: data[: len(data) // 2]),
    "empty": (LAYER, lambda _: b""),
    "flipped bit": (LAYER, lambda data: data[:-5] + bytes([data[-5] ^ 1]) + data[-4:]),
    "truncated card": (CARD, lambda data: data[: len(data) // 2]),
    "changed card": (CARD, lambda data: data.replace(b"kept0", b"other")),
}
"""Name of the damage -> the file, and what happens to it."""


def bad_pointers(folder: Path, pool: PromptPool, version: int) -> list[tuple[str, Pointer]]:
    """Every kind of bad pool, as versions from `version` on."""
    found = [
        (name, broken(folder, pool, version + number, change))
        for number, (name, (_, change)) in enumerate(BREAKERS.items())
    ]
    first = version + len(found)
    for number, (name, (file, damage)) in enumerate(DAMAGES.items(), start=first):
        found.append((name, damaged_file(folder, _with_own_layer(pool, number), number, file, damage)))
    found.append(("no such card", Pointer(version + 999, "0" * 64)))
    return found


def _with_own_layer(pool: PromptPool, version: int) -> PromptPool:
    """Another last task: its layer can be damaged, and whoever has the pool in memory must read it."""
    last = pool.tasks[-1]
    return replace(pool, tasks=(*pool.tasks[:-1], replace(last, head=last.head + version)))


def wrong_digest(pool: PromptPool, folder: Path, version: int) -> Pointer:
    """The pointer's digest agrees with the card's name and not with what is in it."""
    identity = PoolStore(folder).write(pool, version, None)
    return Pointer(version, identity.digest[:12] + "0" * 52)
