"""Kill a random process every few seconds while tasks arrive and clients send requests: `python -m programs.chaos.run`.

Runs the real command with two replicas and sends `kill -9` to the daemon (restarted as systemd would), a trainer, a
replica, the Serve proxy, the Serve controller, the raylet and, in long runs, the GCS. The run passes if every task is
served exactly once, no answer was wrong, and every failed request is explained by a kill (analysis.py).
"""

import argparse
import json
import os
import random
import shutil
import signal
import sqlite3
import sys
import tempfile
import time
import urllib.request
from collections import deque
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from PIL import Image
from programs.chaos.analysis import (
    Row,
    attribute_failures,
    failure_windows,
    find_gaps,
    find_version_regressions,
    find_wrong_answers,
    summarize_kills,
)
from programs.chaos.clients import Clients, sample_images
from programs.chaos.kills import Kill, Kind, ProcessSnapshot, plan_kills, snapshot_processes
from support.daemons.invariants import pools, problems
from support.daemons.running_daemon import RunningDaemon

from mqmk.daemon.ports import free_port
from mqmk.daemon.ray_runtime.head import head_processes
from mqmk.deploy.serving.telemetry.heartbeat import live_replicas
from mqmk.learner.data import sketches
from mqmk.learner.data.pack import pack

RESTART_SECONDS: Final = 5.0
"""RestartSec of deploy/systemd/mqmk-daemon.service."""
SNAPSHOT_SECONDS: Final = 0.25
REPLICAS: Final = 2
MAX_TASKS: Final = len(sketches.CLASSES) // 2
SETTLE_SECONDS: Final = 400.0
"""How long the system may take to settle after the last kill."""


