"""What do metrics cost a request? The same replica's work with and without them, in turns, in one run.

    cd tests; PYTHONPATH=.:deploy python observe/overhead.py [TURNS]     # 600 turns of 0.2 s a side: five minutes

One service in this process measures as a replica does (Ray's metrics of a process that is attached to a Ray head, the
export thread, a hundredth of the answers matched again exactly) or not at all, in short turns of random order: whatever
else the machine does falls on both, and both are the same threads and the same memory. The time is that of the ASGI
application, without Serve's proxy, which would only make the share smaller. Not a pytest file: the tests check shapes
at run time, which would make requests slower and the share smaller, too.
"""

import asyncio
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from fingerprints import empty_pool, picture, publish, task
from ray_session import small_head

from mqmk.daemon.ray_attach import attach, detach
from mqmk.daemon.ray_head import ensure_head, stop_head
from mqmk.deploy.api import build_api
from mqmk.deploy.measures import Measures
from mqmk.deploy.pool_holder import PoolHolder
from mqmk.deploy.replica_metrics import RayMetrics
from mqmk.deploy.service import Service
from mqmk.deploy.settings import ServeSettings
from mqmk.matcher.backbone import load_backbone
from mqmk.matcher.calibration import matching_confidence
from mqmk.matcher.images import decode, prepare
from mqmk.matcher.matchers import match
from mqmk.matcher.pool import PromptPool
from mqmk.matcher.pool_store import PoolStore
from mqmk.matcher.predictor import PredictSettings, name_answers, predict
from mqmk.matcher.prompted_vit import FrozenViT

TASKS, PICTURES = 10, 200
TURN_SECONDS = 0.2
CALLS, FLUSHED = 60, 50
MOST = 0.02

Times = list[list[float]]
"""Seconds of each request, by turn."""


class Switch:
    """Measures, or measures nothing."""

    def __init__(self, measures: Measures) -> None:
        self._measures, self.on = measures, True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._measures, name) if self.on else self._nothing

    def agreed(self, matcher: str, same: bool) -> None:
        """Handed to another part once, so it is always there."""
        self._measures.agreed(matcher, same)

    def _nothing(self, *_: Any) -> None: ...


def calibrated_pool(vit: FrozenViT) -> PromptPool:
    """Ten tasks of five classes, with all that a replica needs to measure."""
    pool = empty_pool(vit)
    for number in range(TASKS):
        labels = tuple(f"class{number}-{place}" for place in range(5))
        pool = pool.with_task(task(f"task{number}", labels, vit, seed=number))
    images = torch.stack([prepare(decode(picture(seed, (28, 28))), vit.info) for seed in range(PICTURES)])
    with torch.inference_mode():
        found = {"cascade": match("cascade", vit, pool, images)}
    wrong = torch.arange(PICTURES) % 5 == 0
    true = torch.where(wrong, (found["cascade"].task + 1) % TASKS, found["cascade"].task)
    return pool.with_matching(matching_confidence(found, true, [each.name for each in pool.tasks], "cascade"))


class Replica:
    """What is measured, and the times of its turns with metrics and without."""

    def __init__(self, vit: FrozenViT, pools: Path) -> None:
        settings = ServeSettings(pools, matcher="cascade")
        holder = PoolHolder(PoolStore(pools), vit, PredictSettings("cascade"))
        holder.look()
        self.switch: Any = Switch(Measures(RayMetrics(), settings))
        self.service = Service(vit, holder, settings, measures=self.switch)
        self.service.export()
        self.app, self.turns = build_api(self.service), {True: Times(), False: Times()}

    async def ask(self, body: bytes) -> float:
        """Seconds from the request to the end of the answer."""
        scope = {"type": "http", "method": "POST", "path": "/predict", "raw_path": b"/predict", "query_string": b"",
                 "headers": [(b"content-type", b"image/png")], "http_version": "1.1", "scheme": "http",
                 "root_path": "", "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80)}  # fmt: skip
        status = 0

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Any) -> None:
            nonlocal status
            status = message.get("status", status)

        began = time.perf_counter()
        await self.app(scope, receive, send)
        seconds = time.perf_counter() - began
        assert status == 200
        return seconds

    async def turn(self, bodies: list[bytes], measured: bool) -> None:
        """Requests one after another for a while."""
        self.switch.on = measured
        self.service._agreement._share = self.service.settings.agreement_share if measured else 0.0
        times, end = list[float](), time.monotonic() + TURN_SECONDS
        with self._watching():
            while time.monotonic() < end:
                times.append(await self.ask(random.choice(bodies)))
        self.turns[measured].append(times)

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """The thread that looks at CURRENT and exports, as in a replica."""
        done = threading.Event()

        def watch() -> None:
            while not done.wait(self.service.settings.watch_seconds):
                self.service.holder.look()
                self.service.export()

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


