"""The bare predictor without HTTP, as a baseline for the service. One or several processes.

    python -m mqmk.daemon.bench.predictor_process POOLS BACKBONE WEIGHTS MATCHER THREADS BATCH FOLDER_OF_IMAGES

Each process prints `ready`, then answers a line `SECONDS` with the images per second that it predicted, decoding
included.
"""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from mqmk.deploy.serving.errors import ServeError
from mqmk.matcher.backbone import load_backbone
from mqmk.matcher.images import decode, prepare
from mqmk.matcher.pool_store import PoolStore
from mqmk.matcher.predictor import PredictSettings, name_answers, predict


@dataclass(frozen=True)
class PredictorSettings:
    """Settings of one process."""

    pools: Path
    backbone: str
    weights: str
    matcher: str
    images: Path

    def command(self, threads: int, batch: int) -> list[str]:
        """Its command line."""
        given = (self.pools, self.backbone, self.weights, self.matcher, threads, batch, self.images)
        return [sys.executable, "-m", __name__, *map(str, given)]


class Predictors:
    """Processes that predict in parallel."""

    def __init__(self, processes: list["subprocess.Popen[str]"]) -> None:
        self._processes = processes

    def rate(self, seconds: float) -> float:
        """Images per second of all of them together."""
        for process in self._processes:
            assert process.stdin
            process.stdin.write(f"{seconds}\n")
            process.stdin.flush()
        return sum(float(_read_line(process)) for process in self._processes)


@contextmanager
def predictors(settings: PredictorSettings, processes: int, threads: int, batch: int) -> Iterator[Predictors]:
    """Start them and wait until they are ready; they exit with the block."""
    with ExitStack() as stack:
        found = [
            stack.enter_context(
                subprocess.Popen(
                    settings.command(threads, batch), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
                )
            )
            for _ in range(processes)
        ]  # leaving the block closes their input, on which they exit
        for process in found:
            _read_line(process)
        yield Predictors(found)


def _read_line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout
    line = process.stdout.readline()
    if not line:
        raise ServeError("the predictor exited; see its error on standard error")
    return line


def main(pools: str, backbone: str, weights: str, matcher: str, threads: str, batch: str, folder: str) -> None:
    """One process."""
    torch.set_num_threads(int(threads))
    vit, store = load_backbone(backbone, weights=weights), PoolStore(Path(pools))
    pointer = store.current()
    assert pointer is not None
    pool, settings = store.read(pointer, vit.info).to(vit.device), PredictSettings(matcher)
    files = [path.read_bytes() for path in sorted(Path(folder).glob("*.jpg"))]

    def answer(data: list[bytes]) -> None:
        images = torch.stack([prepare(decode(each), vit.info) for each in data]).to(vit.device)
        name_answers(pool, predict(vit, pool, images, settings))

    answer(files[: int(batch)])
    print("ready", flush=True)
    for line in sys.stdin:
        began, count = time.perf_counter(), 0
        while time.perf_counter() - began < float(line):
            answer([files[(count + place) % len(files)] for place in range(int(batch))])
            count += int(batch)
        print(count / (time.perf_counter() - began), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