@dataclass
class Chaos:
    """One run, from an empty state directory to its results."""

    folder: Path
    seed: int
    seconds: float
    every: float
    """Seconds between two tasks."""
    kills: list[Kill] = field(default_factory=list)
    without_target: int = 0
    """Scheduled kills that found no running process of their kind."""
    snapshots: list[ProcessSnapshot] = field(default_factory=list)
    versions_seen: list[tuple[str, int | None]] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    starts: int = 0
    unexpected_exits: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        settings = {
            "serve.port": str(free_port()), "metrics.port": str(free_port()), "serve.replicas": str(REPLICAS),
            "train.epochs": "2", "gate.accuracy_floor": "0.0",
        }  # fmt: skip
        self.daemon = RunningDaemon(self.folder, settings)
        self.url = f"http://127.0.0.1:{settings['serve.port']}"
        self.clients = Clients(self.url, sample_images(sketches.CLASSES[:10]))
        self._dead_since: float | None = None

    # The scenario

    def run(self) -> None:
        """Run the whole scenario until the system has settled again."""
        self.drop()
        self._start()
        self._wait_until(self._all_tasks_served, SETTLE_SECONDS, "the first task is served")
        with self.clients:
            self._wait_seconds(3.0)
            self._inject_kills()
            self._wait_until(self._is_settled, SETTLE_SECONDS, "the system settles after the last kill")
            self._wait_seconds(3.0)

    def _inject_kills(self) -> None:
        """Carry out the schedule; a kill without a running target is retried after the others.

        A trainer is skipped once there is nothing left to learn, because no other one will be started.
        """
        coming = deque(plan_kills(self.seed, self.seconds))
        drop_at = last_hit = time.time()
        while coming:
            planned = coming.popleft()
            if self._kill(planned.kind, planned.which):
                last_hit = time.time()
            elif planned.kind is Kind.TRAINER and len(self.dropped) == MAX_TASKS and self._all_tasks_served():
                continue
            elif time.time() - last_hit < SETTLE_SECONDS:
                coming.append(planned)
            else:
                raise TimeoutError(
                    f"no process to kill for {SETTLE_SECONDS:g} s; {self._states()}\n{self.daemon.log[-6000:]}"
                )
            next_at = time.time() + planned.pause
            while (now := time.time()) < next_at:
                if now >= drop_at:
                    self.drop()
                    drop_at = now + self.every
                self._tick()

    def drop(self) -> None:
        """Drop another task of two sketch classes."""
        number = len(self.dropped)
        if number >= MAX_TASKS:
            return
        name, source = f"pair{number:02}", Path(tempfile.mkdtemp(prefix="mqmk-pair-"))
        for label in sketches.CLASSES[2 * number : 2 * number + 2]:
            (source / label).mkdir()
            for place, drawing in enumerate(sketches.read(label).training[:12]):
                Image.fromarray(drawing).save(source / label / f"{place:02}.png")
        pack(source, self.daemon.state / "bucket" / "tasks", name, holdout=0.3)
        shutil.rmtree(source)
        self.dropped.append(name)

    def _kill(self, kind: Kind, which: float) -> bool:
        """Kill a process of that kind; False if none is running."""
        alive = self._snapshot().pids[kind]
        if alive:
            kill = Kill(len(self.kills), kind, time.time(), alive[int(which * len(alive))])
            with suppress(ProcessLookupError):
                os.kill(kill.pid, signal.SIGKILL)
                self.kills.append(kill)
                log_line(f"{kill.at - self.snapshots[0].at:6.1f} s  kill {kill.number}: {kind} {kill.pid}")
                return True
        self.without_target += 1
        return False

    # Supervision between the kills

    def _tick(self) -> None:
        time.sleep(SNAPSHOT_SECONDS)
        self._snapshot()
        self._restart_if_dead()
        reports = live_replicas(self.daemon.state / "replicas")
        self.versions_seen += [(each.replica_id, each.pool_version) for each in reports]

    def _snapshot(self) -> ProcessSnapshot:
        process = self.daemon.process
        alive = process.pid if process and process.poll() is None else None
        self.snapshots.append(snapshot_processes(time.time(), self.daemon.state / "ray", alive))
        return self.snapshots[-1]

    def _start(self) -> None:
        self.daemon.start()
        self.starts += 1
        self._dead_since = None

    def _restart_if_dead(self) -> None:
        """Restart a dead daemon after a delay, as systemd does."""
        process = self.daemon.process
        assert process is not None
        if process.poll() is None:
            return
        if self._dead_since is None:
            self._dead_since = time.time()
            if process.returncode != -signal.SIGKILL:
                self.unexpected_exits.append(
                    f"the daemon exited unexpectedly with {process.returncode}: {self.daemon.log[-2000:]}"
                )
            if len(self.unexpected_exits) > 2:
                raise TimeoutError("the daemon exited unexpectedly several times")
        if time.time() - self._dead_since >= RESTART_SECONDS:
            self._start()

    def _wait_seconds(self, seconds: float) -> None:
        end = time.time() + seconds
        while time.time() < end:
            self._tick()

    def _wait_until(self, what: Any, seconds: float, why: str) -> None:
        begun = time.time()
        while not what():
            if time.time() - begun > seconds:
                raise TimeoutError(f"not within {seconds:g} s: {why}; {self._states()}\n{self.daemon.log[-6000:]}")
            self._tick()

    # The results

    def _rows(self, sql: str) -> list[tuple[Any, ...]]:
        with closing(sqlite3.connect(f"file:{self.daemon.state / 'ledger.sqlite'}?mode=ro", uri=True)) as db:
            return db.execute(sql).fetchall()

    def _states(self) -> list[tuple[Any, ...]]:
        with suppress(sqlite3.Error):
            return self._rows("SELECT name, state FROM tasks ORDER BY name")
        return []

    def _all_tasks_served(self) -> bool:
        return self._states() == [(name, "SERVING") for name in self.dropped]

    def _is_settled(self) -> bool:
        """Whether every task is served and recorded and all replicas are ready."""
        if not self._all_tasks_served() or self._rows("SELECT 1 FROM versions WHERE recorded = 0"):
            return False
        status = self.daemon.status()
        replicas = status["serving"]["replicas"]
        well = len(replicas) == REPLICAS and all(each["ready"] for each in replicas)
        return well and status["state"] == "running" and not status["serving"]["skew"]

    def find_problems(self) -> list[str]:
        """Describe everything that is wrong; empty if the run passed."""
        found = [*self.unexpected_exits]
        state, records = self.daemon.state, self.clients.records
        found += problems(state, state / "bucket", state / "mlflow" / "mlflow.db")
        learned = sorted(
            self._rows(
                "SELECT t.name, v.kind FROM versions v JOIN version_tasks USING (version) JOIN tasks t ON t.id = task"
            )
        )
        if learned != [(name, "learn") for name in self.dropped]:
            found.append(f"expected one version for each of {self.dropped}, got {learned}")
        served = sorted(task["name"] for task in self._pool()["tasks"])
        if served != self.dropped:
            found.append(f"expected {self.dropped} to be served, got {served}")
        found += find_wrong_answers(records, self._cards(), self._serving_since())
        found += find_version_regressions(self.versions_seen)
        _, rest = attribute_failures(records, failure_windows(self.kills, self.snapshots, records))
        return found + [f"at {self._elapsed(each.began)} no kill explains: {each.error}" for each in rest[:20]]

    def _pool(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.url}/pool?limit=1000", timeout=30) as answer:
            found: dict[str, Any] = json.load(answer)
            return found

    def _cards(self) -> dict[int, dict[str, Any]]:
        return pools(self.daemon.state / "pools")

    def _serving_since(self) -> dict[int, float]:
        rows = self._rows("SELECT at, detail FROM events WHERE event = 'task.rolled_out' ORDER BY number")
        found: dict[int, float] = {}
        for at, detail in rows:
            found.setdefault(json.loads(detail)["version"], at)
        return found

    def _elapsed(self, at: float) -> str:
        return f"{at - self.snapshots[0].at:.1f} s"

    def end(self) -> list[str]:
        """Stop the daemon as an operator would and describe leftover processes."""
        self.daemon.end()
        left = head_processes(self.daemon.state / "ray")
        return [f"{len(left)} processes are left after `stop`: {left}"] if left else []

    def results(self, found: list[str]) -> dict[str, Any]:
        """All measurements, for --json."""
        records = self.clients.records
        windows = failure_windows(self.kills, self.snapshots, records)
        by_kill, rest = attribute_failures(records, windows)
        gaps = find_gaps(self.kills, records, windows)
        return {
            "seed": self.seed, "seconds": self.seconds, "took": self.snapshots[-1].at - self.snapshots[0].at,
            "problems": found, "tasks": len(self.dropped),
            "published_between_kills": self._count_published_between_kills(),
            "requests": len(records), "failed": sum(s.error is not None for s in records), "unexplained": len(rest),
            "daemon_starts": self.starts, "kills_without_target": self.without_target,
            "table": [asdict(row) for row in summarize_kills(self.kills, records, windows)],
            "unattributed_gap": max((seconds for kill, seconds in gaps if kill is None), default=0.0),
            "gaps": [(kill.number if kill else None, round(seconds, 2)) for kill, seconds in gaps],
            "first_kill": self._first_kill(),
            "kills": [
                {"number": k.number, "kind": k.kind, "at": round(k.at - self.snapshots[0].at, 2),
                 "failed": len(by_kill.get(k.number, [])),
                 "errors": sorted({str(s.error)[:120] for s in by_kill.get(k.number, [])})} for k in self.kills
            ],
        }  # fmt: skip

    def _count_published_between_kills(self) -> int:
        """Versions that became current between the first kill and the last."""
        if not self.kills:
            return 0
        return sum(self.kills[0].at < at < self.kills[-1].at for (at,) in self._rows("SELECT created_at FROM versions"))

    def _first_kill(self) -> dict[str, Any]:
        """What clients saw between the first kill, the daemon's, and the second."""
        if not self.kills:
            return {"kind": "nothing", "requests": 0, "failed": 0}
        first, until = self.kills[0], self.kills[1].at if len(self.kills) > 1 else float("inf")
        seen = [record for record in self.clients.records if record.ended >= first.at and record.began < until]
        ended = [record for record in seen if record.ended < until]
        return {"kind": first.kind, "requests": len(ended), "failed": sum(r.error is not None for r in ended)}


