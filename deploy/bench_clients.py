"""Clients that ask again as soon as they are answered, in a process of their own: how fast, and where the time went.

python -m mqmk.deploy.bench_clients URL CLIENTS SECONDS FOLDER_OF_PICTURES
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

from mqmk.deploy.errors import ServeError

WARM_UP: Final = 0.25
"""The share of the time after which requests begin to count."""


@dataclass(frozen=True)
class Asked:
    """What some clients saw."""

    clients: int
    rate: float
    """Answers a second."""
    p50_ms: float
    p99_ms: float
    parts_ms: dict[str, float]
    """Medians of what the service says about itself (`Server-Timing`)."""


def ask(url: str, clients: int, seconds: float, pictures: Path) -> Asked:
    """Run the clients; ServeError if one answer was not 200."""
    command = [sys.executable, "-m", __name__, url, str(clients), str(seconds), str(pictures)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise ServeError(f"{url}: the clients gave up: {done.stdout.strip()[-300:]}")
    return Asked(**json.loads(done.stdout))


@dataclass(frozen=True, eq=False)
class Request:
    """One that was answered."""

    began: float
    ended: float
    parts: dict[str, float]

    def within(self, begin: float, end: float) -> float:
        """The share of it that lies between two times.

        Answers come in batches, and a slow model gives few in one turn: counting whole ones would depend on whether
        a batch ends just before or just after the turn.
        """
        return max(0.0, min(self.ended, end) - max(self.began, begin)) / (self.ended - self.began)


def summary(clients: int, requests: Sequence[Request], begin: float, end: float) -> Asked:
    """What was seen between two times; the clients go on until all of their requests are answered."""
    shares = {each: share for each in requests if (share := each.within(begin, end))}
    if not shares:
        raise ServeError(f"no answer within {end - begin:g} s")
    times = sorted((each.ended - each.began) * 1e3 for each in shares)
    names = next(iter(shares)).parts
    parts = {name: round(median(each.parts[name] for each in shares), 3) for name in names}
    rate = sum(shares.values()) / (end - begin)
    return Asked(clients, round(rate, 2), round(median(times), 2), round(times[int(0.99 * len(times))], 2), parts)


async def _run(url: str, clients: int, seconds: float, pictures: list[bytes]) -> Asked:
    began, requests = time.perf_counter(), list[Request]()
    end = began + seconds
    connections = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connections) as session:
        mine = [pictures[number % len(pictures) :] + pictures[: number % len(pictures)] for number in range(clients)]
        await asyncio.gather(*(_client(session, url, bodies, end, requests) for bodies in mine))
    return summary(clients, requests, began + WARM_UP * seconds, end)


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
                parts = _parts(answer.headers.get("Server-Timing", ""))
                requests.append(Request(began, time.perf_counter(), parts))


def _parts(header: str) -> dict[str, float]:
    """`decode;dur=1.2, match;dur=20` by name."""
    found = (part.strip().partition(";dur=") for part in header.split(",") if ";dur=" in part)
    return {name: float(milliseconds) for name, _, milliseconds in found}


def main(url: str, clients: str, seconds: str, folder: str) -> None:
    """Print what was seen as JSON."""
    pictures = [path.read_bytes() for path in sorted(Path(folder).glob("*.jpg"))]
    try:
        asked: dict[str, Any] = asdict(asyncio.run(_run(url, int(clients), float(seconds), pictures)))
    except (ServeError, aiohttp.ClientError) as error:
        print(error)
        sys.exit(1)
    print(json.dumps(asked))


if __name__ == "__main__":
    main(*sys.argv[1:])
