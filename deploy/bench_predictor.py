"""The predictor alone, without HTTP: what a service is measured against. One or several processes.

    python -m mqmk.deploy.bench_predictor POOLS BACKBONE WEIGHTS MATCHER THREADS BATCH FOLDER_OF_PICTURES

Each process says `ready`, then answers a line `SECONDS` with how many pictures a second it named, from their bytes.
"""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from mqmk.deploy.errors import ServeError
from mqmk.matcher.backbone import load_backbone
from mqmk.matcher.images import decode, prepare
from mqmk.matcher.pool_store import PoolStore
from mqmk.matcher.predictor import PredictSettings, name_answers, predict


@dataclass(frozen=True)
class PredictorSettings:
    """What one process computes."""

    pools: Path
    backbone: str
    weights: str
    matcher: str
    pictures: Path

    def command(self, threads: int, batch: int) -> list[str]:
        """How it is started."""
        given = (self.pools, self.backbone, self.weights, self.matcher, threads, batch, self.pictures)
        return [sys.executable, "-m", __name__, *map(str, given)]


class Predictors:
    """Some processes that predict at the same time."""

    def __init__(self, processes: list["subprocess.Popen[str]"]) -> None:
        self._processes = processes

    def rate(self, seconds: float) -> float:
        """Pictures a second of all of them together."""
        for process in self._processes:
            assert process.stdin
            process.stdin.write(f"{seconds}\n")
            process.stdin.flush()
        return sum(float(_said(process)) for process in self._processes)


@contextmanager
def predictors(settings: PredictorSettings, processes: int, threads: int, batch: int) -> Iterator[Predictors]:
    """Start them and wait until they are ready; they end with the block."""
    with ExitStack() as stack:
        found = [
            stack.enter_context(
                subprocess.Popen(
                    settings.command(threads, batch), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
                )
            )
            for _ in range(processes)
        ]  # leaving closes their input, which ends them
        for process in found:
            _said(process)
        yield Predictors(found)


def _said(process: "subprocess.Popen[str]") -> str:
    assert process.stdout
    line = process.stdout.readline()
    if not line:
        raise ServeError("the predictor ended; its error is on standard error")
    return line


def main(pools: str, backbone: str, weights: str, matcher: str, threads: str, batch: str, folder: str) -> None:
    """One process."""
    torch.set_num_threads(int(threads))
    vit, store = load_backbone(backbone, weights=weights), PoolStore(Path(pools))
    pointer = store.current()
    assert pointer is not None
    pool, settings = store.read(pointer, vit.info).to(vit.device), PredictSettings(matcher)
    pictures = [path.read_bytes() for path in sorted(Path(folder).glob("*.jpg"))]

    def answer(data: list[bytes]) -> None:
        images = torch.stack([prepare(decode(each), vit.info) for each in data]).to(vit.device)
        name_answers(pool, predict(vit, pool, images, settings))

    answer(pictures[: int(batch)])
    print("ready", flush=True)
    for line in sys.stdin:
        began, count = time.perf_counter(), 0
        while time.perf_counter() - began < float(line):
            answer([pictures[(count + place) % len(pictures)] for place in range(int(batch))])
            count += int(batch)
        print(count / (time.perf_counter() - began), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