def format_results(results: dict[str, Any]) -> str:
    """The results as a Markdown table and a few lines."""
    lines = ["| killed | kills | failed requests | most for one kill | longest gap without an answer, s |",
             "|---|---:|---:|---:|---:|"]  # fmt: skip
    for values in results["table"]:
        row = Row(**values)
        lines.append(f"| {row.kind} | {row.kills} | {row.failed} | {row.max_per_kill} | {row.longest_gap:.1f} |")
    first = results["first_kill"]
    return "\n".join([
        *lines, "",
        f"seed {results['seed']}, {results['seconds']:g} s, {len(results['kills'])} kills, {results['tasks']} tasks, "
        f"{results['published_between_kills']} published between the kills",
        f"{results['requests']} requests, {results['failed']} failed, {results['unexplained']} of them unexplained",
        f"longest gap not attributed to a kill: {results['unattributed_gap']:.1f} s",
        f"first kill, alone: {first['kind']}: {first['failed']} of {first['requests']} requests failed",
        *(f"WRONG: {sentence}" for sentence in results["problems"]),
    ])  # fmt: skip


def log_line(line: str) -> None:
    print(line, flush=True)


def main() -> int:
    """Run the scenario and print the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="duration of the kills")
    parser.add_argument("--seed", type=int, default=None, help="of the schedule; random by default")
    parser.add_argument("--every", type=float, default=24.0, help="seconds between two tasks")
    parser.add_argument("--json", type=Path, help="file for all measurements")
    parser.add_argument("--keep", action="store_true", help="keep the state directory and the log")
    options = parser.parse_args()
    seed = random.randrange(10**6) if options.seed is None else options.seed
    folder = Path(tempfile.mkdtemp(prefix="mqmk-chaos-"))
    log_line(f"seed {seed}; state directory and log in {folder}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # clean up in that case, too
    chaos = Chaos(folder, seed, options.seconds, options.every)
    found: list[str] = []
    try:
        chaos.run()
        found = chaos.find_problems()
    except TimeoutError as error:
        found = [*chaos.unexpected_exits, str(error)]
    finally:
        found += chaos.end()
    results = chaos.results(found)
    log_line(format_results(results))
    if options.json:
        options.json.write_text(json.dumps(results, indent=2))
    if not found and not options.keep:
        shutil.rmtree(folder)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
