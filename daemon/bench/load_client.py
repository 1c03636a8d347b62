"""Closed-loop load: clients in a separate process that send the next request as soon as one is answered.

python -m mqmk.daemon.bench.load_client URL CLIENTS SECONDS FOLDER_OF_IMAGES
"""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

import aiohttp

from mqmk.deploy.serving.errors import ServeError

WARM_UP: Final = 0.25
"""Share of the time before requests count."""


@dataclass(frozen=True)
class LoadResult:
    """What the clients measured."""

    clients: int
    rate: float
    """Answers per second."""
    p50_ms: float
    p99_ms: float
    parts_ms: dict[str, float]
    """Medians of the service's `Server-Timing`."""


def run_load(url: str, clients: int, seconds: float, images: Path) -> LoadResult:
    """Run the clients; ServeError if an answer is not 200."""
    command = [sys.executable, "-m", __name__, url, str(clients), str(seconds), str(images)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise ServeError(f"{url}: the clients failed: {done.stdout.strip()[-300:]}")
    return LoadResult(**json.loads(done.stdout))


@dataclass(frozen=True, eq=False)
class Request:
    """One answered request."""

    began: float
    ended: float
    parts: dict[str, float]

    def within(self, begin: float, end: float) -> float:
        """The share of it that lies between two times.

        Answers come in batches, and a slow model gives few in one measurement: counting whole requests would depend on
        whether a batch ends just before or just after it.
        """
        return max(0.0, min(self.ended, end) - max(self.began, begin)) / (self.ended - self.began)


def summarize(clients: int, requests: Sequence[Request], begin: float, end: float) -> LoadResult:
    """The result between two times; clients continue until all their requests are answered."""
    shares = {each: share for each in requests if (share := each.within(begin, end))}
    if not shares:
        raise ServeError(f"no answer within {end - begin:g} s")
    times = sorted((each.ended - each.began) * 1e3 for each in shares)
    names = next(iter(shares)).parts
    parts = {name: round(median(each.parts[name] for each in shares), 3) for name in names}
    rate = sum(shares.values()) / (end - begin)
    return LoadResult(clients, round(rate, 2), round(median(times), 2), round(times[int(0.99 * len(times))], 2), parts)


async def _run(url: str, clients: int, seconds: float, images: list[bytes]) -> LoadResult:
    began, requests = time.perf_counter(), list[Request]()
    end = began + seconds
    connections = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connections) as session:
        mine = [images[number % len(images) :] + images[: number % len(images)] for number in range(clients)]
        await asyncio.gather(*(_client(session, url, bodies, end, requests) for bodies in mine))
    return summarize(clients, requests, began + WARM_UP * seconds, end)


async def _client(
    session: aiohttp.ClientSession, url: str, bodies: Sequence[bytes], end: float, requests: list[Request]
) -> None:
    while True:
        for body in bodies:
            began = time.perf_counter()
            if began >= end:
                return
            async with session.post(f"{url}/predict", data=body) as answer:
                text = await answer.text()
                if answer.status != 200:
                    raise ServeError(f"{answer.status}: {text}")
                parts = _parse_timings(answer.headers.get("Server-Timing", ""))
                requests.append(Request(began, time.perf_counter(), parts))


def _parse_timings(header: str) -> dict[str, float]:
    """`decode;dur=1.2, match;dur=20` by name."""
    found = (part.strip().partition(";dur=") for part in header.split(",") if ";dur=" in part)
    return {name: float(milliseconds) for name, _, milliseconds in found}


def main(url: str, clients: str, seconds: str, folder: str) -> None:
    """Print the result as JSON."""
    images = [path.read_bytes() for path in sorted(Path(folder).glob("*.jpg"))]
    try:
        result: dict[str, Any] = asdict(asyncio.run(_run(url, int(clients), float(seconds), images)))
    except (ServeError, aiohttp.ClientError) as error:
        print(error)
        sys.exit(1)
    print(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
