"""Run the real daemon with serving for hours and look for leaks: `python -m programs.soak.run --hours 2`.

Tasks arrive slowly, older ones are forgotten so that the pool keeps its size, a version is rolled back and promoted
from time to time, and a client sends requests and feedback throughout. Every few seconds memory, file handles, threads,
database sizes and metric series are sampled; at the end their slopes are printed. The run fails if a slope is clearly
above its limit after the warm-up, or if a request failed.
"""

import argparse
import http.client
import json
import random
import shutil
import sqlite3
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from support.daemons.daemon import class_folders
from support.daemons.running_daemon import RunningDaemon
from support.trend import Slope, fit_slope

from mqmk.daemon.ledger.ledger import Ledger
from mqmk.daemon.ports import free_port
from mqmk.learner.data import sketches
from mqmk.learner.data.pack import pack

MIB: Final = 2.0**20
Values = Mapping[str, float]
LIMITS: Final = {"MiB": 24.0, "handles": 6.0, "threads": 6.0, "series": 12.0, "kB per task": 400.0}
"""Growth per hour; databases may grow with every learned task, because they keep a record of each."""


# Measurements


@dataclass(frozen=True)
class Process:
    """One line of the process table."""

    pid: int
    session: int
    title: str


def processes() -> list[Process]:
    """All running processes."""
    found = []
    for folder in Path("/proc").iterdir():
        with suppress(OSError, IndexError, ValueError):
            number = int(folder.name)
            session = int((folder / "stat").read_text().rpartition(")")[2].split()[3])
            found.append(Process(number, session, (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()))
    return found


def process_group(process: Process) -> str:
    """The group of a Ray process."""
    title = process.title
    kinds = {"ray::ServeReplica": "replicas", "ray::ProxyActor": "proxy", "ray::ServeController": "controller"}
    found = next((name for start, name in kinds.items() if title.startswith(start)), None)
    return found or ("trainers" if title.startswith("ray::") else "head")


def process_usage(pid: int) -> dict[str, float]:
    """Proportional memory, handles and threads of a process; empty if it has just exited."""
    folder = Path(f"/proc/{pid}")
    with suppress(OSError, StopIteration):
        pss = next(row for row in (folder / "smaps_rollup").read_text().splitlines() if row.startswith("Pss:"))
        threads = next(row for row in (folder / "status").read_text().splitlines() if row.startswith("Threads:"))
        return {"MiB": int(pss.split()[1]) / 1024, "handles": float(len(list((folder / "fd").iterdir()))),
                "threads": float(threads.split()[1])}  # fmt: skip
    return {}


def count_series(target: str) -> float:
    """Number of series that a metrics endpoint exports."""
    with urllib.request.urlopen(f"http://{target}/metrics", timeout=20) as page:
        return float(sum(bool(line) and not line.startswith(b"#") for line in page.read().splitlines()))


def measure(daemon: RunningDaemon) -> dict[str, float]:
    """One sample of everything, as `what, unit` -> value."""
    assert daemon.process is not None
    head = json.loads((daemon.state / "ray" / "head.json").read_text())["pid"]
    found: Counter[str] = Counter()
    for process in processes():
        group = process_group(process) if process.session == head else ""
        group = "daemon" if process.pid == daemon.process.pid else group
        for unit, value in process_usage(process.pid).items() if group else ():
            found[f"{group}, {unit}"] += value
    for target in json.loads((daemon.state / "prometheus-targets.json").read_text()):
        found[f"{target['labels']['part']}, series"] = count_series(target["targets"][0])
    found["ledger, kB"] = database_size(daemon.state / "ledger.sqlite")
    found["mlflow, kB"] = database_size(daemon.state / "mlflow" / "mlflow.db")
    return dict(found)


def database_size(database: Path) -> float:
    """In kB, counting used pages: the file and its journal grow and shrink in steps."""
    if not database.exists():  # MLflow records follow shortly after the first version
        return 0.0
    with closing(sqlite3.connect(f"{database.absolute().as_uri()}?mode=ro", uri=True, timeout=20)) as db:
        pages, free, page = (
            db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count", "page_size")
        )
    return float((pages - free) * page) / 1000


# Load


def drop_task(bucket: Path, theme: str, name: str, seed: int) -> None:
    """Drop a task of twenty drawings per class, chosen by the seed."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="mqmk-soak-") as folder:
        for label in sketches.TASKS[theme]:
            (Path(folder) / label).mkdir()
            for image in rng.sample(sorted((class_folders(theme, 100) / label).iterdir()), 20):
                shutil.copy(image, Path(folder) / label)
        pack(Path(folder), bucket / "tasks", name, holdout=0.3)


@dataclass
class Traffic:
    """A client that classifies sketches of the served tasks and sends the true label as feedback."""

    port: int
    per_second: float = 4.0
    themes: list[str] = field(default_factory=list)
    answered: int = 0
    failed: list[str] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        """Start sending requests in a background thread."""
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop after the current request."""
        self._stop.set()
        self._thread.join(60)

    def _run(self) -> None:
        rng = random.Random(0)
        while not self._stop.wait(1 / self.per_second):
            theme = rng.choice(self.themes)
            label = rng.choice(sketches.TASKS[theme])
            image = class_folders(theme, 30) / label / f"{rng.randrange(30):03}.png"
            try:
                answer = self._post("/predict", image.read_bytes(), "image/png")
                self._post("/feedback", json.dumps({"id": answer["id"], "label": label}).encode(), "application/json")
                self.answered += 1
            except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
                self.failed.append(f"{time.strftime('%H:%M:%S')} {error!r}")

    def _post(self, path: str, body: bytes, kind: str) -> dict[str, str]:
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)) as line:
            line.request("POST", path, body, {"Content-Type": kind})
            reply = line.getresponse()
            data = reply.read()
            if reply.status != 200:
                raise ValueError(f"{reply.status}: {data[:200]!r}")
            found: dict[str, str] = json.loads(data)
            return found


