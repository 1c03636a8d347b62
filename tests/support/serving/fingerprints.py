"""Pools in which every part names the version, so that an answer mixed from two versions is detected."""

import io
from dataclasses import replace
from pathlib import Path

import torch
from PIL import Image

from mqmk.matcher.pool import PromptPool, TaskPrompt
from mqmk.matcher.pool_store import PoolStore
from mqmk.matcher.prompted_vit import FrozenViT

FIRST_E_LAYER = 2
KEPT = 3


def task(name: str, labels: tuple[str, ...], vit: FrozenViT, seed: int, trained_at: str = "") -> TaskPrompt:
    """A random task; the same arguments give the same bytes."""
    draw = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw)

    return TaskPrompt(
        name=name,
        classes=labels,
        e_prompt=random(vit.depth - FIRST_E_LAYER, 2, 3, vit.dim) * 0.5,
        keys=random(len(labels), vit.dim),
        head=random(len(labels), vit.dim),
        means=random(len(labels), vit.dim),
        plain_means=random(len(labels), vit.dim),
        manifest_sha256="ab" * 32,
        samples=10,
        trained_at=trained_at,
        metrics={"accuracy": 0.5},
    )


def empty_pool(vit: FrozenViT) -> PromptPool:
    layers = tuple(range(FIRST_E_LAYER, vit.depth))
    g_prompt = torch.randn(2, 2, 5, vit.dim, generator=torch.Generator().manual_seed(7))
    return PromptPool(vit.info, (0, 1), layers, g_prompt)


def marked_pool(vit: FrozenViT, version: int) -> PromptPool:
    """A few tasks that every version keeps, and a task whose name and labels say which version this is.

    The marked task wins every match: its keys are the queries that white and black paper and noise give.
    """
    pool = empty_pool(vit)
    for number in range(KEPT):
        pool = pool.with_task(task(f"kept{number}", (f"kept{number}-a", f"kept{number}-b"), vit, seed=number))
    own = task(f"task-v{version}", (f"label-v{version}-a", f"label-v{version}-b"), vit, seed=1000 + version)
    return pool.with_task(_winning(own, pool, vit))


@torch.inference_mode()
def _winning(own: TaskPrompt, pool: PromptPool, vit: FrozenViT) -> TaskPrompt:
    from mqmk.matcher.images import decode, prepare

    images = torch.stack([prepare(decode(image_bytes(seed)), vit.info) for seed in range(len(own.classes))])
    trial = pool.with_task(own)
    stem = vit.stem(vit.embed(images), trial.g, trial.e_layers[0])
    return replace(own, keys=vit.query(stem, trial.g, trial.e(len(trial.tasks) - 1)).clone())


def publish(folder: Path, pool: PromptPool, version: int) -> None:
    """Write a version and point at it, as the daemon does."""
    store = PoolStore(folder)
    store.point_at(store.write(pool, version, version - 1 or None))


def image_bytes(seed: int = 0, size: tuple[int, int] = (56, 56), kind: str = "PNG") -> bytes:
    """An image of noise."""
    pixels = torch.randint(0, 256, (size[1], size[0], 3), generator=torch.Generator().manual_seed(seed))
    data = io.BytesIO()
    Image.fromarray(pixels.to(torch.uint8).numpy()).save(data, kind)
    return data.getvalue()
