"""Our batcher against Ray's `serve.batch`, in one process without HTTP: the same pictures, the same predictor."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, Final

import torch
from jaxtyping import Float
from torch import Tensor

from mqmk.deploy.batching import Batcher
from mqmk.matcher.pool import PromptPool
from mqmk.matcher.predictor import Prediction, PredictSettings, name_answers, predict
from mqmk.matcher.prompted_vit import FrozenViT

MAX_BATCH: Final = 32
OUR_WAIT: Final = 0.005
RAY_WAIT: Final = 0.01
"""Seconds; what Ray documents as the default of `serve.batch`."""
Ask = Callable[[Float[Tensor, "3 height width"]], Awaitable[Prediction]]


@dataclass(frozen=True)
class BatchingRow:
    """One way to make batches, with some requests under way all the time."""

    way: str
    clients: int
    rate: float
    p50_ms: float


def measure_batching(
    vit: FrozenViT, pool: PromptPool, settings: PredictSettings, clients: Sequence[int], rounds: int, seconds: float
) -> list[BatchingRow]:
    """Every way in turn, round after round; medians."""
    size = vit.info.image_size
    images = torch.randn(MAX_BATCH, 3, size, size, generator=torch.Generator().manual_seed(0))

    def compute(_: str, some: Sequence[Tensor]) -> list[Prediction]:
        return name_answers(pool, predict(vit, pool, torch.stack(list(some)).to(vit.device), settings))

    ways = {
        "our batcher": partial(_ours, compute, 0.0),
        f"our batcher, {OUR_WAIT * 1e3:g} ms wait": partial(_ours, compute, OUR_WAIT),
        "serve.batch, no wait": partial(_rays, compute, 0.0),
        f"serve.batch, {RAY_WAIT * 1e3:g} ms wait": partial(_rays, compute, RAY_WAIT),
    }
    found: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for _ in range(rounds):
        for name, way in ways.items():
            for count in clients:
                found.setdefault((name, count), []).append(asyncio.run(way(images, count, seconds)))
    return [
        BatchingRow(name, count, round(median(rate for rate, _ in seen), 1), round(median(ms for _, ms in seen), 2))
        for (name, count), seen in found.items()
    ]


async def _ours(compute: Any, wait: float, images: Tensor, clients: int, seconds: float) -> tuple[float, float]:
    with closing(Batcher[str, Tensor, Prediction](compute, MAX_BATCH, wait)) as batcher:

        async def ask(image: Tensor) -> Prediction:
            return (await batcher.submit("one", [image]))[0]

        return await _asked(ask, images, clients, seconds)


async def _rays(compute: Any, wait: float, images: Tensor, clients: int, seconds: float) -> tuple[float, float]:
    from ray import serve

    loop, thread = asyncio.get_running_loop(), ThreadPoolExecutor(1)

    @serve.batch(max_batch_size=MAX_BATCH, batch_wait_timeout_s=wait)
    async def ask(some: list[Tensor]) -> list[Prediction]:
        return await loop.run_in_executor(thread, compute, "one", some)

    try:
        return await _asked(ask, images, clients, seconds)
    finally:
        thread.shutdown()


async def _asked(ask: Ask, images: Tensor, clients: int, seconds: float) -> tuple[float, float]:
    """Answers a second, and the median in milliseconds."""
    await ask(images[0])
    began, times = time.perf_counter(), list[float]()

    async def client(number: int) -> None:
        while (asked := time.perf_counter()) - began < seconds:
            await ask(images[number % len(images)])
            times.append(time.perf_counter() - asked)

    await asyncio.gather(*(client(number) for number in range(clients)))
    return len(times) / (time.perf_counter() - began), median(times) * 1e3
