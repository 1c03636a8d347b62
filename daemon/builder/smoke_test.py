"""Smoke test: does a pool load and predict in a fresh process?

`python -m mqmk.daemon.builder.smoke_test` imports what is needed once and then forks for every line on its standard
input: importing takes seconds, a fork milliseconds, and the child has loaded neither backbone nor pool.
"""

import json
import math
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from mqmk.daemon.errors import WorkerDied

TIMEOUT_SECONDS = 120.0
CLOSE_SECONDS = 5.0


class SmokeTest:
    """Starts the forking process on first use, and again if it died."""

    def __init__(self, seconds: float = TIMEOUT_SECONDS) -> None:
        self.seconds = seconds
        self._process: subprocess.Popen[bytes] | None = None

    def find_error(self, store: Path, card: Path, backbone: Mapping[str, Any]) -> str | None:
        """Why the pool of a card fails the test; None if it passes. WorkerDied if there was no result: try again.

        The card may be that of a candidate; its layers are in the store.
        """
        process = self._get_process()
        asked = {"store": str(store), "card": str(card), "backbone": dict(backbone), "seconds": self.seconds}
        request = json.dumps(asked, default=str)
        assert process.stdin and process.stdout
        process.stdin.write(request.encode() + b"\n")
        process.stdin.flush()
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            is_ready = selector.select(self.seconds)
            line = process.stdout.readline() if is_ready else b""
        response = json.loads(line or b"{}")
        if not response:
            self.close()
            what = "died" if is_ready else f"did not answer within {self.seconds:g} s"
            raise WorkerDied(f"the smoke test's process {what}")
        error = response["error"]
        return f"the pool fails the smoke test in a fresh process: {error}" if error else None

    def _get_process(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            command = [sys.executable, "-m", "mqmk.daemon.builder.smoke_test"]
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
            )
        return self._process

    def close(self) -> None:
        """Kill the forking process and its child, which may hang."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                self._process.communicate(timeout=CLOSE_SECONDS)
            self._process = None


def run_smoke_test(request: Mapping[str, Any]) -> str | None:
    """Load backbone and pool as a replica would and classify one image; what is wrong, if anything."""
    import torch

    from mqmk.matcher.backbone import HUB, load_backbone
    from mqmk.matcher.pool_store import PoolStore
    from mqmk.matcher.predictor import name_answers, predict

    backbone = request["backbone"]
    vit = load_backbone(backbone["name"], weights=backbone["weights"] or HUB, sha256=backbone["sha256"],
                        image_size=backbone["image_size"], device=torch.device("cpu"))  # fmt: skip
    store = PoolStore(Path(request["store"]))
    pool = store.assemble(store.parse(Path(request["card"]).read_bytes()), vit.info)
    if not pool.tasks:
        return None
    image = torch.zeros(1, 3, vit.info.image_size, vit.info.image_size)
    (found,) = name_answers(pool, predict(vit, pool, image))
    known = {label for _, label in pool.labels}
    is_plausible = found.label in known and 0 <= found.probability <= 1.0001
    return None if is_plausible else f"it predicts {found.label!r} with probability {found.probability}"


def _run_forked(request: Mapping[str, Any]) -> bytes:
    """`{"error": ...}`, or `{}` if the child died, which may have nothing to do with the pool."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(max(1, math.ceil(request["seconds"])))  # a killed daemon cannot end it
        reason: str | None = "it ended without a result"
        with suppress(BaseException):
            try:
                reason = run_smoke_test(request)
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
        os.write(writing, json.dumps({"error": reason}).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        response = pipe.read()
    os.waitpid(child, 0)
    return response or b"{}"


def main() -> None:
    """Serve requests until standard input is closed."""
    import torch

    from mqmk.matcher import backbone, predictor  # noqa: F401 - imported before the forks

    torch.set_num_threads(1)  # a fork of a process with a thread pool would hang
    for line in sys.stdin:
        print(_run_forked(json.loads(line)).decode(), flush=True)


if __name__ == "__main__":
    main()
