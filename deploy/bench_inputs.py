"""What serving is measured with: a pool of random prompts, and pictures as a camera would make them. Neither changes
the time that an answer takes."""

import io
from pathlib import Path
from typing import Final

import torch
from PIL import Image

from mqmk.matcher.pool import PromptPool, TaskPrompt
from mqmk.matcher.pool_store import PoolStore
from mqmk.matcher.prompted_vit import FrozenViT

CLASSES: Final = 10  # of a task
E_LENGTH: Final = 20  # rows of an e-prompt
PICTURE: Final = (640, 480)


def publish_random_pool(folder: Path, vit: FrozenViT, tasks: int) -> PromptPool:
    """Write a pool of random tasks as version 1, and point at it."""
    pool, store = random_pool(vit, tasks), PoolStore(folder)
    store.point_at(store.write(pool, 1, None))
    return pool


def random_pool(vit: FrozenViT, tasks: int) -> PromptPool:
    """The same pool whenever it is asked for."""
    draw = torch.Generator().manual_seed(0)
    e_layers = tuple(range(2, vit.depth - 1))
    pool = PromptPool(vit.info, (0, 1), e_layers, torch.randn(2, 2, 5, vit.dim, generator=draw))
    for number in range(tasks):
        e_prompt = torch.randn(len(e_layers), 2, E_LENGTH, vit.dim, generator=draw)
        rows = torch.randn(CLASSES, vit.dim, generator=draw)
        names = tuple(f"class {number}.{place}" for place in range(CLASSES))
        pool = pool.with_task(TaskPrompt(f"task {number}", names, e_prompt, rows, rows, rows, rows))
    return pool


def write_pictures(folder: Path, count: int = 16) -> list[bytes]:
    """JPEG pictures with large and small shapes, about 60 kB each."""
    folder.mkdir(parents=True, exist_ok=True)
    found = [_picture(number) for number in range(count)]
    for number, data in enumerate(found):
        (folder / f"{number:02d}.jpg").write_bytes(data)
    return found


def _picture(seed: int) -> bytes:
    draw = torch.Generator().manual_seed(seed)
    seen = Image.new("RGB", PICTURE)
    for size in (4, 16, 64):
        pixels = torch.randint(0, 256, (size, size, 3), generator=draw, dtype=torch.uint8).numpy()
        seen = Image.blend(seen, Image.fromarray(pixels).resize(PICTURE, Image.Resampling.BICUBIC), 0.5)
    data = io.BytesIO()
    seen.save(data, "JPEG", quality=90)
    return data.getvalue()
