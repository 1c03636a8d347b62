"""How fast the service answers, side by side with the predictor alone and with plain servers: `bench serving`.

Expects `ray.init` to have been called. Every way takes its turn in every round, because a shared machine is faster in
one minute than in the next; a ratio is the median of those within a round. Clients are a process of their own on the
same machine, so what they cost is part of every figure of HTTP.
"""

import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final

from mqmk.deploy import serving
from mqmk.deploy.bench_clients import Asked, ask
from mqmk.deploy.bench_inputs import publish_random_pool, write_pictures
from mqmk.deploy.bench_plain import plain_server
from mqmk.deploy.bench_predictor import PredictorSettings, predictors
from mqmk.deploy.settings import ServeSettings
from mqmk.matcher.backbone import EMBEDDED, load_backbone
from mqmk.matcher.promises import Bar, at_least

FEW, SOME, MANY = 1, 16, 32
"""Clients at once."""
START_SECONDS: Final = 180.0
SERVE, HAPROXY, OUR_API, LINES = "Ray Serve", "Ray Serve, HAProxy", "our API on uvicorn", "a few lines of FastAPI"
WHOLE, EACH = "predictor, one process", "predictor, a process for each core"
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
    port: int = 0
    """Of Ray Serve; 0 takes a free one."""


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

    rows: tuple[Row, ...] = ()
    parts: tuple[PartRow, ...] = ()
    bars: tuple[Bar, ...] = ()
    facts: Mapping[str, float] = field(default_factory=dict)
    """Ratios that nothing was promised about."""

    def with_part(self, other: "ServingReport") -> "ServingReport":
        """Both together."""
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


def measure_serving(
    settings: BenchSettings, folder: Path, parts: Sequence[str], progress: Callable[[str], None]
) -> ServingReport:
    """Measure some of PARTS in `folder`, which is left full; `progress` is told what begins."""
    pictures, settings = folder / "pictures", replace(settings, port=settings.port or _free_port())
    write_pictures(pictures)
    report = ServingReport()
    for part in parts:
        progress(part)
        report = report.with_part(PARTS[part](settings, folder, pictures))
        serving.shutdown()
    return report


def _predictor(settings: BenchSettings, folder: Path, pictures: Path) -> ServingReport:
    name = settings.backbone
    found = _against_the_predictor(settings, _serve_settings(settings, folder, name), pictures)
    promise = f"{name}: {SERVE} at {SOME} clients, of the predictor in one process"
    facts = {
        f"{name}: {SERVE} at {SOME} clients, of a predictor for each core": found.ratio((SERVE, SOME), (EACH, SOME)),
        f"{name}: {SERVE}, {MANY} clients over {FEW}": found.ratio((SERVE, MANY), (SERVE, FEW)),
    }
    bar = at_least(promise, 0.85, found.ratio((SERVE, SOME), (WHOLE, SOME)))
    return ServingReport(tuple(found.rows()), tuple(found.parts()), bars=(bar,), facts=facts)


def _plain(settings: BenchSettings, folder: Path, pictures: Path) -> ServingReport:
    return _beside_plain_servers(settings, _serve_settings(settings, folder, EMBEDDED), pictures, SERVE)


def _haproxy(settings: BenchSettings, folder: Path, pictures: Path) -> ServingReport:
    served = replace(_serve_settings(settings, folder, EMBEDDED), haproxy=True, private=folder)
    return _beside_plain_servers(settings, served, pictures, HAPROXY)


PARTS: Final[Mapping[str, Callable[[BenchSettings, Path, Path], ServingReport]]] = {
    "predictor": _predictor,
    "plain": _plain,
    "haproxy": _haproxy,
}
"""What can be measured: each stands for itself."""


def _beside_plain_servers(settings: BenchSettings, served: ServeSettings, pictures: Path, name: str) -> ServingReport:
    found = _against_plain_servers(settings, served, pictures, name)
    facts = {f"embedded: {name}, {MANY} clients over {FEW}": found.ratio((name, MANY), (name, FEW))}
    for other in (OUR_API, LINES):
        for clients in (FEW, SOME):
            label = f"embedded: {name} at {clients} clients, of {other}"
            facts[label] = found.ratio((name, clients), (other, clients))
    return ServingReport(tuple(found.rows()), tuple(found.parts()), facts=facts)


def _serve_settings(settings: BenchSettings, folder: Path, backbone: str) -> ServeSettings:
    pools = folder / backbone / "pools"
    weights = settings.weights if backbone != EMBEDDED else "hub"
    publish_random_pool(pools, load_backbone(backbone, weights=weights), settings.tasks)
    return ServeSettings(pools, port=settings.port, replicas=settings.cores, backbone=backbone, weights=weights)


def _against_the_predictor(settings: BenchSettings, served: ServeSettings, pictures: Path) -> _Rounds:
    _serve(served)
    alone = PredictorSettings(served.pools, served.backbone, served.weights, served.matcher, pictures)
    with ExitStack() as stack:
        whole = stack.enter_context(predictors(alone, 1, settings.cores, SOME))
        each = stack.enter_context(predictors(alone, settings.cores, 1, SOME // settings.cores))
        ways: dict[tuple[str, int], Turn] = {
            (WHOLE, SOME): partial(whole.rate, settings.seconds),
            (EACH, SOME): partial(each.rate, settings.seconds),
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
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
