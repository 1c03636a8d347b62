"""Clients that ask over HTTP all the time, and what became of each of their requests."""

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

from mqmk.learner import sketches

PAUSE_SECONDS: Final = 0.05
"""Between two requests of a client: the machine has something else to do, too."""
PATIENCE_SECONDS: Final = 60.0
"""Longer than the service's own limits, so that it is the service that gives up."""


@dataclass(frozen=True)
class Sample:
    """One request."""

    began: float
    """Seconds since the epoch."""
    ended: float
    picture: str
    error: str | None = None
    version: int | None = None
    label: str = ""
    task: str = ""
    probability: float = 0.0
    top: tuple[tuple[str, str], ...] = ()
    """Label and task of the best classes, the best first."""


def pictures(labels: Sequence[str]) -> dict[str, bytes]:
    """One sketch of each class, which no training sees."""
    found = {}
    for label in labels:
        data = io.BytesIO()
        Image.fromarray(sketches.read(label).held_out[0]).save(data, "PNG")
        found[label] = data.getvalue()
    return found


@dataclass
class Clients:
    """Run in a thread of their own while the context is open."""

    url: str
    asked: dict[str, bytes]
    count: int = 4
    samples: list[Sample] = field(default_factory=list)

    def __enter__(self) -> "Clients":
        self._end = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="clients")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    async def _run(self) -> None:
        timeout = aiohttp.ClientTimeout(total=PATIENCE_SECONDS)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            await asyncio.gather(*(self._client(session, number) for number in range(self.count)))

    async def _client(self, session: aiohttp.ClientSession, number: int) -> None:
        names = [*self.asked]
        while not self._end.is_set():
            self.samples.append(await self._ask(session, names[number % len(names)]))
            number += 1
            await asyncio.sleep(PAUSE_SECONDS)

    async def _ask(self, session: aiohttp.ClientSession, picture: str) -> Sample:
        began = time.time()
        try:
            async with session.post(f"{self.url}/predict", data=self.asked[picture]) as answer:
                text = await answer.text()
                if answer.status != 200:
                    return Sample(began, time.time(), picture, f"{answer.status}: {text[:200]}")
                return _answered(began, picture, json.loads(text))
        except (aiohttp.ClientError, TimeoutError, OSError) as problem:
            return Sample(began, time.time(), picture, f"{type(problem).__name__}: {problem}")


def _answered(began: float, picture: str, body: dict[str, Any]) -> Sample:
    return Sample(
        began, time.time(), picture,
        version=body["pool_version"], label=body["label"], task=body["task"], probability=body["probability"],
        top=tuple((row["label"], row["task"]) for row in body["top"]),
    )  # fmt: skip
