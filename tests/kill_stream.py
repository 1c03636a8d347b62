"""A stream of tasks and commands through a daemon that is killed again and again: `python tests/kill_stream.py 500`.

Every life of the daemon is a child of this process, forked after the heavy imports. It is killed at a named crash
point or at a random moment, and started again until nothing is left to do; then an outside checker looks.
"""

import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from daemon_parts import daemon, small_config
from outside_checker import problems
from PIL import Image

from mqmk.daemon import crash_points
from mqmk.daemon.config import Config, Evaluate, Gate, Pools, S3Url
from mqmk.daemon.ledger import Ledger, State
from mqmk.daemon.registry import MlflowRegistry
from mqmk.learner.pack import pack
from mqmk.learner.settings import TrainSettings

POOLS_URL = "MQMK_POOLS_URL"
"""With this variable (`s3://bucket/prefix`, and AWS_... for its server) versions go to S3 and are checked there."""
KEEP = 8
"""So many versions stay in the store: `pools.keep`."""
COMMANDS = ("command.before", "command.pointed", "command.acted", "command.after")
FORGETTING = ("forget.before", "forget.purged")


@dataclass
class KillStream:
    """One state directory, from the first task to the last kill."""

    folder: Path
    seed: int = 0
    kills: int = 0
    lives: int = 0
    hit: list[str] = field(default_factory=list)
    tasks: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.dice = random.Random(self.seed)
        quick = TrainSettings(epochs=2, batch=16, e_length=4, g_length=2)
        self.config: Config = small_config(
            self.folder,
            train=quick,
            gate=Gate(accuracy_floor=0.0, fresh_process=False),
            evaluate=Evaluate(matchers=("mqmk", "mqmk-ei")),
        )
        self.config = replace(self.config, bucket=replace(self.config.bucket, after_learning="tag"))
        self.config = replace(self.config, pools=Pools(keep=KEEP))
        if POOLS_URL in os.environ:
            url = S3Url(f"{os.environ[POOLS_URL]}/{self.folder.name}")
            self.config = replace(self.config, pools=Pools(url, keep=KEEP, cache=self.folder / "cache"))
        self.mlflow = Path(self.config.tracking_uri.removeprefix("sqlite:///"))
        (self.folder / "bucket" / "tasks").mkdir(parents=True)

    def drop(self, *, holdout: float = 0.25) -> str:
        """A new task of two made-up classes."""
        name = f"task{len(self.tasks):03}"
        source = Path(tempfile.mkdtemp(prefix="mqmk-made-"))
        noise = np.random.default_rng([self.seed, len(self.tasks)])
        for label in ("a", "b"):
            (source / f"{name}-{label}").mkdir()
            for number in range(8):
                pixels = noise.integers(0, 256, (28, 28), dtype=np.uint8)
                Image.fromarray(pixels).save(source / f"{name}-{label}" / f"{number}.png")
        pack(source, self.folder / "bucket" / "tasks", name, holdout=holdout)
        shutil.rmtree(source)
        self.tasks.append(name)
        return name

    def live(self, crash_at: str | None = None, seconds: float | None = None) -> bool:
        """One life: True if it ended by itself, with nothing left to do."""
        self.lives += 1
        child = os.fork()
        if child == 0:
            os._exit(self._life(crash_at))
        if seconds is not None:
            time.sleep(seconds)
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        self.kills += killed
        if killed and crash_at:
            self.hit.append(crash_at.partition(":")[0])
        assert killed or os.waitstatus_to_exitcode(status) == 0, f"a life ended with status {status}"
        return not killed

    def _life(self, crash_at: str | None) -> int:
        os.environ.pop(crash_points.VARIABLE, None)
        if crash_at:
            os.environ[crash_points.VARIABLE] = crash_at
        try:
            registry = MlflowRegistry(self.config.tracking_uri, self.config.artifacts_folder)
            parts = daemon(self.config, registry=registry)
            parts.run(200)
            return 0
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            import traceback

            traceback.print_exc()
            return 1

    def kill_at(self, point: str) -> None:
        """Something to do that passes the point, and a death there."""
        if point in FORGETTING:
            self.ask("forget", self._some(State.HELD if point == "forget.before" else State.PUBLISHED))
        elif point in COMMANDS:
            self.ask("rollback", str(max(1, self._latest() - 1)))
        elif point.startswith("hold"):
            self.drop(holdout=0.0)
        else:
            self.drop()
        assert not self.live(crash_at=point), f"nothing passed {point}"

    def ask(self, kind: str, subject: str) -> None:
        """What an operator would type."""
        ledger = Ledger(self.config.ledger_file)
        ledger.ask(kind, subject)
        ledger.close()

    def _some(self, state: State) -> str:
        ledger = Ledger(self.config.ledger_file)
        found = [task.name for task in ledger.tasks(state) if task.name != self.tasks[0]]
        ledger.close()
        return found[-1]

    def _latest(self) -> int:
        ledger = Ledger(self.config.ledger_file)
        found = ledger.next_version() - 1
        ledger.close()
        return found

    def kill_at_random(self) -> None:
        """A task or a command, and a death at any moment."""
        if self.dice.random() < 0.6:
            self.drop(holdout=self.dice.choice((0.25, 0.25, 0.0)))
        self.live(seconds=self.dice.uniform(0.02, 1.2))

    def check(self) -> list[str]:
        """Let it finish, and look."""
        for _ in range(3):
            if self.live():
                break
        return problems(self.config.state.dir, self.folder / "bucket", self.mlflow, KEEP) + self._problems_on_s3()

    def _problems_on_s3(self) -> list[str]:
        """CURRENT there is the one here, and the version that it names is whole."""
        if not self.config.pools.url:
            return []
        import s3fs

        files = s3fs.S3FileSystem(use_listings_cache=False, skip_instance_cache=True)
        root = f"{self.config.pools.url.removeprefix('s3://')}/pools"
        here = json.loads((self.config.pools_folder / "CURRENT").read_text())
        there = json.loads(files.cat_file(f"{root}/CURRENT"))
        if here != there:
            return [f"CURRENT on S3 is {there}, here it is {here}"]
        folder = f"{here['version']}-{here['digest'][:12]}"
        ours = {path.name: path.read_bytes() for path in (self.config.pools_folder / folder).iterdir()}
        wrong = [name for name, data in ours.items() if files.cat_file(f"{root}/{folder}/{name}") != data]
        return [f"{name} of {folder} on S3 is not the one here" for name in wrong]


