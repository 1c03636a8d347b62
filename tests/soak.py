"""Does anything grow? The real daemon, with serving, for hours: `python tests/soak.py --hours 2`.

Tasks come slowly, older ones are forgotten so that the pool stays as it is, a version is rolled back and promoted now
and then, and a client asks and tells the true label all the time. Every few seconds memory, file handles, threads,
databases and metric series are counted; at the end their slopes are printed. One that is clearly above its limit after
the warm-up is a failure, and so is a request that failed.
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

from daemon_parts import class_folders
from ports import free_port
from running_daemon import RunningDaemon
from slopes import Slope, slope

from mqmk.daemon.ledger import Ledger
from mqmk.learner import sketches
from mqmk.learner.pack import pack

MIB: Final = 2.0**20
Values = Mapping[str, float]
LIMITS: Final = {"MiB": 24.0, "handles": 6.0, "threads": 6.0, "series": 12.0, "kB a task": 400.0}
"""An hour; of the databases for every task that was learned, because they remember each for ever."""


# What is measured


@dataclass(frozen=True)
class Process:
    """One line of the process table."""

    pid: int
    session: int
    title: str


def processes() -> list[Process]:
    """All that live."""
    found = []
    for folder in Path("/proc").iterdir():
        with suppress(OSError, IndexError, ValueError):
            number = int(folder.name)
            session = int((folder / "stat").read_text().rpartition(")")[2].split()[3])
            found.append(Process(number, session, (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()))
    return found


def group_of(process: Process) -> str:
    """Who it is, of Ray's processes."""
    title = process.title
    kinds = {"ray::ServeReplica": "replicas", "ray::ProxyActor": "proxy", "ray::ServeController": "controller"}
    found = next((name for start, name in kinds.items() if title.startswith(start)), None)
    return found or ("trainers" if title.startswith("ray::") else "head")


def cost(pid: int) -> dict[str, float]:
    """Proportional memory, handles and threads of a process; nothing if it has just ended."""
    folder = Path(f"/proc/{pid}")
    with suppress(OSError, StopIteration):
        pss = next(row for row in (folder / "smaps_rollup").read_text().splitlines() if row.startswith("Pss:"))
        threads = next(row for row in (folder / "status").read_text().splitlines() if row.startswith("Threads:"))
        return {"MiB": int(pss.split()[1]) / 1024, "handles": float(len(list((folder / "fd").iterdir()))),
                "threads": float(threads.split()[1])}  # fmt: skip
    return {}


def series(target: str) -> float:
    """How many an endpoint shows."""
    with urllib.request.urlopen(f"http://{target}/metrics", timeout=20) as page:
        return float(sum(bool(line) and not line.startswith(b"#") for line in page.read().splitlines()))


def measured(product: RunningDaemon) -> dict[str, float]:
    """Everything at one moment, as `what, unit` -> value."""
    assert product.process is not None
    head = json.loads((product.state / "ray" / "head.json").read_text())["pid"]
    found: Counter[str] = Counter()
    for process in processes():
        group = "daemon" if process.pid == product.process.pid else group_of(process) if process.session == head else ""
        for unit, value in cost(process.pid).items() if group else ():
            found[f"{group}, {unit}"] += value
    for target in json.loads((product.state / "prometheus-targets.json").read_text()):
        found[f"{target['labels']['part']}, series"] = series(target["targets"][0])
    found["ledger, kB"] = size(product.state / "ledger.sqlite")
    found["mlflow, kB"] = size(product.state / "mlflow" / "mlflow.db")
    return dict(found)


def size(database: Path) -> float:
    """In kB, as pages that are in use: the file and its journal grow and shrink in steps."""
    with closing(sqlite3.connect(f"{database.absolute().as_uri()}?mode=ro", uri=True, timeout=20)) as db:
        pages, free, page = (
            db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count", "page_size")
        )
    return float((pages - free) * page) / 1000


# What happens meanwhile


