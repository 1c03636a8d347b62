"""Constant load over HTTP: clients that send the next request as soon as they get a response, and the outcome of each.

The clients are a process of their own (`load.py URL CLIENTS FOLDER`), so that nothing else that a test does, such as
watching reports, is counted as time of the service. Clocks are the system's monotonic one, the same in all processes.
"""

import asyncio
import json
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import astuple, dataclass, field
from pathlib import Path

import aiohttp
from support.serving.answers import version_of


@dataclass(frozen=True)
class Sample:
    """One request."""

    began: float
    seconds: float
    version: int | None
    error: str | None = None


@dataclass
class Load:
    """Runs until the end of the `with` block; `samples` are there after it."""

    url: str
    clients: int = 4
    samples: list[Sample] = field(default_factory=list)

    def __enter__(self) -> "Load":
        from support.serving.fingerprints import image_bytes

        self._folder = tempfile.TemporaryDirectory()
        for seed in range(2):
            (Path(self._folder.name) / f"{seed}.png").write_bytes(image_bytes(seed))
        command = [sys.executable, "-m", "support.serving.load", self.url, str(self.clients), self._folder.name]
        tests = Path(__file__).parents[2]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=tests)
        assert self._process.stdout.readline() == "begun\n"
        return self

    def __exit__(self, *_: object) -> None:
        told, _ = self._process.communicate()
        self.samples = [Sample(*row) for row in json.loads(told)]
        self._folder.cleanup()


async def ask(url: str, clients: int, images: list[bytes], end: threading.Event) -> list[Sample]:
    """Send requests until `end`; every client has one in flight."""
    samples: list[Sample] = []
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as session:
        asking = (_client(session, url, images[number % len(images)], end, samples) for number in range(clients))
        await asyncio.gather(*asking)
    return samples


async def _client(
    session: aiohttp.ClientSession, url: str, body: bytes, end: threading.Event, samples: list[Sample]
) -> None:
    while not end.is_set():
        began = time.monotonic()
        version, error = None, None
        try:
            async with session.post(f"{url}/predict", data=body) as answer:
                text = await answer.text()
                if answer.status != 200:
                    error = f"{answer.status}: {text[:200]}"
                else:
                    version = version_of(json.loads(text))
        except (aiohttp.ClientError, TimeoutError) as problem:
            error = f"{type(problem).__name__}: {problem}"
            await asyncio.sleep(0.05)
        except AssertionError as mixed:
            error = f"MIXED: {mixed}"
        samples.append(Sample(began, time.monotonic() - began, version, error))


def quantile(samples: list[Sample], share: float) -> float:
    """In seconds; 0 for none."""
    times = sorted(sample.seconds for sample in samples)
    return times[min(len(times) - 1, int(share * len(times)))] if times else 0.0


def within(samples: list[Sample], windows: list[tuple[float, float]]) -> list[Sample]:
    """Those in flight at some time of a window."""
    return [
        one for one in samples if any(one.began <= end and one.began + one.seconds >= start for start, end in windows)
    ]


def main(url: str, clients: str, folder: str) -> None:
    images = [path.read_bytes() for path in sorted(Path(folder).glob("*.png"))]
    end = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), end.set()), daemon=True).start()
    print("begun", flush=True)
    samples = asyncio.run(ask(url, int(clients), images, end))
    print(json.dumps([astuple(sample) for sample in samples]))


if __name__ == "__main__":
    main(*sys.argv[1:])