def percentile_99(times: list[float]) -> float:
    return quantiles(times, n=100)[98]


def overhead(measured: Times, plain: Times, figure: Callable[[list[float]], float]) -> tuple[float, float, float]:
    """The share that measuring adds to a figure, with its 95 % interval by drawing turns anew."""
    dice, places = random.Random(0), range(len(plain))

    def share(chosen: Any) -> float:
        with_it, without = ([t for place in chosen for t in side[place]] for side in (measured, plain))
        return figure(with_it) / figure(without) - 1

    drawn = sorted(share(dice.choices(places, k=len(places))) for _ in range(1000))
    return share(places), drawn[25], drawn[974]


async def take_turns(replica: Replica, turns: int) -> None:
    bodies = [picture(seed, (28, 28)) for seed in range(PICTURES)]
    for measured in (True, False):
        await replica.turn(bodies, measured)  # the first turns warm up
        replica.turns[measured].clear()
    for _ in range(turns):
        for measured in random.sample((True, False), 2):
            await replica.turn(bodies, measured)
    replica.switch.on = True


def calls_alone(replica: Replica) -> float:
    """Seconds that a request spends in the calls that measure it; without what other threads do for it."""
    held, measures = replica.service.holder.held, replica.service.measures
    assert held is not None
    images = torch.stack([prepare(decode(picture(1, (28, 28))), held.pool.backbone)])
    answer = name_answers(held.pool, predict(replica.service._vit, held.pool, images, PredictSettings("cascade")))[0]
    seconds = 0.0
    for _ in range(CALLS):
        began = time.perf_counter()
        for _ in range(FLUSHED):
            measures.stages(0.001, 0.0, 0.004)
            measures.batch(1)
            measures.answer(held, answer, False)
            measures.request("predict", "200", "cascade", 0.005)
        seconds += time.perf_counter() - began
        measures._metrics.flush()  # another thread's work
    return seconds / CALLS / FLUSHED


def compared(folder: Path, turns: int) -> tuple[Times, Times]:
    """The seconds of requests with and without metrics."""
    torch.set_num_threads(1)
    vit, pools = load_backbone(), folder / "pools"
    publish(pools, calibrated_pool(vit), 1)
    replica = Replica(vit, pools)
    asyncio.run(take_turns(replica, turns))
    print(f"the calls that measure a request take {calls_alone(replica) * 1e6:.0f} µs")
    replica.service.close()
    return replica.turns[True], replica.turns[False]


def told(name: str, figure: Callable[[list[float]], float], measured: Times, plain: Times) -> bool:
    """Print what metrics add to one figure; whether that may be under two percent."""
    share, low, high = overhead(measured, plain, figure)
    with_it, without = ([t for turn in side for t in turn] for side in (measured, plain))
    print(f"{name}: {figure(without) * 1000:.3f} ms without metrics ({len(without):,} requests), {share:+.2%} with "
          f"({len(with_it):,} requests); 95 % interval {low:+.2%} to {high:+.2%}")  # fmt: skip
    if low < MOST < high:
        print(f"    too noisy here to tell whether that is under {MOST:.0%}")
    return low < MOST


def main(turns: int) -> None:
    with tempfile.TemporaryDirectory(prefix="mqmk-overhead-") as name:
        folder = Path(name)
        attach(ensure_head(small_head(folder / "ray")))
        try:
            measured, plain = compared(folder, turns)
        finally:
            detach()
            stop_head(folder / "ray")
    good = [told("median", median, measured, plain), told("99th percentile", percentile_99, measured, plain)]
    raise SystemExit(0 if all(good) else "metrics cost a request more than two percent")


if __name__ == "__main__":
    main(int(sys.argv[1]) if sys.argv[1:] else 600)