def drop_some(bucket: Path, theme: str, name: str, seed: int) -> None:
    """A task of twenty drawings of each class, other ones for every seed."""
    dice = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="mqmk-soak-") as folder:
        for label in sketches.TASKS[theme]:
            (Path(folder) / label).mkdir()
            for picture in dice.sample(sorted((class_folders(theme, 100) / label).iterdir()), 20):
                shutil.copy(picture, Path(folder) / label)
        pack(Path(folder), bucket / "tasks", name, holdout=0.3)


@dataclass
class Traffic:
    """A client that asks about sketches of the tasks that are served, and tells the true label."""

    port: int
    per_second: float = 4.0
    themes: list[str] = field(default_factory=list)
    answered: int = 0
    failed: list[str] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        """In a thread of its own."""
        self._thread = threading.Thread(target=self._ask_on, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """After the answer that is awaited."""
        self._stop.set()
        self._thread.join(60)

    def _ask_on(self) -> None:
        dice = random.Random(0)
        while not self._stop.wait(1 / self.per_second):
            theme = dice.choice(self.themes)
            label = dice.choice(sketches.TASKS[theme])
            picture = class_folders(theme, 30) / label / f"{dice.randrange(30):03}.png"
            try:
                answer = self._post("/predict", picture.read_bytes(), "image/png")
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
class Life:
    """Tasks that come and go: never more than `most` are served, and each is of new pictures."""

    product: RunningDaemon
    traffic: Traffic
    most: int = 4
    learned: int = 0
    trouble: BaseException | None = None

    def __post_init__(self) -> None:
        self.ledger = Ledger(self.product.state / "ledger.sqlite")
        self.live: list[tuple[str, str]] = []
        self.over = threading.Event()

    def run(self, every: float) -> None:
        """Until it is over, with a pause from step to step."""
        try:
            while not self.over.wait(every):
                self.step()
        except BaseException as error:
            self.trouble = error

    def step(self) -> None:
        """One task more, every third time a version back and forth, and one task less."""
        self.learn()
        if self.learned % 3 == 0:
            self._back_and_forth(self.live[-1][0])
        if len(self.live) > self.most:
            name, theme = self.live.pop(1)  # the first made the g-prompt
            self.traffic.themes.remove(theme)
            self._ask("forget", name, lambda: self.states[name] == "FORGOTTEN")

    def _back_and_forth(self, name: str) -> None:
        """The version before the last task, and the last task again."""
        self._ask("rollback", str(self.ledger.versions()[-1].parent), lambda: self.states[name] == "HELD")
        self._ask("promote", name, lambda: self.states[name] == "SERVING")

    def learn(self) -> None:
        """The next theme, with drawings that were not shown like this before."""
        free = [theme for theme in sketches.TASKS if theme not in {theme for _, theme in self.live}]
        theme = free[self.learned % len(free)]
        name = f"{theme}-{self.learned}"
        drop_some(self.product.state / "bucket", theme, name, seed=self.learned)
        self.learned += 1
        self._until(lambda: self.states.get(name) == "SERVING", f"{name} is served")
        self.live.append((name, theme))
        self.traffic.themes.append(theme)

    @property
    def states(self) -> dict[str, str]:
        return {task.name: str(task.state) for task in self.ledger.tasks()}

    def _ask(self, kind: str, subject: str, done: Callable[[], bool]) -> None:
        self.ledger.ask(kind, subject)
        self._until(done, f"{kind} {subject}")

    def _until(self, done: Callable[[], bool], why: str) -> None:
        self.product.wait_for(done, 300, why)


# The run


@dataclass(frozen=True)
class Sample:
    """One moment."""

    at: float
    learned: int
    values: Values


@dataclass(frozen=True)
class Row:
    """One line of the table."""

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
        verdict = "GROWS" if self.is_too_steep else ""
        return (f"{self.what:24} {self.first:10,.1f} {self.last:10,.1f} {self.slope.per_hour:12,.1f} "
                f"± {self.slope.error:9,.1f} {limit:>9} {verdict}")  # fmt: skip


def table(samples: list[Sample], warm_up: float) -> list[Row]:
    """The slopes of everything that was measured after the warm-up."""
    kept = [sample for sample in samples if sample.at >= warm_up]
    hours = (kept[-1].at - kept[0].at) / 3600
    per_hour = (kept[-1].learned - kept[0].learned) / hours if hours else 0.0
    rows = []
    for what in sorted({name for sample in kept for name in sample.values}):
        own = [(sample.at, sample.values[what]) for sample in kept if what in sample.values]
        times, values = [at for at, _ in own], [value for _, value in own]
        rows.append(Row(what, values[0], values[-1], slope(times, values), limit_of(what, per_hour)))
    return rows


def limit_of(what: str, tasks_per_hour: float) -> float | None:
    """What may be added in an hour; trainers come and go with the tasks."""
    group, _, unit = what.partition(", ")
    if group == "trainers":
        return None
    return LIMITS["kB a task"] * tasks_per_hour if unit == "kB" else LIMITS[unit]


def soak(
    folder: Path, seconds: float, *, every: float, task_seconds: float, warm_up: float
) -> tuple[list[Row], Traffic]:
    """Run for so long and measure."""
    settings = {"serve.port": str(free_port()), "metrics.port": str(free_port()), "train.epochs": "2",
                "gate.accuracy_floor": "0.0", "metrics.task_labels": "6", "ray.num_cpus": "2",
                "bucket.after_learning": "delete"}  # fmt: skip
    product = RunningDaemon(folder, settings)
    traffic = Traffic(int(settings["serve.port"]))
    samples: list[Sample] = []
    product.start()
    try:
        product.wait_for(lambda: (product.state / "ledger.sqlite").exists(), 60, "the ledger")
        life = Life(product, traffic)
        life.learn()
        traffic.start()
        living = threading.Thread(target=life.run, args=(task_seconds,), daemon=True)
        living.start()
        begun = time.monotonic()
        while (now := time.monotonic() - begun) < seconds and life.trouble is None:
            samples.append(Sample(now, life.learned, measured(product)))
            if len(samples) % 30 == 0:
                said = f"{life.learned} tasks, {traffic.answered:,} pictures answered, {len(traffic.failed)} failed"
                print(f"after {now / 60:.0f} of {seconds / 60:.0f} minutes: {said}", flush=True)
            time.sleep(max(0.0, every - (time.monotonic() - begun - now)))
        life.over.set()
        living.join(600)
        traffic.stop()
        if life.trouble is not None:
            raise life.trouble
    finally:
        product.end()
    return table(samples, warm_up), traffic


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hours", type=float, default=2.0)
    parser.add_argument("--every", type=float, default=10.0, help="seconds between two samples")
    parser.add_argument("--task-seconds", type=float, default=60.0, help="seconds between two tasks")
    parser.add_argument(
        "--warm-up", type=float, help="seconds that do not count; a third of the time, at most 20 minutes"
    )
    parser.add_argument("--keep", type=Path, help="a folder for the state; a temporary one is removed")
    given = parser.parse_args()
    seconds = given.hours * 3600
    warm_up = min(1200.0, seconds / 3) if given.warm_up is None else given.warm_up
    folder = given.keep or Path(tempfile.mkdtemp(prefix="mqmk-soak-"))
    folder.mkdir(parents=True, exist_ok=True)
    rows, traffic = soak(folder, seconds, every=given.every, task_seconds=given.task_seconds, warm_up=warm_up)
    print(f"{'after the warm-up':24} {'first':>10} {'last':>10} {'an hour':>12}   {'error':>9} {'limit':>9}")
    print("\n".join(map(str, rows)))
    print(f"{traffic.answered:,} pictures answered, {len(traffic.failed)} failed", *traffic.failed[:10], sep="\n  ")
    if not given.keep:
        shutil.rmtree(folder)
    return 1 if traffic.failed or any(row.is_too_steep for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
