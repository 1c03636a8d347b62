"""How fast the service answers, side by side with the predictor alone and with plain servers: `bench serving`.

Expects `ray.init` to have been called. Every way takes its turn in every round, because a shared machine is faster in
one minute than in the next; a ratio is the median of those within a round. Clients are a process of their own on the
same machine, so what they cost is part of every figure of HTTP.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final

from mqmk.deploy import serving
from mqmk.deploy.bench_batching import BatchingRow, measure_batching
from mqmk.deploy.bench_clients import Asked, ask
from mqmk.deploy.bench_inputs import publish_random_pool, write_pictures
from mqmk.deploy.bench_plain import plain_server
from mqmk.deploy.bench_predictor import PredictorSettings, predictors
from mqmk.deploy.settings import ServeSettings
from mqmk.matcher.backbone import EMBEDDED, load_backbone
from mqmk.matcher.predictor import PredictSettings, choose_matcher
from mqmk.matcher.promises import Bar, at_least

FEW, SOME, MANY = 1, 16, 32
"""Clients at once."""
START_SECONDS: Final = 180.0
SERVE, HAPROXY, OUR_API, LINES = "Ray Serve", "Ray Serve, HAProxy", "our API on uvicorn", "a few lines of FastAPI"
ONE_PROCESS, PROCESSES = "predictor, one process", "predictor, a process for each core"
Turn = Callable[[], float | Asked]


@dataclass(frozen=True)
class BenchSettings:
    """What is measured."""

    backbone: str = "deit_tiny_patch16_224"
    weights: str = "random"
    tasks: int = 10
    cores: int = os.cpu_count() or 1
    """Replicas and threads."""
    rounds: int = 3
    seconds: float = 4.0
    """Of one turn."""


@dataclass(frozen=True)
class Row:
    """One way to get answers."""

    backbone: str
    way: str
    clients: int
    """Requests at once; for the predictor, pictures in all its batches."""
    rate: float
    """Pictures a second, the median over the rounds."""
    p50_ms: float | None = None
    p99_ms: float | None = None


@dataclass(frozen=True)
class PartRow:
    """Where the time of a request goes when nobody else asks: medians in milliseconds."""

    backbone: str
    way: str
    total: float
    """As the client sees it."""
    decode: float
    queue: float
    match: float
    """The model."""
    answer: float
    """The rest within the replica: reading the request, naming classes, JSON."""
    outside: float
    """Everything before and after the replica: the client, HTTP, Serve's proxy."""

    @property
    def beyond_the_model(self) -> float:
        """What the service adds."""
        return self.total - self.match


@dataclass(frozen=True)
class ServingReport:
    """Everything `--json` prints."""

    rows: tuple[Row, ...]
    parts: tuple[PartRow, ...]
    batching: tuple[BatchingRow, ...]
    bars: tuple[Bar, ...]
    facts: dict[str, float]
    """Ratios that nothing was promised about."""

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


class _Rounds:
    """What each way gave in each round."""

    def __init__(self, backbone: str, ways: Mapping[tuple[str, int], Turn], rounds: int) -> None:
        self._backbone = backbone
        self.found: dict[tuple[str, int], list[float | Asked]] = {way: [] for way in ways}
        for _ in range(rounds):
            for way, turn in ways.items():
                self.found[way].append(turn())

    def ratio(self, way: tuple[str, int], other: tuple[str, int]) -> float:
        """How many times as many pictures a second: the median over rounds."""
        pairs = zip(self.found[way], self.found[other], strict=True)
        return median(_rate(mine) / _rate(theirs) for mine, theirs in pairs)

    def rows(self) -> Iterator[Row]:
        """Medians over the rounds."""
        for (name, clients), seen in self.found.items():
            row = Row(self._backbone, name, clients, round(median(map(_rate, seen)), 1))
            asked = [each for each in seen if isinstance(each, Asked)]
            if asked:
                p50, p99 = median(each.p50_ms for each in asked), median(each.p99_ms for each in asked)
                row = replace(row, p50_ms=round(p50, 1), p99_ms=round(p99, 1))
            yield row

    def parts(self) -> Iterator[PartRow]:
        """Of the ways that say where the time goes, with one client."""
        for (name, clients), seen in self.found.items():
            asked = [each for each in seen if isinstance(each, Asked) and each.parts_ms]
            if clients == FEW and asked:
                yield _parts(self._backbone, name, asked)


