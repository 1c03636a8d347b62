"""Speed of the service compared with the bare predictor and with plain servers: `bench serving`.

Expects `ray.init` to have been called. Every way is measured in every round, because the speed of a shared machine
changes; a ratio is the median of the ratios within rounds. Clients are a separate process on the same machine, so their
cost is part of every HTTP figure.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final

from mqmk.daemon.bench.baseline_servers import plain_server
from mqmk.daemon.bench.inputs import publish_random_pool, write_images
from mqmk.daemon.bench.load_client import LoadResult, run_load
from mqmk.daemon.bench.predictor_process import PredictorSettings, predictors
from mqmk.daemon.ports import free_port
from mqmk.deploy.serving import application
from mqmk.deploy.serving.settings import ServeSettings, ServiceSpec
from mqmk.learner.bench.criteria import Criterion, at_least
from mqmk.matcher.backbone import EMBEDDED, load_backbone

FEW, SOME, MANY = 1, 16, 32
"""Concurrent clients."""
START_SECONDS: Final = 180.0
SERVE, HAPROXY, OUR_API, LINES = "Ray Serve", "Ray Serve, HAProxy", "our API on uvicorn", "a few lines of FastAPI"
WHOLE, EACH = "predictor, one process", "predictor, a process for each core"
Turn = Callable[[], float | LoadResult]


@dataclass(frozen=True)
class BenchSettings:
    """What to measure."""

    backbone: str = "deit_tiny_patch16_224"
    weights: str = "random"
    tasks: int = 10
    cores: int = os.cpu_count() or 1
    """Replicas and threads."""
    rounds: int = 3
    seconds: float = 4.0
    """Of one measurement."""
    port: int = 0
    """Of Ray Serve; 0 takes a free one."""


@dataclass(frozen=True)
class Row:
    """The speed of one way to predict."""

    backbone: str
    way: str
    clients: int
    """Concurrent requests; for the predictor, images in all its batches."""
    rate: float
    """Images per second, the median over the rounds."""
    p50_ms: float | None = None
    p99_ms: float | None = None


@dataclass(frozen=True)
class PartRow:
    """Where the time of a request goes with a single client: medians in milliseconds."""

    backbone: str
    way: str
    total: float
    """As the client sees it."""
    decode: float
    queue: float
    match: float
    """The model."""
    answer: float
    """The rest in the replica: reading the request, naming classes, JSON."""
    outside: float
    """Everything outside the replica: the client, HTTP, Serve's proxy."""

    @property
    def beyond_the_model(self) -> float:
        """What the service adds."""
        return self.total - self.match


@dataclass(frozen=True)
class ServingReport:
    """Everything `--json` prints."""

    rows: tuple[Row, ...] = ()
    parts: tuple[PartRow, ...] = ()
    bars: tuple[Criterion, ...] = ()
    facts: Mapping[str, float] = field(default_factory=dict)
    """Ratios without a criterion."""

    def with_part(self, other: "ServingReport") -> "ServingReport":
        """Both reports combined."""
        rounded = {name: round(value, 3) for name, value in other.facts.items()}
        return ServingReport(
            self.rows + other.rows,
            self.parts + other.parts,
            self.bars + other.bars,
            {**self.facts, **rounded},
        )

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


class _Rounds:
    """The results of each way in each round."""

    def __init__(self, backbone: str, ways: Mapping[tuple[str, int], Turn], rounds: int) -> None:
        self._backbone = backbone
        self.found: dict[tuple[str, int], list[float | LoadResult]] = {way: [] for way in ways}
        for _ in range(rounds):
            for way, turn in ways.items():
                self.found[way].append(turn())

    def ratio(self, way: tuple[str, int], other: tuple[str, int]) -> float:
        """Ratio of images per second: the median over rounds."""
        pairs = zip(self.found[way], self.found[other], strict=True)
        return median(_rate(mine) / _rate(theirs) for mine, theirs in pairs)

    def rows(self) -> Iterator[Row]:
        """Medians over the rounds."""
        for (name, clients), seen in self.found.items():
            row = Row(self._backbone, name, clients, round(median(map(_rate, seen)), 1))
            asked = [each for each in seen if isinstance(each, LoadResult)]
            if asked:
                p50, p99 = median(each.p50_ms for each in asked), median(each.p99_ms for each in asked)
                row = replace(row, p50_ms=round(p50, 1), p99_ms=round(p99, 1))
            yield row

    def parts(self) -> Iterator[PartRow]:
        """Of the ways that report timings, with one client."""
        for (name, clients), seen in self.found.items():
            asked = [each for each in seen if isinstance(each, LoadResult) and each.parts_ms]
            if clients == FEW and asked:
                yield _parts(self._backbone, name, asked)


def measure_serving(
    settings: BenchSettings, folder: Path, parts: Sequence[str], progress: Callable[[str], None]
) -> ServingReport:
    """Measure some of PARTS in `folder`, which is not cleaned up; `progress` gets the name of each part."""
    images, settings = folder / "images", replace(settings, port=settings.port or free_port())
    write_images(images)
    report = ServingReport()
    for part in parts:
        progress(part)
        report = report.with_part(PARTS[part](settings, folder, images))
        application.shutdown()
    return report