def run(kills: int, seed: int = 0, say: bool = True) -> KillStream:
    """Every named point, then random moments, until that many kills."""
    torch.set_num_threads(1)
    import mlflow  # noqa: F401 - before the forks: each life would spend seconds on it

    stream = KillStream(Path(tempfile.mkdtemp(prefix="mqmk-kill-")), seed)
    stream.drop()
    stream.drop(holdout=0.0)
    stream.drop()
    assert stream.live(), "the first life did not end by itself"
    points = [point for point in crash_points.POINTS if stream.config.pools.url or not point.startswith("mirror.")]
    begun = time.monotonic()
    while stream.kills < kills:
        if points:
            stream.kill_at(points.pop(0))
        else:
            stream.kill_at_random()
        if stream.kills % 10 == 0 or stream.kills == kills:
            found = stream.check()
            assert not found, found
            if say:
                print(f"{stream.kills} kills, {len(stream.tasks)} tasks, {time.monotonic() - begun:.0f} s", flush=True)
    found = stream.check()
    assert not found, found
    shutil.rmtree(stream.folder)
    return stream


def main(kills: int, seed: int = 0) -> None:
    """Streams of sixty kills, each from an empty state directory and with dice of its own."""
    done = tasks = 0
    while done < kills:
        stream = run(min(60, kills - done), seed + done)
        done, tasks = done + stream.kills, tasks + len(stream.tasks)
    print(f"{done} kills over {tasks} tasks: nothing lost, doubled or out of step")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:] or ["500"]))