@dataclass
class TaskChurn:
    """Learns and forgets tasks; at most `max_served` are served, and each has new images."""

    daemon: RunningDaemon
    traffic: Traffic
    max_served: int = 4
    learned: int = 0
    error: BaseException | None = None

    def __post_init__(self) -> None:
        self.ledger = Ledger(self.daemon.state / "ledger.sqlite")
        self.live: list[tuple[str, str]] = []
        self.stopping = threading.Event()

    def run(self, every: float) -> None:
        """Run steps with a pause in between until stopped."""
        try:
            while not self.stopping.wait(every):
                self.step()
        except BaseException as error:
            self.error = error

    def step(self) -> None:
        """Learn one task, every third time roll back and promote, and forget one task."""
        self.learn()
        if self.learned % 3 == 0:
            self._roll_back_and_promote(self.live[-1][0])
        if len(self.live) > self.max_served:
            name, theme = self.live.pop(1)  # the first one trained the g-prompt
            self.traffic.themes.remove(theme)
            self._run_command("forget", name, lambda: self.states[name] == "FORGOTTEN")

    def _roll_back_and_promote(self, name: str) -> None:
        """Roll back to the version before the last task and promote the task again."""
        self._run_command("rollback", str(self.ledger.versions()[-1].parent), lambda: self.states[name] == "HELD")
        self._run_command("promote", name, lambda: self.states[name] == "SERVING")

    def learn(self) -> None:
        """Learn the next theme with a new selection of drawings."""
        free = [theme for theme in sketches.TASKS if theme not in {theme for _, theme in self.live}]
        theme = free[self.learned % len(free)]
        name = f"{theme}-{self.learned}"
        drop_task(self.daemon.state / "bucket", theme, name, seed=self.learned)
        self.learned += 1
        self._wait_until(lambda: self.states.get(name) == "SERVING", f"{name} is served")
        self.live.append((name, theme))
        self.traffic.themes.append(theme)

    @property
    def states(self) -> dict[str, str]:
        return {task.name: str(task.state) for task in self.ledger.tasks()}

    def _run_command(self, kind: str, subject: str, done: Callable[[], bool]) -> None:
        self.ledger.enqueue_command(kind, subject)
        self._wait_until(done, f"{kind} {subject}")

    def _wait_until(self, done: Callable[[], bool], why: str) -> None:
        self.daemon.wait_for(done, 300, why)


# The run


@dataclass(frozen=True)
class Sample:
    """All measurements at one moment."""

    at: float
    learned: int
    values: Values


@dataclass(frozen=True)
class Row:
    """One row of the result table."""

    what: str
    first: float
    last: float
    slope: Slope
    limit: float | None

    @property
    def is_too_steep(self) -> bool:
        return self.limit is not None and self.slope.is_clearly_above(self.limit)

    def __str__(self) -> str:
        limit = "-" if self.limit is None else f"{self.limit:,.0f}"
        mark = "GROWS" if self.is_too_steep else ""
        return (f"{self.what:24} {self.first:10,.1f} {self.last:10,.1f} {self.slope.per_hour:12,.1f} "
                f"± {self.slope.error:9,.1f} {limit:>9} {mark}")  # fmt: skip


