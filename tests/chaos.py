"""Something random is killed every few seconds while tasks arrive and clients ask: `python tests/chaos.py`.

The real command with two replicas; `kill -9` for the daemon (started again, as systemd would), a trainer, a replica,
the Serve proxy, the Serve controller, the raylet and, in a long run, the GCS. At the end every task is served exactly
once, no answer was wrong, and every failed request is explained by a kill (chaos_account.py), or the run has failed.
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

from chaos_account import Row, explained, silences, table, went_back, windows, wrong_answers
from chaos_clients import Clients, pictures
from chaos_kills import Kill, Kind, Look, look, throws
from outside_checker import problems
from PIL import Image
from ports import free_port
from running_daemon import RunningDaemon

from mqmk.daemon.ray_head import head_processes
from mqmk.deploy.reports import live_reports
from mqmk.learner import sketches
from mqmk.learner.pack import pack

RESTART_SECONDS: Final = 5.0
"""RestartSec of deploy/systemd/mqmk-daemon.service."""
LOOK_SECONDS: Final = 0.25
REPLICAS: Final = 2
MOST_TASKS: Final = len(sketches.CLASSES) // 2
QUIET_SECONDS: Final = 400.0
"""How long the rest may take once nothing is killed any more."""


@dataclass
class Chaos:
    """One run, from an empty state directory to the verdict."""

    folder: Path
    seed: int
    seconds: float
    every: float
    """Seconds between two tasks."""
    kills: list[Kill] = field(default_factory=list)
    missed: int = 0
    """Throws that found nobody of their kind alive."""
    looks: list[Look] = field(default_factory=list)
    versions_seen: list[tuple[str, int | None]] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    starts: int = 0
    troubles: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        settings = {
            "serve.port": str(free_port()), "metrics.port": str(free_port()), "serve.replicas": str(REPLICAS),
            "train.epochs": "2", "gate.accuracy_floor": "0.0",
        }  # fmt: skip
        self.daemon = RunningDaemon(self.folder, settings)
        self.url = f"http://127.0.0.1:{settings['serve.port']}"
        self.clients = Clients(self.url, pictures(sketches.CLASSES[:10]))
        self._dead_since: float | None = None

    # What happens

    def run(self) -> None:
        """Everything up to the moment when all is quiet again."""
        self.drop()
        self._start()
        self._until(self._all_served, QUIET_SECONDS, "the first task is served")
        with self.clients:
            self._pass_time(3.0)
            self._throw()
            self._until(self._quiet, QUIET_SECONDS, "all is quiet after the last kill")
            self._pass_time(3.0)

    def _throw(self) -> None:
        """Every throw hits in the end: one that finds nobody of its kind alive has its turn again after the others.

        Only a trainer is let off once there is nothing left to learn: then nobody starts another one.
        """
        coming = deque(throws(self.seed, self.seconds))
        drop_at = last_hit = time.time()
        while coming:
            throw = coming.popleft()
            if self._kill(throw.kind, throw.which):
                last_hit = time.time()
            elif throw.kind is Kind.TRAINER and len(self.dropped) == MOST_TASKS and self._all_served():
                continue
            elif time.time() - last_hit < QUIET_SECONDS:
                coming.append(throw)
            else:
                raise TimeoutError(
                    f"nobody to kill for {QUIET_SECONDS:g} s; {self._states()}\n{self.daemon.log[-6000:]}"
                )
            next_at = time.time() + throw.pause
            while (now := time.time()) < next_at:
                if now >= drop_at:
                    self.drop()
                    drop_at = now + self.every
                self._turn()

    def drop(self) -> None:
        """Another task of two classes of sketches."""
        number = len(self.dropped)
        if number >= MOST_TASKS:
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
        """Whether anybody was there to be killed."""
        alive = self._look().pids[kind]
        if alive:
            kill = Kill(len(self.kills), kind, time.time(), alive[int(which * len(alive))])
            with suppress(ProcessLookupError):
                os.kill(kill.pid, signal.SIGKILL)
                self.kills.append(kill)
                say(f"{kill.at - self.looks[0].at:6.1f} s  kill {kill.number}: {kind} {kill.pid}")
                return True
        self.missed += 1
        return False

    # What the machine does in the meantime

    def _turn(self) -> None:
        time.sleep(LOOK_SECONDS)
        self._look()
        self._start_again()
        reports = live_reports(self.daemon.state / "replicas")
        self.versions_seen += [(each.replica_id, each.pool_version) for each in reports]

    def _look(self) -> Look:
        process = self.daemon.process
        alive = process.pid if process and process.poll() is None else None
        self.looks.append(look(time.time(), self.daemon.state / "ray", alive))
        return self.looks[-1]

    def _start(self) -> None:
        self.daemon.start()
        self.starts += 1
        self._dead_since = None

    def _start_again(self) -> None:
        """What systemd does."""
        process = self.daemon.process
        assert process is not None
        if process.poll() is None:
            return
        if self._dead_since is None:
            self._dead_since = time.time()
            if process.returncode != -signal.SIGKILL:
                self.troubles.append(f"the daemon ended by itself with {process.returncode}: {self.daemon.log[-2000:]}")
            if len(self.troubles) > 2:
                raise TimeoutError("the daemon ended by itself again and again")
        if time.time() - self._dead_since >= RESTART_SECONDS:
            self._start()

    def _pass_time(self, seconds: float) -> None:
        end = time.time() + seconds
        while time.time() < end:
            self._turn()

    def _until(self, what: Any, seconds: float, why: str) -> None:
        begun = time.time()
        while not what():
            if time.time() - begun > seconds:
                raise TimeoutError(f"not within {seconds:g} s: {why}; {self._states()}\n{self.daemon.log[-6000:]}")
            self._turn()

    # What is true

    def _rows(self, sql: str) -> list[tuple[Any, ...]]:
        with closing(sqlite3.connect(f"file:{self.daemon.state / 'ledger.sqlite'}?mode=ro", uri=True)) as db:
            return db.execute(sql).fetchall()

    def _states(self) -> list[tuple[Any, ...]]:
        with suppress(sqlite3.Error):
            return self._rows("SELECT name, state FROM tasks ORDER BY name")
        return []

    def _all_served(self) -> bool:
        return self._states() == [(name, "SERVING") for name in self.dropped]

    def _quiet(self) -> bool:
        """Everything is served and recorded, everybody is well."""
        if not self._all_served() or self._rows("SELECT 1 FROM versions WHERE recorded = 0"):
            return False
        status = self.daemon.status()
        replicas = status["serving"]["replicas"]
        well = len(replicas) == REPLICAS and all(each["ready"] for each in replicas)
        return well and status["state"] == "running" and not status["serving"]["skew"]

    def verdict(self) -> list[str]:
        """Sentences about what is wrong."""
        found = [*self.troubles]
        state, samples = self.daemon.state, self.clients.samples
        found += problems(state, state / "bucket", state / "mlflow" / "mlflow.db")
        learned = sorted(self._rows("SELECT t.name, v.kind FROM versions v JOIN tasks t ON t.id = v.task"))
        if learned != [(name, "learn") for name in self.dropped]:
            found.append(f"expected one version for each of {self.dropped}, got {learned}")
        served = sorted(task["name"] for task in self._pool()["tasks"])
        if served != self.dropped:
            found.append(f"expected {self.dropped} to be served, got {served}")
        found += wrong_answers(samples, self._cards(), self._serving_since()) + went_back(self.versions_seen)
        _, rest = explained(samples, windows(self.kills, self.looks, samples))
        return found + [f"at {self._clock(each.began)} no kill explains: {each.error}" for each in rest[:20]]

    def _pool(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.url}/pool", timeout=30) as answer:
            found: dict[str, Any] = json.load(answer)
            return found

    def _cards(self) -> dict[int, dict[str, Any]]:
        cards = [json.loads(path.read_text()) for path in (self.daemon.state / "pools").glob("*/pool.json")]
        return {card["version"]: card for card in cards}

    def _serving_since(self) -> dict[int, float]:
        rows = self._rows("SELECT at, detail FROM events WHERE event = 'task.serving' ORDER BY number")
        found: dict[int, float] = {}
        for at, detail in rows:
            found.setdefault(json.loads(detail)["version"], at)
        return found

    def _clock(self, at: float) -> str:
        return f"{at - self.looks[0].at:.1f} s"

    def end(self) -> list[str]:
        """Stop it as an operator would; what is left over?"""
        self.daemon.end()
        left = head_processes(self.daemon.state / "ray")
        return [f"{len(left)} processes are left after `stop`: {left}"] if left else []

    def report(self, found: list[str]) -> dict[str, Any]:
        """Everything that was measured, for --json."""
        samples = self.clients.samples
        own = windows(self.kills, self.looks, samples)
        by_kill, rest = explained(samples, own)
        quiet = silences(self.kills, samples, own)
        return {
            "seed": self.seed, "seconds": self.seconds, "took": self.looks[-1].at - self.looks[0].at,
            "problems": found, "tasks": len(self.dropped), "published_among_kills": self._published_among_kills(),
            "requests": len(samples), "failed": sum(s.error is not None for s in samples), "unexplained": len(rest),
            "daemon_starts": self.starts, "throws_without_a_victim": self.missed,
            "table": [asdict(row) for row in table(self.kills, samples, own)],
            "blameless_silence": max((seconds for kill, seconds in quiet if kill is None), default=0.0),
            "silences": [(kill.number if kill else None, round(seconds, 2)) for kill, seconds in quiet],
            "first_kill": self._first_kill(),
            "kills": [
                {"number": k.number, "kind": k.kind, "at": round(k.at - self.looks[0].at, 2),
                 "failed": len(by_kill.get(k.number, [])),
                 "errors": sorted({str(s.error)[:120] for s in by_kill.get(k.number, [])})} for k in self.kills
            ],
        }  # fmt: skip

    def _published_among_kills(self) -> int:
        """Versions that became current between the first kill and the last."""
        if not self.kills:
            return 0
        return sum(self.kills[0].at < at < self.kills[-1].at for (at,) in self._rows("SELECT created_at FROM versions"))

    def _first_kill(self) -> dict[str, Any]:
        """The daemon, alone: what clients saw from its death until the next kill."""
        if not self.kills:
            return {"kind": "nothing", "requests": 0, "failed": 0}
        first, until = self.kills[0], self.kills[1].at if len(self.kills) > 1 else float("inf")
        seen = [sample for sample in self.clients.samples if sample.ended >= first.at and sample.began < until]
        asked = [sample for sample in seen if sample.ended < until]
        return {"kind": first.kind, "requests": len(asked), "failed": sum(s.error is not None for s in asked)}


def shown(report: dict[str, Any]) -> str:
    """The table as Markdown."""
    lines = ["| killed | kills | failed requests | most for one kill | longest time without an answer, s |",
             "|---|---:|---:|---:|---:|"]  # fmt: skip
    for values in report["table"]:
        row = Row(**values)
        lines.append(f"| {row.kind} | {row.kills} | {row.failed} | {row.most} | {row.silence:.1f} |")
    first = report["first_kill"]
    return "\n".join([
        *lines, "",
        f"seed {report['seed']}, {report['seconds']:g} s, {len(report['kills'])} kills, {report['tasks']} tasks, "
        f"{report['published_among_kills']} published among the kills",
        f"{report['requests']} requests, {report['failed']} failed, {report['unexplained']} of them unexplained",
        f"without a kill to blame: {report['blameless_silence']:.1f} s without an answer",
        f"first kill, alone: {first['kind']}: {first['failed']} of {first['requests']} requests failed",
        *(f"WRONG: {sentence}" for sentence in report["problems"]),
    ])  # fmt: skip


def say(line: str) -> None:
    print(line, flush=True)


def main() -> int:
    """Run, judge, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="how long something is killed every few seconds")
    parser.add_argument("--seed", type=int, default=None, help="of the dice; random unless given")
    parser.add_argument("--every", type=float, default=24.0, help="seconds between two tasks")
    parser.add_argument("--json", type=Path, help="file for everything that was measured")
    parser.add_argument("--keep", action="store_true", help="leave the state directory and the log")
    given = parser.parse_args()
    seed = random.randrange(10**6) if given.seed is None else given.seed
    folder = Path(tempfile.mkdtemp(prefix="mqmk-chaos-"))
    say(f"seed {seed}; state directory and log in {folder}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leave nothing behind then, either
    chaos = Chaos(folder, seed, given.seconds, given.every)
    found: list[str] = []
    try:
        chaos.run()
        found = chaos.verdict()
    except TimeoutError as error:
        found = [*chaos.troubles, str(error)]
    finally:
        found += chaos.end()
    report = chaos.report(found)
    say(shown(report))
    if given.json:
        given.json.write_text(json.dumps(report, indent=2))
    if not found and not given.keep:
        shutil.rmtree(folder)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
