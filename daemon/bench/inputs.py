"""Inputs of the serving benchmark: a pool of random prompts, and images like a camera's. Neither affects the speed."""

import io
from pathlib import Path
from typing import Final

import torch
from PIL import Image

from mqmk.learner.bench.random_pool import random_pool
from mqmk.matcher.pool import PromptPool
from mqmk.matcher.pool_store import PoolStore
from mqmk.matcher.prompted_vit import FrozenViT

IMAGE: Final = (640, 480)


def publish_random_pool(folder: Path, vit: FrozenViT, tasks: int) -> PromptPool:
    """Write a pool of random tasks as version 1, and point at it."""
    pool, store = random_pool(vit, tasks), PoolStore(folder)
    store.point_at(store.write(pool, 1, None))
    return pool


def write_images(folder: Path, count: int = 16) -> list[bytes]:
    """JPEG images with large and small shapes, about 60 kB each."""
    folder.mkdir(parents=True, exist_ok=True)
    found = [_image(number) for number in range(count)]
    for number, data in enumerate(found):
        (folder / f"{number:02d}.jpg").write_bytes(data)
    return found


def _image(seed: int) -> bytes:
    draw = torch.Generator().manual_seed(seed)
    seen = Image.new("RGB", IMAGE)
    for size in (4, 16, 64):
        pixels = torch.randint(0, 256, (size, size, 3), generator=draw, dtype=torch.uint8).numpy()
        seen = Image.blend(seen, Image.fromarray(pixels).resize(IMAGE, Image.Resampling.BICUBIC), 0.5)
    data = io.BytesIO()
    seen.save(data, "JPEG", quality=90)
    return data.getvalue()
