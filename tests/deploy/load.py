"""Constant load over HTTP: clients that ask again as soon as they are answered, and what became of each request."""

import asyncio
import threading
import time
from dataclasses import dataclass, field

import aiohttp
from fingerprints import picture, version_of


@dataclass(frozen=True)
class Sample:
    """One request."""

    began: float
    seconds: float
    version: int | None
    error: str | None = None


@dataclass
class Load:
    """Runs in a thread of its own until `stop`."""

    url: str
    clients: int = 4
    samples: list[Sample] = field(default_factory=list)

    def __enter__(self) -> "Load":
        self._end = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    async def _run(self) -> None:
        timeout = aiohttp.ClientTimeout(total=30)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            await asyncio.gather(*(self._client(session, number) for number in range(self.clients)))

    async def _client(self, session: aiohttp.ClientSession, number: int) -> None:
        body = picture(number % 2)
        while not self._end.is_set():
            began = time.monotonic()
            version, error = None, None
            try:
                async with session.post(f"{self.url}/predict", data=body) as answer:
                    text = await answer.text()
                    if answer.status != 200:
                        error = f"{answer.status}: {text[:200]}"
                    else:
                        version = version_of(await answer.json())
            except (aiohttp.ClientError, TimeoutError) as problem:
                error = f"{type(problem).__name__}: {problem}"
                await asyncio.sleep(0.05)
            except AssertionError as mixed:
                error = f"MIXED: {mixed}"
            self.samples.append(Sample(began, time.monotonic() - began, version, error))


def quantile(samples: list[Sample], share: float) -> float:
    """In seconds; 0 for none."""
    times = sorted(sample.seconds for sample in samples)
    return times[min(len(times) - 1, int(share * len(times)))] if times else 0.0


def within(samples: list[Sample], windows: list[tuple[float, float]]) -> list[Sample]:
    """Those under way at some time of a window."""
    return [
        one for one in samples if any(one.began <= end and one.began + one.seconds >= start for start, end in windows)
    ]
