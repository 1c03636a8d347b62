"""A daemon at an address of its own, asked far more than it can answer, with replicas that take ten seconds to load a
version: nothing is restarted, and nothing is called SERVING before every replica answers with it.

`make overload-test` runs it (OVERLOAD_TEST=1), five minutes; what it is made of is tested by test_ray_watch,
test_cluster, test_orchestrator and test_application in seconds.
"""

import asyncio
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest
from programs.chaos.clients import sample_images
from support.daemons.daemon import drop
from support.daemons.running_daemon import RunningDaemon

from mqmk.daemon.ledger.ledger import Ledger, State
from mqmk.daemon.ports import free_port
from mqmk.daemon.ray_runtime.head import find_head, head_processes
from mqmk.daemon.ray_runtime.processes import arguments
from mqmk.deploy.serving.telemetry.heartbeat import ReplicaStatus, live_replicas

HOST, SECONDS, CLIENTS, REPLICAS = "127.0.0.2", 180.0, 300, 2
pytestmark = pytest.mark.skipif(
    not os.environ.get("OVERLOAD_TEST"), reason="takes five minutes: `make overload-test` runs it"
)


@dataclass
class Overload(threading.Thread):
    """More clients than the queues have room for, each asking again as soon as it is answered."""

    url: str
    body: bytes
    answers: Counter[str] = field(default_factory=Counter)
    end: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        super().__init__(name="overload")

    __hash__ = threading.Thread.__hash__

    def run(self) -> None:
        asyncio.run(self._ask())

    async def _ask(self) -> None:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=60)) as session:
            await asyncio.gather(*(self._client(session) for _ in range(CLIENTS)))

    async def _client(self, session: aiohttp.ClientSession) -> None:
        while not self.end.is_set():
            try:
                async with session.post(f"{self.url}/predict", data=self.body) as answer:
                    await answer.read()
                    self.answers[str(answer.status)] += 1
            except (aiohttp.ClientError, TimeoutError) as error:
                self.answers[type(error).__name__] += 1


@dataclass
class Seen:
    """What was found, look by look."""

    replicas: list[int] = field(default_factory=list)
    skewed: int = 0
    false_serving: list[str] = field(default_factory=list)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[RunningDaemon]:
    settings = {
        "serve.host": HOST, "serve.port": str(free_port()), "serve.open": "true",
        "serve.replicas": str(REPLICAS), "serve.max_queue": "16",
        "metrics.port": "0", "mlflow.enabled": "false", "train.epochs": "2", "gate.accuracy_floor": "0",
    }  # fmt: skip
    (tmp_path / "loads").mkdir()
    slow = str(Path(__file__).parents[2] / "support" / "slow_loads")
    made = RunningDaemon(tmp_path, settings, {"PYTHONPATH": slow, "SLOW_LOADS": str(tmp_path / "loads")})
    yield made
    made.end()


def reports(daemon: RunningDaemon) -> list[ReplicaStatus]:
    return live_replicas(daemon.state / "replicas")


def parts_of_serve(daemon: RunningDaemon) -> set[tuple[int, str]]:
    """Controller, proxy and replicas."""
    named = ((each.pid, arguments(each.pid)[0]) for each in head_processes(daemon.state / "ray") if arguments(each.pid))
    return {(pid, name) for pid, name in named if "Serve" in name or "Proxy" in name}


def look(daemon: RunningDaemon, ledger: Ledger, seen: Seen) -> None:
    """What is called SERVING first, then who holds what: so nobody can have become quicker in between."""
    served = max(task.version or 0 for task in ledger.tasks(State.SERVING))
    found = [report.pool_version or 0 for report in reports(daemon)]
    seen.replicas.append(len(found))
    seen.skewed += len({*found}) > 1
    if min(found, default=0) < served:
        seen.false_serving.append(f"{served} is said to be served, replicas hold {found}")


@pytest.mark.timeout(900)
def test_three_minutes_of_overload_restart_nothing_and_nothing_is_called_serving_too_early(
    daemon: RunningDaemon, tmp_path: Path
) -> None:
    bucket, seen = daemon.state / "bucket", Seen()
    drop(bucket, "sea", per_class=6)
    daemon.start()
    daemon.wait_for(lambda: daemon.states() == {"sea": "SERVING"}, 240, "the first task is served")
    assert len(reports(daemon)) == REPLICAS and len(parts_of_serve(daemon)) == 2 + REPLICAS
    head, running = find_head(daemon.state / "ray"), parts_of_serve(daemon)
    overload = Overload(f"http://{HOST}:{daemon.settings['serve.port']}", sample_images(["crab"])["crab"])
    overload.start()
    ledger = Ledger(daemon.state / "ledger.sqlite")
    try:
        begun = time.monotonic()
        drop(bucket, "birds", per_class=6)
        while time.monotonic() - begun < SECONDS:
            look(daemon, ledger, seen)
            time.sleep(0.25)
        daemon.wait_for(lambda: daemon.states() == {"sea": "SERVING", "birds": "SERVING"}, 120, "both are served")
        assert {report.pool_version for report in reports(daemon)} == {2}
    finally:
        overload.end.set()
        overload.join()
        ledger.close()
    looks = f"{len(seen.replicas)} looks, {seen.skewed} of them saw two versions"
    print(f"\n{dict(overload.answers)} in {SECONDS:g} s; {looks}; live replicas {dict(Counter(seen.replicas))}")
    assert overload.answers["429"] > 0, "it was not too much"
    assert seen.skewed > 0, "nobody saw one replica load for ten seconds"
    assert seen.false_serving == []
    assert {*seen.replicas} == {REPLICAS}
    assert find_head(daemon.state / "ray") == head and parts_of_serve(daemon) == running
    for told in ("restarting", "cannot connect to Ray", "redeploying"):
        assert told not in daemon.log
    assert sorted(path.name for path in (tmp_path / "loads").iterdir()) == ["1", "2"]