def slope_table(samples: list[Sample], warm_up: float) -> list[Row]:
    """The slopes of all measurements after the warm-up."""
    after_warm_up = [sample for sample in samples if sample.at >= warm_up]
    hours = (after_warm_up[-1].at - after_warm_up[0].at) / 3600
    per_hour = (after_warm_up[-1].learned - after_warm_up[0].learned) / hours if hours else 0.0
    rows = []
    for what in sorted({name for sample in after_warm_up for name in sample.values}):
        own = [(sample.at, sample.values[what]) for sample in after_warm_up if what in sample.values]
        times, values = [at for at, _ in own], [value for _, value in own]
        rows.append(Row(what, values[0], values[-1], fit_slope(times, values), allowed_growth(what, per_hour)))
    return rows


def allowed_growth(what: str, tasks_per_hour: float) -> float | None:
    """Allowed growth per hour; None for trainers, which come and go with the tasks."""
    group, _, unit = what.partition(", ")
    if group == "trainers":
        return None
    return LIMITS["kB per task"] * tasks_per_hour if unit == "kB" else LIMITS[unit]


def soak(
    folder: Path, seconds: float, *, every: float, task_seconds: float, warm_up: float
) -> tuple[list[Row], Traffic]:
    """Run for that many seconds and measure."""
    settings = {"serve.port": str(free_port()), "metrics.port": str(free_port()), "train.epochs": "2",
                "gate.accuracy_floor": "0.0", "metrics.task_labels": "6", "ray.num_cpus": "2",
                "bucket.after_learning": "delete"}  # fmt: skip
    daemon = RunningDaemon(folder, settings)
    traffic = Traffic(int(settings["serve.port"]))
    samples: list[Sample] = []
    daemon.start()
    try:
        daemon.wait_for(lambda: (daemon.state / "ledger.sqlite").exists(), 60, "the ledger")
        churn = TaskChurn(daemon, traffic)
        churn.learn()
        traffic.start()
        thread = threading.Thread(target=churn.run, args=(task_seconds,), daemon=True)
        thread.start()
        started = time.monotonic()
        while (now := time.monotonic() - started) < seconds and churn.error is None:
            samples.append(Sample(now, churn.learned, measure(daemon)))
            if len(samples) % 30 == 0:
                progress = (
                    f"{churn.learned} tasks, {traffic.answered:,} images classified, {len(traffic.failed)} failed"
                )
                print(f"after {now / 60:.0f} of {seconds / 60:.0f} minutes: {progress}", flush=True)
            time.sleep(max(0.0, every - (time.monotonic() - started - now)))
        churn.stopping.set()
        thread.join(600)
        traffic.stop()
        if churn.error is not None:
            raise churn.error
    finally:
        daemon.end()
    return slope_table(samples, warm_up), traffic


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hours", type=float, default=2.0)
    parser.add_argument("--every", type=float, default=10.0, help="seconds between two samples")
    parser.add_argument("--task-seconds", type=float, default=60.0, help="seconds between two tasks")
    parser.add_argument(
        "--warm-up", type=float, help="seconds to ignore; by default a third of the run, at most 20 minutes"
    )
    parser.add_argument("--keep", type=Path, help="folder for the state; a temporary one is removed")
    options = parser.parse_args()
    seconds = options.hours * 3600
    warm_up = min(1200.0, seconds / 3) if options.warm_up is None else options.warm_up
    folder = options.keep or Path(tempfile.mkdtemp(prefix="mqmk-soak-"))
    folder.mkdir(parents=True, exist_ok=True)
    rows, traffic = soak(folder, seconds, every=options.every, task_seconds=options.task_seconds, warm_up=warm_up)
    print(f"{'after the warm-up':24} {'first':>10} {'last':>10} {'per hour':>12}   {'error':>9} {'limit':>9}")
    print("\n".join(map(str, rows)))
    print(f"{traffic.answered:,} images classified, {len(traffic.failed)} failed", *traffic.failed[:10], sep="\n  ")
    if not options.keep:
        shutil.rmtree(folder)
    return 1 if traffic.failed or any(row.is_too_steep for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
