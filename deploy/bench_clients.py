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


@dataclass(frozen=True)
class _Request:
    ended: float
    seconds: float
    parts: dict[str, float]


async def _run(url: str, clients: int, seconds: float, pictures: list[bytes]) -> Asked:
    began, requests = time.perf_counter(), list[_Request]()
    end = began + seconds
    connections = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connections) as session:
        mine = [pictures[number % len(pictures) :] + pictures[: number % len(pictures)] for number in range(clients)]
        await asyncio.gather(*(_client(session, url, bodies, end, requests) for bodies in mine))
    counted = [each for each in requests if began + WARM_UP * seconds <= each.ended <= end]
    if not counted:
        raise ServeError(f"no answer within {seconds:g} s")
    times = sorted(each.seconds * 1e3 for each in counted)
    parts = {name: round(median(each.parts[name] for each in counted), 3) for name in counted[0].parts}
    rate = len(counted) / (seconds * (1 - WARM_UP))
    return Asked(clients, round(rate, 2), round(median(times), 2), round(times[int(0.99 * len(times))], 2), parts)


async def _client(
    session: aiohttp.ClientSession, url: str, bodies: Sequence[bytes], end: float, requests: list[_Request]
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
                ended = time.perf_counter()
                requests.append(_Request(ended, ended - began, _parts(answer.headers.get("Server-Timing", ""))))


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
