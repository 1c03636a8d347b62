"""Kill the daemon repeatedly while it processes tasks and commands: `python -m programs.crash.run 500`.

The daemon runs in child processes forked after the heavy imports. Each is killed at a failpoint or at a random moment;
the daemon is restarted until it is idle, and the invariants are checked independently of its code.
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
from PIL import Image
from support.daemons.daemon import daemon, small_config
from support.daemons.invariants import pools, problems

from mqmk.daemon import failpoints
from mqmk.daemon.config.sections import Config, Evaluate, Gate, Pools, S3Url
from mqmk.daemon.ledger.ledger import Ledger, State
from mqmk.daemon.registry.mlflow_registry import MlflowRegistry
from mqmk.learner.data.pack import pack
from mqmk.learner.settings import TrainSettings

POOLS_URL = "MQMK_POOLS_URL"
"""If set (`s3://bucket/prefix`, with AWS_... for its server), versions are mirrored to S3 and checked there."""
KEEP = 8
"""`pools.keep`: how many versions stay in the store."""
COMMANDS = ("command.before", "command.pointed", "command.acted", "command.after")
FORGETTING = ("forget.before", "forget.purged")


@dataclass
class CrashStream:
    """One state directory, with its tasks and kills."""

    folder: Path
    seed: int = 0
    kills: int = 0
    runs: int = 0
    failpoints_hit: list[str] = field(default_factory=list)
    tasks: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
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
        """Drop a new task of two synthetic classes."""
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

    def run_daemon(self, crash_at: str | None = None, seconds: float | None = None) -> bool:
        """Run the daemon until it is idle or killed; True if it exited on its own."""
        self.runs += 1
        child = os.fork()
        if child == 0:
            os._exit(self._run_child(crash_at))
        if seconds is not None:
            time.sleep(seconds)
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        self.kills += killed
        if killed and crash_at:
            self.failpoints_hit.append(crash_at.partition(":")[0])
        assert killed or os.waitstatus_to_exitcode(status) == 0, f"the daemon exited with status {status}"
        return not killed

    def _run_child(self, crash_at: str | None) -> int:
        os.environ.pop(failpoints.VARIABLE, None)
        if crash_at:
            os.environ[failpoints.VARIABLE] = crash_at
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
        """Trigger work that reaches the failpoint and crash there."""
        if point in FORGETTING:
            self.enqueue("forget", self._last_task_in(State.HELD if point == "forget.before" else State.PUBLISHED))
        elif point in COMMANDS:
            self.enqueue("rollback", str(max(1, self._latest_version() - 1)))
        elif point.startswith("hold"):
            self.drop(holdout=0.0)
        else:
            self.drop()
        assert not self.run_daemon(crash_at=point), f"{point} was not reached"

    def enqueue(self, kind: str, subject: str) -> None:
        """Enqueue a command as an operator would."""
        ledger = Ledger(self.config.ledger_file)
        ledger.enqueue_command(kind, subject)
        ledger.close()

    def _last_task_in(self, state: State) -> str:
        ledger = Ledger(self.config.ledger_file)
        found = [task.name for task in ledger.tasks(state) if task.name != self.tasks[0]]
        ledger.close()
        return found[-1]

    def _latest_version(self) -> int:
        ledger = Ledger(self.config.ledger_file)
        found = ledger.next_version() - 1
        ledger.close()
        return found

    def kill_at_random(self) -> None:
        """Drop a task, or not, and kill the daemon at a random moment."""
        if self.rng.random() < 0.6:
            self.drop(holdout=self.rng.choice((0.25, 0.25, 0.0)))
        self.run_daemon(seconds=self.rng.uniform(0.02, 1.2))

    def check(self) -> list[str]:
        """Let the daemon finish and check the invariants."""
        for _ in range(3):
            if self.run_daemon():
                break
        return problems(self.config.state.dir, self.folder / "bucket", self.mlflow, KEEP) + self._problems_on_s3()

    def _problems_on_s3(self) -> list[str]:
        """CURRENT on S3 must match the local one, and the version it names must be complete."""
        if not self.config.pools.url:
            return []
        import s3fs

        files = s3fs.S3FileSystem(use_listings_cache=False, skip_instance_cache=True)
        root = f"{self.config.pools.url.removeprefix('s3://')}/pools"
        here = json.loads((self.config.pools_folder / "CURRENT").read_text())
        there = json.loads(files.cat_file(f"{root}/CURRENT"))
        if here != there:
            return [f"CURRENT on S3 is {there}, the local one is {here}"]
        card = f"versions/{here['version']}-{here['digest'][:12]}.json"
        current = pools(self.config.pools_folder)[here["version"]]
        needed = [card, *(f"layers/{page}.json" for page in current["pages"])]
        needed += [f"layers/{layer}.safetensors" for layer in current["prompts"].values()]
        wrong = [name for name in needed
                 if files.cat_file(f"{root}/{name}") != (self.config.pools_folder / name).read_bytes()]  # fmt: skip
        return [f"{name} on S3 differs from the local file" for name in wrong]


def run(kills: int, seed: int = 0, verbose: bool = True) -> CrashStream:
    """Crash at every failpoint, then at random moments, up to that many kills."""
    torch.set_num_threads(1)
    import mlflow  # noqa: F401 - imported before the forks: it takes seconds

    stream = CrashStream(Path(tempfile.mkdtemp(prefix="mqmk-kill-")), seed)
    stream.drop()
    stream.drop(holdout=0.0)
    stream.drop()
    assert stream.run_daemon(), "the first run did not finish"
    skipped = ("upgrade.",) if stream.config.pools.url else ("upgrade.", "mirror.")  # killed there: test_upgrade.py
    points = [point for point in failpoints.POINTS if not point.startswith(skipped)]
    started = time.monotonic()
    while stream.kills < kills:
        if points:
            stream.kill_at(points.pop(0))
        else:
            stream.kill_at_random()
        if stream.kills % 10 == 0 or stream.kills == kills:
            found = stream.check()
            assert not found, found
            if verbose:
                seconds = time.monotonic() - started
                print(f"{stream.kills} kills, {len(stream.tasks)} tasks, {seconds:.0f} s", flush=True)
    found = stream.check()
    assert not found, found
    shutil.rmtree(stream.folder)
    return stream


def main(kills: int, seed: int = 0) -> None:
    """Streams of sixty kills, each with an empty state directory and its own seed."""
    done = tasks = 0
    while done < kills:
        stream = run(min(60, kills - done), seed + done)
        done, tasks = done + stream.kills, tasks + len(stream.tasks)
    print(f"{done} kills over {tasks} tasks: nothing lost, duplicated or inconsistent")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:] or ["500"]))