def _predictor(settings: BenchSettings, folder: Path, images: Path) -> ServingReport:
    name = settings.backbone
    found = _compare_with_predictor(settings, _service_spec(settings, folder, name), images)
    promise = f"{name}: {SERVE} at {SOME} clients, of the predictor in one process"
    facts = {
        f"{name}: {SERVE} at {SOME} clients, of a predictor for each core": found.ratio((SERVE, SOME), (EACH, SOME)),
        f"{name}: {SERVE}, {MANY} clients over {FEW}": found.ratio((SERVE, MANY), (SERVE, FEW)),
    }
    bar = at_least(promise, 0.85, found.ratio((SERVE, SOME), (WHOLE, SOME)))
    return ServingReport(tuple(found.rows()), tuple(found.parts()), bars=(bar,), facts=facts)


def _plain(settings: BenchSettings, folder: Path, images: Path) -> ServingReport:
    return _report_against_plain_servers(settings, _service_spec(settings, folder, EMBEDDED), images, SERVE)


def _haproxy(settings: BenchSettings, folder: Path, images: Path) -> ServingReport:
    served = _service_spec(settings, folder, EMBEDDED)
    served = replace(served, serve=replace(served.serve, haproxy=True), private=folder)
    return _report_against_plain_servers(settings, served, images, HAPROXY)


PARTS: Final[Mapping[str, Callable[[BenchSettings, Path, Path], ServingReport]]] = {
    "predictor": _predictor,
    "plain": _plain,
    "haproxy": _haproxy,
}
"""Independent measurements."""


def _report_against_plain_servers(
    settings: BenchSettings, served: ServiceSpec, images: Path, name: str
) -> ServingReport:
    found = _compare_with_plain_servers(settings, served, images, name)
    facts = {f"embedded: {name}, {MANY} clients over {FEW}": found.ratio((name, MANY), (name, FEW))}
    for other in (OUR_API, LINES):
        for clients in (FEW, SOME):
            label = f"embedded: {name} at {clients} clients, of {other}"
            facts[label] = found.ratio((name, clients), (other, clients))
    return ServingReport(tuple(found.rows()), tuple(found.parts()), facts=facts)


def _service_spec(settings: BenchSettings, folder: Path, backbone: str) -> ServiceSpec:
    pools = folder / backbone / "pools"
    weights = settings.weights if backbone != EMBEDDED else "hub"
    publish_random_pool(pools, load_backbone(backbone, weights=weights), settings.tasks)
    return ServiceSpec(
        pools, ServeSettings(port=settings.port, replicas=settings.cores), backbone=backbone, weights=weights
    )


def _compare_with_predictor(settings: BenchSettings, served: ServiceSpec, images: Path) -> _Rounds:
    _serve(served)
    alone = PredictorSettings(served.pools, served.backbone, served.weights, served.serve.matcher, images)
    with ExitStack() as stack:
        whole = stack.enter_context(predictors(alone, 1, settings.cores, SOME))
        each = stack.enter_context(predictors(alone, settings.cores, 1, SOME // settings.cores))
        ways: dict[tuple[str, int], Turn] = {
            (WHOLE, SOME): partial(whole.rate, settings.seconds),
            (EACH, SOME): partial(each.rate, settings.seconds),
        }
        ways |= _load_turns(SERVE, served.serve.url, (SOME, MANY, FEW), settings, images)
        return _Rounds(served.backbone, ways, settings.rounds)


def _compare_with_plain_servers(settings: BenchSettings, served: ServiceSpec, images: Path, name: str) -> _Rounds:
    _serve(served)
    plain = replace(served, serve=replace(served.serve, haproxy=False), threads=settings.cores, private=None)
    with ExitStack() as stack:
        ways = _load_turns(name, served.serve.url, (SOME, MANY, FEW), settings, images)
        for title, kind in ((OUR_API, "api"), (LINES, "lines")):
            url = stack.enter_context(plain_server(kind, plain))
            ways |= _load_turns(title, url, (SOME, MANY, FEW), settings, images)
        return _Rounds(served.backbone, ways, settings.rounds)


def _serve(spec: ServiceSpec) -> None:
    application.deploy(spec)
    application.wait_until_live(spec, START_SECONDS)
    application.wait_until_ready(spec, spec.serve.replicas, START_SECONDS)


def _load_turns(
    name: str, url: str, clients: Sequence[int], settings: BenchSettings, images: Path
) -> dict[tuple[str, int], Turn]:
    return {(name, count): partial(run_load, url, count, settings.seconds, images) for count in clients}


def _rate(seen: float | LoadResult) -> float:
    return seen.rate if isinstance(seen, LoadResult) else seen


def _parts(backbone: str, way: str, asked: Sequence[LoadResult]) -> PartRow:
    total = median(each.p50_ms for each in asked)
    own = {name: median(each.parts_ms[name] for each in asked) for name in asked[0].parts_ms}
    rest = own["total"] - own["decode"] - own["queue"] - own["match"]
    found = (total, own["decode"], own["queue"], own["match"], rest, total - own["total"])
    return PartRow(backbone, way, *(round(value, 2) for value in found))