def measure_serving(settings: BenchSettings, folder: Path, progress: Callable[[str], None]) -> ServingReport:
    """Measure everything in `folder`, which is left full; `progress` is told what begins."""
    pictures = folder / "pictures"
    write_pictures(pictures)
    progress(f"{settings.backbone}: the predictor and Ray Serve")
    large = _against_the_predictor(settings, _serve_settings(settings, folder, settings.backbone), pictures)
    progress("embedded: Ray Serve and plain servers")
    ours = _serve_settings(settings, folder, EMBEDDED)
    small = _against_plain_servers(settings, ours, pictures, SERVE)
    progress("embedded: Ray Serve behind HAProxy and plain servers")
    serving.shutdown()
    private = replace(ours, haproxy=True, private=folder)
    fronted = _against_plain_servers(settings, private, pictures, HAPROXY)
    serving.shutdown()
    progress("embedded: our batcher and serve.batch")
    batching = _batching(settings, ours)
    rows = (*large.rows(), *small.rows(), *(row for row in fronted.rows() if row.way == HAPROXY))
    parts = (*large.parts(), *small.parts(), *(row for row in fronted.parts() if row.way == HAPROXY))
    facts = {
        f"{settings.backbone}: {SERVE} over {PROCESSES}": large.ratio((SERVE, SOME), (PROCESSES, SOME)),
        f"{settings.backbone}: {SERVE}, {MANY} clients over {FEW}": large.ratio((SERVE, MANY), (SERVE, FEW)),
        f"embedded: {SERVE}, {MANY} clients over {FEW}": small.ratio((SERVE, MANY), (SERVE, FEW)),
        f"embedded: {SERVE} over {OUR_API}": small.ratio((SERVE, SOME), (OUR_API, SOME)),
        f"embedded: {SERVE} over {LINES}": small.ratio((SERVE, SOME), (LINES, SOME)),
        f"embedded: {HAPROXY} over {OUR_API}": fronted.ratio((HAPROXY, SOME), (OUR_API, SOME)),
        f"embedded: {HAPROXY} over {LINES}": fronted.ratio((HAPROXY, SOME), (LINES, SOME)),
    }
    promise = f"{settings.backbone}: {SERVE} at {SOME} clients, of the predictor in one process"
    bars = (at_least(promise, 0.85, large.ratio((SERVE, SOME), (ONE_PROCESS, SOME))),)
    return ServingReport(rows, parts, tuple(batching), bars, {name: round(value, 3) for name, value in facts.items()})


def _serve_settings(settings: BenchSettings, folder: Path, backbone: str) -> ServeSettings:
    pools = folder / backbone / "pools"
    weights = settings.weights if backbone != EMBEDDED else "hub"
    publish_random_pool(pools, load_backbone(backbone, weights=weights), settings.tasks)
    return ServeSettings(pools, port=_free_port(), replicas=settings.cores, backbone=backbone, weights=weights)


def _against_the_predictor(settings: BenchSettings, served: ServeSettings, pictures: Path) -> _Rounds:
    _serve(served)
    alone = PredictorSettings(served.pools, served.backbone, served.weights, served.matcher, pictures)
    with ExitStack() as stack:
        whole = stack.enter_context(predictors(alone, 1, settings.cores, SOME))
        each = stack.enter_context(predictors(alone, settings.cores, 1, SOME // settings.cores))
        ways: dict[tuple[str, int], Turn] = {
            (ONE_PROCESS, SOME): partial(whole.rate, settings.seconds),
            (PROCESSES, SOME): partial(each.rate, settings.seconds),
        }
        ways |= _asking(SERVE, served.url, (SOME, MANY, FEW), settings, pictures)
        return _Rounds(served.backbone, ways, settings.rounds)


def _against_plain_servers(settings: BenchSettings, served: ServeSettings, pictures: Path, name: str) -> _Rounds:
    _serve(served)
    plain = replace(served, threads=settings.cores, haproxy=False, private=None)
    with ExitStack() as stack:
        ways = _asking(name, served.url, (SOME, MANY, FEW), settings, pictures)
        for title, kind in ((OUR_API, "api"), (LINES, "lines")):
            url = stack.enter_context(plain_server(kind, plain))
            ways |= _asking(title, url, (SOME, MANY, FEW), settings, pictures)
        return _Rounds(served.backbone, ways, settings.rounds)


def _batching(settings: BenchSettings, served: ServeSettings) -> list[BatchingRow]:
    vit = load_backbone(served.backbone)
    pool = publish_random_pool(served.pools, vit, settings.tasks)
    matcher = choose_matcher(pool, served.budget, PredictSettings().match.shortlist)
    seconds = settings.seconds / 2
    return measure_batching(vit, pool, PredictSettings(matcher), (FEW, MANY), settings.rounds, seconds)


def _serve(settings: ServeSettings) -> None:
    serving.deploy(settings)
    serving.wait_until_live(settings, START_SECONDS)
    serving.wait_until_ready(settings, settings.replicas, START_SECONDS)


def _asking(
    name: str, url: str, clients: Sequence[int], settings: BenchSettings, pictures: Path
) -> dict[tuple[str, int], Turn]:
    return {(name, count): partial(ask, url, count, settings.seconds, pictures) for count in clients}


def _rate(seen: float | Asked) -> float:
    return seen.rate if isinstance(seen, Asked) else seen


def _parts(backbone: str, way: str, asked: Sequence[Asked]) -> PartRow:
    total = median(each.p50_ms for each in asked)
    own = {name: median(each.parts_ms[name] for each in asked) for name in asked[0].parts_ms}
    rest = own["total"] - own["decode"] - own["queue"] - own["match"]
    found = (total, own["decode"], own["queue"], own["match"], rest, total - own["total"])
    return PartRow(backbone, way, *(round(value, 2) for value in found))


def _free_port() -> int:
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
