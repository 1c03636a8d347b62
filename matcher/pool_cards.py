"""Pool store, schema 2: what a version consists of. A card names every layer by its hash, so its own hash covers all.

    versions/<n>-<digest12>.json    the card of a version; `digest` is the sha256 of this file
    layers/<sha256>.safetensors     a task layer (e_prompt, keys, head, means, plain_means), a task's statistics
                                    (factor, residual, feature_means), or the g layer (g_prompt, anchor)
    layers/<sha256>.json            a page: the rows of PAGE tasks that no longer fit into the card

Everything is immutable and named by content: writing twice is harmless, and what a task adds is stored once, however
many versions contain it. Nothing here touches a disk; folders, S3 and MLflow move the same bytes.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Final

from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor, contiguous_format

from mqmk.matcher.errors import PoolError
from mqmk.matcher.pool import STATISTICS, PromptPool, TaskPrompt
from mqmk.matcher.pool_files import (
    PoolVersion,
    as_pool_error,
    describe_head,
    parse_backbone,
    parse_head,
    require_backbone,
    shared_tensors,
)
from mqmk.matcher.prompted_vit import BackboneInfo

SCHEMA: Final = 2
PAGE: Final = 32
"""Tasks a page: a version writes one layer, at most this many rows and the names of the full pages before them."""
LAYER_SUFFIX, PAGE_SUFFIX = ".safetensors", ".json"
_FILE: Final = re.compile(r"[0-9a-f]{64}\.(safetensors|json)")

ReadFile = Callable[[str], bytes]
"""The content of a file of `layers/`, checked against its name (`check_content`); PoolError if it cannot be had."""


@dataclass(frozen=True)
class CardTask:
    """What a card says of one task; it never changes, so pages of tasks are shared by versions, too."""

    name: str
    classes: tuple[str, ...]
    layer: str
    bytes: int
    """Size of the layer."""
    manifest_sha256: str = ""
    base: str = ""
    """Digest of what training started from; empty for the first task."""
    samples: int = 0
    class_samples: tuple[int, ...] = ()
    trained_at: str = ""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """What it reached in the version that added it."""
    statistics: str | None = None

    @property
    def files(self) -> tuple[str, ...]:
        """The names in `layers/` of what the task added."""
        return tuple(name + LAYER_SUFFIX for name in (self.layer, self.statistics) if name)


@dataclass(frozen=True, eq=False)
class PoolCard:
    """What a version says about itself."""

    identity: PoolVersion
    backbone: BackboneInfo
    g_layers: tuple[int, ...]
    e_layers: tuple[int, ...]
    head: Mapping[str, Any]
    """Fields of a pool."""
    g: str
    pool_level: str | None
    pages: tuple[str, ...]
    tasks: tuple[CardTask, ...]
    """Of all pages and of the card itself, in order."""
    matching: Mapping[str, Any]

    @cached_property
    def contents(self) -> frozenset[tuple[str, str]]:
        """Name and manifest_sha256 of each task."""
        return frozenset((task.name, task.manifest_sha256) for task in self.tasks)

    @cached_property
    def files(self) -> frozenset[str]:
        """The names in `layers/` of everything the version consists of."""
        shared = {name + LAYER_SUFFIX for name in (self.g, self.pool_level) if name}
        own = {name for task in self.tasks for name in task.files}
        return frozenset(shared | own | {page + PAGE_SUFFIX for page in self.pages})


@dataclass(frozen=True)
class EncodedPool:
    """A version as bytes: its card, and the files of `layers/` that are not known to be stored already."""

    identity: PoolVersion
    card: bytes
    files: Mapping[str, bytes]


def encode_version(pool: PromptPool, version: int, parent: int | None, stored: Callable[[str], bool]) -> EncodedPool:
    """The bytes of a version; the same pool and numbers give the same ones. Layers that are stored are not encoded."""
    files: dict[str, bytes] = {}
    g = _add(files, encode_tensors(shared_tensors(pool)), LAYER_SUFFIX)
    rows = [asdict(_card_task(task, files, stored)) for task in pool.tasks]
    full = max(len(rows) - 1, 0) // PAGE * PAGE
    pages = [_add(files, _to_json(rows[first : first + PAGE]), PAGE_SUFFIX) for first in range(0, full, PAGE)]
    card = _to_json({
        "schema": SCHEMA,
        "version": version,
        "parent": parent,
        "backbone": asdict(pool.backbone),
        "g_layers": pool.g_layers,
        "e_layers": pool.e_layers,
        "head": describe_head(pool),
        "g": g,
        "pool_level": None,
        "pages": pages,
        "tasks": rows[full:],
        "matching": dict(pool.matching),
    })  # fmt: skip
    identity = PoolVersion(version, hashlib.sha256(card).hexdigest(), parent)
    return EncodedPool(identity, card, {name: data for name, data in files.items() if not stored(name)})


def encode_tensors(tensors: Mapping[str, Tensor]) -> bytes:
    """A layer file."""
    own = {name: tensor.detach().cpu().clone(memory_format=contiguous_format) for name, tensor in tensors.items()}
    return save_tensors(own)  # which refuses tensors that share memory, as keys and means do


def _card_task(task: TaskPrompt, files: dict[str, bytes], stored: Callable[[str], bool]) -> CardTask:
    layer, size = task.layer, task.layer_bytes
    if not layer or not stored(layer + LAYER_SUFFIX):
        own = {name: tensor for name, tensor in task.tensors().items() if name not in STATISTICS}
        data = encode_tensors(own)
        layer, size = _add(files, data, LAYER_SUFFIX), len(data)
    return CardTask(
        task.name, task.classes, layer, size, task.manifest_sha256, task.base, task.samples, task.class_samples,
        task.trained_at, dict(task.metrics), _add_statistics(task, files, stored),
    )  # fmt: skip


def _add_statistics(task: TaskPrompt, files: dict[str, bytes], stored: Callable[[str], bool]) -> str | None:
    """As half-precision numbers: twice the bytes gain nothing that was measured."""
    if task.factor is None:
        return None
    if task.statistics and stored(task.statistics + LAYER_SUFFIX):
        return task.statistics
    return _add(files, encode_tensors({name: getattr(task, name).half() for name in STATISTICS}), LAYER_SUFFIX)


def _add(files: dict[str, bytes], data: bytes, suffix: str) -> str:
    name = hashlib.sha256(data).hexdigest()
    files[name + suffix] = data
    return name


def _to_json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def check_name(name: str) -> str:
    """The name of a file of `layers/`; PoolError if it is none: cards come from outside."""
    if not _FILE.fullmatch(name):
        raise PoolError(f"expected a sha256 as the name of a layer, got {name[:80]!r}")
    return name


def check_content(name: str, data: bytes) -> bytes:
    """The content of a file of `layers/`; PoolError if it is not what its name says."""
    if hashlib.sha256(data).hexdigest() != name.partition(".")[0]:
        raise PoolError(f"layers/{name}: wrong sha256; the file was changed, damaged or cut short")
    return data


def check_card(at: Any, data: bytes) -> bytes:
    """The bytes of a version's card (`at` has its digest); PoolError if they are others."""
    if hashlib.sha256(data).hexdigest() != at.digest:
        raise PoolError(f"versions/{at.card}: wrong sha256; the file was changed, damaged or cut short")
    return data


