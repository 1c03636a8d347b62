"""Does a pool load and answer where nothing of it is loaded yet? Each question is answered by a process of its own.

`python -m mqmk.daemon.fresh_answer` imports what is needed once and then forks for every line on its standard input:
importing takes seconds, a fork milliseconds, and what is forked has seen neither backbone nor pool.
"""

import json
import os
import selectors
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from mqmk.daemon.errors import WorkerDied

QUESTION_SECONDS = 120.0


class FreshAnswers:
    """The asking side: starts the forking process when it is first needed and again if it died."""

    def __init__(self, seconds: float = QUESTION_SECONDS) -> None:
        self.seconds = seconds
        self._process: subprocess.Popen[bytes] | None = None

    def fault(self, pool: Path, backbone: Mapping[str, Any]) -> str | None:
        """Why the pool does not answer; None if it does. WorkerDied if nothing is known: ask again."""
        process = self._started()
        question = json.dumps({"pool": str(pool), "backbone": dict(backbone)}, default=str)
        assert process.stdin and process.stdout
        process.stdin.write(question.encode() + b"\n")
        process.stdin.flush()
        with selectors.DefaultSelector() as wait:
            wait.register(process.stdout, selectors.EVENT_READ)
            answered = wait.select(self.seconds)
            line = process.stdout.readline() if answered else b""
        said = json.loads(line or b"{}")
        if not said:
            self.close()
            what = "died" if answered else f"did not answer within {self.seconds:g} s"
            raise WorkerDied(f"the fresh process that was to try the pool {what}")
        reason = said["fault"]
        return f"the pool does not answer in a fresh process: {reason}" if reason else None

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            command = [sys.executable, "-m", "mqmk.daemon.fresh_answer"]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        return self._process

    def close(self) -> None:
        """End the forking process; it also ends when its asker does."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def answer(question: Mapping[str, Any]) -> str | None:
    """Load backbone and pool as a replica would and answer one picture; what is wrong, if anything."""
    import torch

    from mqmk.matcher.backbone import HUB, load_backbone
    from mqmk.matcher.pool_files import read_pool
    from mqmk.matcher.predictor import name_answers, predict

    backbone = question["backbone"]
    vit = load_backbone(backbone["name"], weights=backbone["weights"] or HUB, sha256=backbone["sha256"],
                        image_size=backbone["image_size"], device=torch.device("cpu"))  # fmt: skip
    _, pool = read_pool(Path(question["pool"]), vit.info)
    if not pool.tasks:
        return None
    picture = torch.zeros(1, 3, vit.info.image_size, vit.info.image_size)
    (found,) = name_answers(pool, predict(vit, pool, picture))
    known = {label for _, label in pool.labels}
    sensible = found.label in known and 0 <= found.probability <= 1.0001
    return None if sensible else f"it says {found.label!r} with probability {found.probability}"


def _in_a_fork(question: Mapping[str, Any]) -> bytes:
    """`{"fault": ...}`, or `{}` of a process that died, which may have nothing to do with the pool."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        fault: str | None = "it ended without an answer"
        with suppress(BaseException):
            try:
                fault = answer(question)
            except Exception as error:
                fault = f"{type(error).__name__}: {error}"
        os.write(writing, json.dumps({"fault": fault}).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return said or b"{}"


def main() -> None:
    """Answer questions until the asker is gone."""
    import torch

    from mqmk.matcher import backbone, predictor  # noqa: F401 - imported before the forks

    torch.set_num_threads(1)  # a fork of a process with a thread pool would hang
    for line in sys.stdin:
        print(_in_a_fork(json.loads(line)).decode(), flush=True)


if __name__ == "__main__":
    main()
