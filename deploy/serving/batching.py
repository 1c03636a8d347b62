"""How single images become batches: whatever arrived while the model was busy is the next batch.

A single request does not wait, and batches grow under load. One thread computes, so that passes do not compete for the
same cores. Images share a batch if they have the same `key`, which names the pool and the matcher: no batch mixes two
pools.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True, eq=False)
class _Waiting(Generic[Key, Item, Result]):
    key: Key
    item: Item
    answer: asyncio.Future[Result]


class Batcher(Generic[Key, Item, Result]):
    """Runs `compute(key, items)` in one thread; used from one event loop."""

    def __init__(
        self, compute: Callable[[Key, Sequence[Item]], Sequence[Result]], max_batch: int, wait_seconds: float = 0.0
    ) -> None:
        self._compute, self._max_batch, self._wait_seconds = compute, max_batch, wait_seconds
        self._waiting: deque[_Waiting[Key, Item, Result]] = deque()
        self._came = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="model")
        self._running: asyncio.Task[None] | None = None
        self.batches = 0
        self.items = 0

    async def submit(self, key: Key, items: Sequence[Item]) -> list[Result]:
        """The results of some items, in order; if one fails, its error is raised."""
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._run(), name="batcher")
        loop = asyncio.get_running_loop()
        jobs: list[_Waiting[Key, Item, Result]] = [_Waiting(key, item, loop.create_future()) for item in items]
        self._waiting.extend(jobs)
        self._came.set()
        try:
            return list(await asyncio.gather(*(job.answer for job in jobs)))
        finally:
            for job in jobs:
                job.answer.cancel()  # nobody waits for it; a result that is there stays

    def close(self) -> None:
        """Stop the thread and the task."""
        if self._running:
            self._running.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._came.wait()
            if self._wait_seconds and len(self._waiting) < self._max_batch:
                await asyncio.sleep(self._wait_seconds)
            if batch := self._next():
                try:
                    results = await loop.run_in_executor(
                        self._thread, self._compute, batch[0].key, [job.item for job in batch]
                    )
                    self.batches, self.items = self.batches + 1, self.items + len(batch)
                    _deliver(batch, results)
                except Exception as error:
                    for job in batch:
                        if not job.answer.done():
                            job.answer.set_exception(error)

    def _next(self) -> list[_Waiting[Key, Item, Result]]:
        """The oldest job and others with its key, up to a batch; jobs that nobody waits for are dropped."""
        alive = deque(job for job in self._waiting if not job.answer.done())
        batch: list[_Waiting[Key, Item, Result]] = []
        rest: deque[_Waiting[Key, Item, Result]] = deque()
        for job in alive:
            (batch if job.key == alive[0].key and len(batch) < self._max_batch else rest).append(job)
        self._waiting = rest
        if not rest:
            self._came.clear()
        return batch


def _deliver(batch: Sequence[_Waiting[Key, Item, Result]], results: Sequence[Result]) -> None:
    for job, result in zip(batch, results, strict=True):
        if not job.answer.done():
            job.answer.set_result(result)