def parse_card(data: bytes, read_file: ReadFile) -> PoolCard:
    """A card with the tasks of its pages."""
    with as_pool_error():
        fields = json.loads(data)
        if fields["schema"] != SCHEMA:
            raise PoolError(f"expected a card of schema {SCHEMA}, got {fields['schema']!r}; upgrade mqmk-daemon")
        pages = tuple(fields["pages"])
        rows = [row for page in pages for row in json.loads(read_file(page + PAGE_SUFFIX))] + fields["tasks"]
        return PoolCard(
            identity=PoolVersion(fields["version"], hashlib.sha256(data).hexdigest(), fields["parent"]),
            backbone=parse_backbone(fields["backbone"]),
            g_layers=tuple(fields["g_layers"]),
            e_layers=tuple(fields["e_layers"]),
            head=parse_head(fields["head"]),
            g=fields["g"],
            pool_level=fields["pool_level"],
            pages=pages,
            tasks=tuple(_parse_task(row) for row in rows),
            matching=fields["matching"],
        )


def _parse_task(row: Mapping[str, Any]) -> CardTask:
    lists = {"classes": tuple(row["classes"]), "class_samples": tuple(row["class_samples"])}
    return CardTask(**{**row, **lists})


def named_files(card: bytes, read_file: ReadFile, pages: dict[str, frozenset[str]]) -> set[str]:
    """What `PoolCard.files` says, for many cards: `pages` remembers what the pages that they share name."""
    with as_pool_error():
        fields = json.loads(card)
        for page in fields["pages"]:
            if page not in pages:
                pages[page] = frozenset(_row_files(json.loads(read_file(page + PAGE_SUFFIX))))
        own = {fields["g"] + LAYER_SUFFIX, *_row_files(fields["tasks"])}
        own |= {fields["pool_level"] + LAYER_SUFFIX} if fields["pool_level"] else set()
        return own.union(*({page + PAGE_SUFFIX} | pages[page] for page in fields["pages"]))


def _row_files(rows: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    for row in rows:
        yield row["layer"] + LAYER_SUFFIX
        if row["statistics"]:
            yield row["statistics"] + LAYER_SUFFIX


def assemble_pool(
    card: PoolCard,
    read_file: ReadFile,
    backbone: BackboneInfo | None = None,
    known: Iterable[PromptPool] = (),
) -> PromptPool:
    """The pool of a card, checked; tasks that a known pool has are taken from there and their layers are not read."""
    if backbone is not None:
        require_backbone(card.backbone, backbone)
    there = {task.layer: task for pool in known for task in pool.tasks if task.layer}
    with as_pool_error():
        shared = load_tensors(read_file(card.g + LAYER_SUFFIX))
        return PromptPool(
            backbone=card.backbone,
            g_layers=card.g_layers,
            e_layers=card.e_layers,
            g_prompt=shared["g_prompt"],
            anchor=shared.get("anchor"),
            tasks=tuple(_task_prompt(row, there.get(row.layer), read_file) for row in card.tasks),
            matching=card.matching,
            **card.head,
        )


def _task_prompt(row: CardTask, known: TaskPrompt | None, read_file: ReadFile) -> TaskPrompt:
    record: dict[str, Any] = {
        "name": row.name, "classes": row.classes, "manifest_sha256": row.manifest_sha256, "base": row.base,
        "samples": row.samples, "class_samples": row.class_samples, "trained_at": row.trained_at,
        "metrics": row.metrics,
    }  # fmt: skip
    if known is not None and known.statistics == (row.statistics or ""):
        if all(getattr(known, name) == value for name, value in record.items()):
            return known
        tensors: dict[str, Any] = known.tensors()
    else:
        tensors = load_tensors(read_file(row.layer + LAYER_SUFFIX))
        if row.statistics:
            statistics = load_tensors(read_file(row.statistics + LAYER_SUFFIX))
            tensors |= {name: tensor.float() for name, tensor in statistics.items()}
    return TaskPrompt(**record, **tensors).stored_as(row.layer, row.bytes, row.statistics or "")
