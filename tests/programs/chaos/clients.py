"""Clients that send HTTP requests continuously and record the outcome of each."""

import asyncio
import io
import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp
from PIL import Image

from mqmk.learner.data import sketches

PAUSE_SECONDS: Final = 0.05
"""Between two requests of a client, to leave CPU for the daemon."""
TIMEOUT_SECONDS: Final = 60.0
"""Longer than the service's own timeouts, so that those fire first."""


@dataclass(frozen=True)
class RequestRecord:
    """The outcome of one request."""

    began: float
    """Seconds since the epoch."""
    ended: float
    image: str
    error: str | None = None
    version: int | None = None
    label: str = ""
    task: str = ""
    probability: float = 0.0
    top: tuple[tuple[str, str], ...] = ()
    """Label and task of the top classes, best first."""


def sample_images(labels: Sequence[str]) -> dict[str, bytes]:
    """One held-out sketch of each class, as PNG."""
    found = {}
    for label in labels:
        data = io.BytesIO()
        Image.fromarray(sketches.read(label).held_out[0]).save(data, "PNG")
        found[label] = data.getvalue()
    return found


@dataclass
class Clients:
    """Concurrent clients in a background thread, running while the context is open."""

    url: str
    images: dict[str, bytes]
    count: int = 4
    records: list[RequestRecord] = field(default_factory=list)

    def __enter__(self) -> "Clients":
        self._end = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="clients")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    async def _run(self) -> None:
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_SECONDS)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            await asyncio.gather(*(self._client(session, number) for number in range(self.count)))

    async def _client(self, session: aiohttp.ClientSession, number: int) -> None:
        names = [*self.images]
        while not self._end.is_set():
            self.records.append(await self._predict(session, names[number % len(names)]))
            number += 1
            await asyncio.sleep(PAUSE_SECONDS)

    async def _predict(self, session: aiohttp.ClientSession, image: str) -> RequestRecord:
        began = time.time()
        try:
            async with session.post(f"{self.url}/predict", data=self.images[image]) as answer:
                text = await answer.text()
                if answer.status != 200:
                    return RequestRecord(began, time.time(), image, f"{answer.status}: {text[:200]}")
                return _parse_answer(began, image, json.loads(text))
        except (aiohttp.ClientError, TimeoutError, OSError) as problem:
            return RequestRecord(began, time.time(), image, f"{type(problem).__name__}: {problem}")


def _parse_answer(began: float, image: str, body: dict[str, Any]) -> RequestRecord:
    return RequestRecord(
        began, time.time(), image,
        version=body["pool_version"], label=body["label"], task=body["task"], probability=body["probability"],
        top=tuple((row["label"], row["task"]) for row in body["top"]),
    )  # fmt: skip
