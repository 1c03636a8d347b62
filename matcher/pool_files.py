"""A pool as one self-contained folder: `pool.safetensors` and `pool.json`, immutable, no pickle.

This is how pools leave a store (`mqmk-daemon export`), how a worker sends a trained prompt, and how release 0.1 stored
every version, in `pools/<n>-<digest12>/`. Stores of today are made of layers (pool_cards.py).

The digest covers both files: it is the sha256 of pool.json's other fields in canonical form, and one of those fields is
the sha256 of pool.safetensors. Writing twice is harmless; a folder appears complete or not at all.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from mqmk.matcher.durable import write_folder
from mqmk.matcher.errors import PoolError
from mqmk.matcher.pointer import card_name, version_name
from mqmk.matcher.pool import PromptPool, TaskPrompt
from mqmk.matcher.prompted_vit import BackboneInfo

SCHEMA: Final = 1
TENSORS, CARD = "pool.safetensors", "pool.json"
_TASK_FIELDS = ("manifest_sha256", "samples", "trained_at", "metrics")


@dataclass(frozen=True)
class PoolVersion:
    """The identity of one pool in the store; `parent` is None for the first."""

    version: int
    digest: str
    parent: int | None

    @property
    def folder(self) -> str:
        """The name of a self-contained folder with this version."""
        return version_name(self.version, self.digest)

    @property
    def card(self) -> str:
        """The name of its card under `pools/versions/`."""
        return card_name(self.version, self.digest)


@dataclass(frozen=True)
class PoolFiles:
    """The two files of a version, as bytes."""

    tensors: bytes
    card: bytes


def encode(pool: PromptPool, version: int, parent: int | None) -> tuple[PoolVersion, PoolFiles]:
    """The files of a pool; the same pool and numbers give the same bytes."""
    tensors = shared_tensors(pool)
    for number, task in enumerate(pool.tasks):
        tensors |= {f"tasks.{number}.{name}": tensor for name, tensor in task.tensors().items()}
    copies = {name: each.detach().cpu().clone(memory_format=torch.contiguous_format) for name, each in tensors.items()}
    data = save_tensors(copies)  # which refuses tensors that share memory, as keys and means do
    fields = {
        "schema": SCHEMA,
        "version": version,
        "parent": parent,
        "tensors_sha256": hashlib.sha256(data).hexdigest(),
        "backbone": asdict(pool.backbone),
        "g_layers": list(pool.g_layers),
        "e_layers": list(pool.e_layers),
        "head": describe_head(pool),
        "tasks": [
            {"name": task.name, "classes": list(task.classes)}
            | {key: _to_dict(getattr(task, key)) for key in _TASK_FIELDS}
            | ({"class_samples": list(task.class_samples)} if task.class_samples else {})
            | ({"base": task.base} if task.base else {})
            for task in pool.tasks
        ],
        "matching": _to_dict(pool.matching),
    }
    digest = _digest(fields)
    card = json.dumps({"digest": digest} | fields, indent=2, allow_nan=False)
    return PoolVersion(version, digest, parent), PoolFiles(data, card.encode())


def shared_tensors(pool: PromptPool) -> dict[str, Tensor]:
    """Name and tensor of what all tasks share."""
    return {"g_prompt": pool.g_prompt} | ({} if pool.anchor is None else {"anchor": pool.anchor})


def decode(pool_files: PoolFiles, backbone: BackboneInfo | None = None) -> tuple[PoolVersion, PromptPool]:
    """The pool of two files, checked; with `backbone`, also that it was trained on that one."""
    with as_pool_error():
        version, fields = _check_hashes(pool_files.card, hashlib.sha256(pool_files.tensors).hexdigest())
        trained_on = parse_backbone(fields["backbone"])
        if backbone is not None:
            require_backbone(trained_on, backbone)
        return version, _build_pool(fields, trained_on, load_tensors(pool_files.tensors))


def _parse_fields(data: bytes) -> tuple[PoolVersion, dict[str, Any]]:
    fields = json.loads(data)
    digest = fields.pop("digest")
    if fields["schema"] != SCHEMA:
        raise PoolError(f"{CARD}: expected schema {SCHEMA}, got {fields['schema']!r}; upgrade mqmk-daemon to read it")
    if digest != _digest(fields):
        raise PoolError(f"{CARD}: its digest does not cover its content; the file was changed or damaged")
    return PoolVersion(fields["version"], digest, fields["parent"]), fields


def _check_hashes(card: bytes, tensors_sha256: str) -> tuple[PoolVersion, dict[str, Any]]:
    identity, fields = _parse_fields(card)
    if fields["tensors_sha256"] != tensors_sha256:
        raise PoolError(f"{TENSORS}: wrong sha256; the file was changed, damaged or cut short")
    return identity, fields


@contextmanager
def as_pool_error() -> Iterator[None]:
    """Raise anything that is wrong with the content as PoolError."""
    try:
        yield
    except SafetensorError as error:
        raise PoolError(f"not a safetensors file: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise PoolError(f"not a pool: {type(error).__name__}: {error}") from error


@contextmanager
def _name_folder(folder: Path) -> Iterator[None]:
    """Put the folder in front of every PoolError, and raise unreadable files as one."""
    try:
        yield
    except OSError as error:
        raise PoolError(f"{folder}: {error.strerror}: {error.filename}") from error
    except PoolError as error:
        raise PoolError(f"{folder}: {error}") from error


def write_pool(pool: PromptPool, store: Path, version: int, parent: int | None) -> PoolVersion:
    """Write a version into the store; it is durable when this returns."""
    identity, pool_files = encode(pool, version, parent)
    write_folder(store / identity.folder, {TENSORS: pool_files.tensors, CARD: pool_files.card})
    return identity


def read_pool(folder: Path, backbone: BackboneInfo | None = None) -> tuple[PoolVersion, PromptPool]:
    """Read and check one version."""
    with _name_folder(folder):
        return decode(PoolFiles((folder / TENSORS).read_bytes(), (folder / CARD).read_bytes()), backbone)


def _build_pool(fields: Mapping[str, Any], backbone: BackboneInfo, tensors: dict[str, Tensor]) -> PromptPool:
    tasks = []
    for number, task in enumerate(fields["tasks"]):
        prefix = f"tasks.{number}."
        trained: dict[str, Any] = {
            name.removeprefix(prefix): tensors.pop(name) for name in list(tensors) if name.startswith(prefix)
        }
        record = {key: task[key] for key in _TASK_FIELDS} | {"class_samples": tuple(task.get("class_samples", ()))}
        record |= {"base": task.get("base", "")}
        tasks.append(TaskPrompt(name=task["name"], classes=tuple(task["classes"]), **trained, **record))
    g_prompt, anchor = tensors.pop("g_prompt"), tensors.pop("anchor", None)
    if tensors:
        raise PoolError(f"{TENSORS}: tensors that {CARD} does not name: {', '.join(sorted(tensors))}")
    return PromptPool(
        backbone=backbone,
        g_layers=tuple(fields["g_layers"]),
        e_layers=tuple(fields["e_layers"]),
        g_prompt=g_prompt,
        tasks=tuple(tasks),
        matching=fields["matching"],
        anchor=anchor,
        **parse_head(fields["head"]),
    )


def describe_head(pool: PromptPool) -> dict[str, Any]:
    """What a card says of the head; nothing of rows that are normalised, as in cards of older releases."""
    return {"scale": pool.logit_scale} | ({} if pool.head_kind == "normalised" else {"rows": pool.head_kind})


def parse_head(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a pool that `describe_head` wrote."""
    return {"logit_scale": float(fields["scale"]), "head_kind": fields.get("rows", "normalised")}


def parse_backbone(fields: Mapping[str, Any]) -> BackboneInfo:
    """The backbone that a card names."""
    return BackboneInfo(**(dict(fields) | {"mean": tuple(fields["mean"]), "std": tuple(fields["std"])}))


def require_backbone(trained_on: BackboneInfo, used: BackboneInfo) -> None:
    """PoolError if a pool was trained on another backbone."""
    if trained_on != used:
        raise PoolError(
            f"the pool was trained on {_describe(trained_on)}, not on {_describe(used)}; "
            "configure the backbone it was trained on"
        )


def _describe(backbone: BackboneInfo) -> str:
    return f"{backbone.name} ({backbone.weights_sha256[:12]}, {backbone.image_size} px)"


def _to_dict(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else value


def _digest(fields: Mapping[str, Any]) -> str:
    canonical = json.dumps(fields, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()
