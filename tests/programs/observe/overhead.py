"""Measure the overhead of metrics per request, alternating between metrics on and off in one process.

    cd tests; python -m programs.observe.overhead [TURNS]     # 600 turns of 0.2 s on each side: five minutes

One service in this process records metrics as a replica does (Ray metrics in a process attached to a Ray head, the
export thread, one percent of the answers matched again exactly) or not at all, in short turns of random order. Other
load on the machine affects both sides, and both use the same threads and memory. The time is that of the ASGI
application without Serve's proxy, which would only reduce the relative overhead. Not a pytest file: the tests check
shapes at run time, which would make requests slower and the relative overhead smaller.
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
from support.calibration import calibrate
from support.servers.ray_session import small_head
from support.serving.fingerprints import empty_pool, image_bytes, publish, task
from support.serving.service_specs import spec_of

from mqmk.daemon.ray_runtime.attach import attach, detach
from mqmk.daemon.ray_runtime.head import ensure_head, stop_head
from mqmk.deploy.serving.http.app import build_api
from mqmk.deploy.serving.inference import Service
from mqmk.deploy.serving.pools.live_pool import LivePool
from mqmk.deploy.serving.telemetry.ray_backend import RayMetrics
from mqmk.deploy.serving.telemetry.recorder import RequestMetrics
from mqmk.matcher.backbone import load_backbone
from mqmk.matcher.images import decode, prepare
from mqmk.matcher.matchers import match_images
from mqmk.matcher.pool import PromptPool
from mqmk.matcher.pool_store import PoolStore
from mqmk.matcher.predictor import PredictSettings, name_answers, predict
from mqmk.matcher.prompted_vit import FrozenViT

TASKS, IMAGES = 10, 200
TURN_SECONDS = 0.2
CALLS, FLUSHED = 60, 50
MAX_OVERHEAD = 0.02

Times = list[list[float]]
"""Seconds of each request, by turn."""


class Switch:
    """RequestMetrics that can be switched off."""

    def __init__(self, metrics: RequestMetrics) -> None:
        self._metrics, self.on = metrics, True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._metrics, name) if self.on else self._nothing

    def count_agreement(self, matcher: str, same: bool) -> None:
        """Passed to another component once, so it is always forwarded."""
        self._metrics.count_agreement(matcher, same)

    def _nothing(self, *_: Any) -> None: ...


def calibrated_pool(vit: FrozenViT) -> PromptPool:
    """Ten tasks of five classes, with the calibration that a replica needs for its metrics."""
    pool = empty_pool(vit)
    for number in range(TASKS):
        labels = tuple(f"class{number}-{place}" for place in range(5))
        pool = pool.with_task(task(f"task{number}", labels, vit, seed=number))
    images = torch.stack([prepare(decode(image_bytes(seed, (28, 28))), vit.info) for seed in range(IMAGES)])
    with torch.inference_mode():
        found = {"cascade": match_images("cascade", vit, pool, images)}
    right = {"cascade": torch.arange(IMAGES) % 5 != 0}
    return calibrate(pool, found, right, "cascade")


class Replica:
    """The measured service, and its request times with and without metrics."""

    def __init__(self, vit: FrozenViT, pools: Path) -> None:
        spec = spec_of(pools, matcher="cascade")
        live_pool = LivePool(PoolStore(pools), vit, PredictSettings("cascade"))
        live_pool.poll()
        self.switch: Any = Switch(RequestMetrics(RayMetrics(), spec))
        self.service = Service(vit, live_pool, spec, metrics=self.switch)
        self.service.export()
        self.app, self.turns = build_api(self.service), {True: Times(), False: Times()}

    async def predict_seconds(self, body: bytes) -> float:
        """Seconds from the request to the end of the response."""
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
        """Send sequential requests for the duration of a turn."""
        self.switch.on = measured
        self.service._agreement._share = self.service.spec.serve.agreement_share if measured else 0.0
        times, end = list[float](), time.monotonic() + TURN_SECONDS
        with self._poll_in_background():
            while time.monotonic() < end:
                times.append(await self.predict_seconds(random.choice(bodies)))
        self.turns[measured].append(times)

    @contextmanager
    def _poll_in_background(self) -> Iterator[None]:
        """Run the thread that polls CURRENT and exports, as in a replica."""
        done = threading.Event()

        def watch() -> None:
            while not done.wait(self.service.spec.watch_seconds):
                self.service.live_pool.poll()
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


def overhead(measured: Times, plain: Times, statistic: Callable[[list[float]], float]) -> tuple[float, float, float]:
    """Relative overhead of metrics in a statistic, with a 95 % interval by bootstrap over turns."""
    rng, places = random.Random(0), range(len(plain))

    def relative_overhead(chosen: Any) -> float:
        with_it, without = ([t for place in chosen for t in side[place]] for side in (measured, plain))
        return statistic(with_it) / statistic(without) - 1

    resampled = sorted(relative_overhead(rng.choices(places, k=len(places))) for _ in range(1000))
    return relative_overhead(places), resampled[25], resampled[974]


async def take_turns(replica: Replica, turns: int) -> None:
    bodies = [image_bytes(seed, (28, 28)) for seed in range(IMAGES)]
    for measured in (True, False):
        await replica.turn(bodies, measured)  # the first turns warm up
        replica.turns[measured].clear()
    for _ in range(turns):
        for measured in random.sample((True, False), 2):
            await replica.turn(bodies, measured)
    replica.switch.on = True


def metric_call_seconds(replica: Replica) -> float:
    """Seconds per request spent in metric calls, without the work of other threads."""
    loaded, metrics = replica.service.live_pool.loaded, replica.service.metrics
    assert loaded is not None
    images = torch.stack([prepare(decode(image_bytes(1, (28, 28))), loaded.pool.backbone)])
    answer = name_answers(loaded.pool, predict(replica.service._vit, loaded.pool, images, PredictSettings("cascade")))[
        0
    ]
    seconds = 0.0
    for _ in range(CALLS):
        began = time.perf_counter()
        for _ in range(FLUSHED):
            metrics.observe_stages(0.001, 0.0, 0.004)
            metrics.observe_batch(1)
            metrics.count_answer(loaded, answer, False)
            metrics.count_request("predict", "200", "cascade", 0.005)
        seconds += time.perf_counter() - began
        metrics._metrics.flush()  # done by another thread in a replica
    return seconds / CALLS / FLUSHED


def measure_both(folder: Path, turns: int) -> tuple[Times, Times]:
    """Request times with and without metrics."""
    torch.set_num_threads(1)
    vit, pools = load_backbone(), folder / "pools"
    publish(pools, calibrated_pool(vit), 1)
    replica = Replica(vit, pools)
    asyncio.run(take_turns(replica, turns))
    print(f"the metric calls of a request take {metric_call_seconds(replica) * 1e6:.0f} µs")
    replica.service.close()
    return replica.turns[True], replica.turns[False]


def print_overhead(name: str, statistic: Callable[[list[float]], float], measured: Times, plain: Times) -> bool:
    """Print the overhead in one statistic; whether it may be below two percent."""
    added, low, high = overhead(measured, plain, statistic)
    with_it, without = ([t for turn in side for t in turn] for side in (measured, plain))
    print(f"{name}: {statistic(without) * 1000:.3f} ms without metrics ({len(without):,} requests), {added:+.2%} with "
          f"({len(with_it):,} requests); 95 % interval {low:+.2%} to {high:+.2%}")  # fmt: skip
    if low < MAX_OVERHEAD < high:
        print(f"    too noisy to tell whether that is below {MAX_OVERHEAD:.0%}")
    return low < MAX_OVERHEAD


def main(turns: int) -> None:
    with tempfile.TemporaryDirectory(prefix="mqmk-overhead-") as name:
        folder = Path(name)
        attach(ensure_head(small_head(folder / "ray")))
        try:
            measured, plain = measure_both(folder, turns)
        finally:
            detach()
            stop_head(folder / "ray")
    within_limit = [
        print_overhead("median", median, measured, plain),
        print_overhead("99th percentile", percentile_99, measured, plain),
    ]
    raise SystemExit(0 if all(within_limit) else "metrics cost a request more than two percent")


if __name__ == "__main__":
    main(int(sys.argv[1]) if sys.argv[1:] else 600)
