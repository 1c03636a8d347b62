"""A whole system to look at: a daemon that learns sketches, traffic, and the Prometheus and Alertmanager that watch it.

Everything is real and runs as an operator would run it, with the shipped configuration files; only times are shorter
(Prometheus looks every two seconds, Alertmanager waits for nobody) and ports are free ones.
"""

import http.client
import json
import random
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from daemon_parts import class_folders
from ports import free_port
from running_daemon import RunningDaemon
from watching import watched, webhook

from mqmk.learner import sketches
from mqmk.learner.pack import pack

SHARDS = 70  # drawings of each class that go into the bucket; the rest is traffic
QUESTIONS = range(SHARDS, 100)


@dataclass(frozen=True)
class Question:
    """A drawing that is in no shard, and what it shows."""

    picture: bytes
    task: str
    label: str


def questions(tasks: Sequence[str]) -> list[Question]:
    """Drawings of these tasks that nothing was learned from."""
    return [
        Question((class_folders(task, 100) / label / f"{number:03}.png").read_bytes(), task, label)
        for task in tasks
        for label in sketches.TASKS[task]
        for number in QUESTIONS
    ]


@dataclass
class Traffic:
    """Somebody who asks about drawings of the tasks that are served, and says for some what was right."""

    port: int
    every_seconds: float = 0.05
    tasks: list[str] = field(default_factory=list)
    asked: int = 0
    matched: int = 0
    _stop: threading.Event = field(default_factory=threading.Event)
    _dice: random.Random = field(default_factory=lambda: random.Random(0))

    def __enter__(self) -> "Traffic":
        self._thread = threading.Thread(target=self._go, name="traffic")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _go(self) -> None:
        known: dict[str, list[Question]] = {}
        while not self._stop.wait(self.every_seconds):
            if self.tasks:
                task = self._dice.choice(self.tasks)
                if task not in known:
                    known[task] = questions([task])
                with suppress(OSError, http.client.HTTPException):  # nobody answers yet, or any more
                    self._ask(self._dice.choice(known[task]))

    def _ask(self, question: Question) -> None:
        status, answer = self.send("/predict", question.picture, "image/png")
        if status != 200:
            return
        self.asked += 1
        self.matched += answer["task"] == question.task
        if self._dice.random() < 0.3:
            self.send("/feedback", json.dumps({"id": answer["id"], "label": question.label}).encode())
        if self._dice.random() < 0.02:
            self._something_else(question)

    def _something_else(self, question: Question) -> None:
        """What else clients do: another matcher, the other protocol, no picture, feedback that comes too late."""
        self.send("/predict?matcher=mqmk-ei", question.picture, "image/png")
        self.send("/v2/models/mqmk/infer", b"{}")
        self.send("/predict", b"no picture", "image/png")
        self.send("/feedback", b'{"id": "long ago", "label": "owl"}')

    def send(self, path: str, body: bytes, content_type: str = "application/json") -> tuple[int, Any]:
        """One request."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request("POST", path, body, {"Content-Type": content_type})
            response = connection.getresponse()
            return response.status, json.loads(response.read() or b"null")
        finally:
            connection.close()


@dataclass(frozen=True)
class System:
    """What there is to look at."""

    daemon: RunningDaemon
    traffic: Traffic
    prometheus: str
    told: list[dict[str, Any]]
    """Messages of Alertmanager."""
    began: float

    def learn(self, tasks: Sequence[str]) -> None:
        """Drop tasks into the bucket; returns when all of them are served, with traffic for each from then on."""
        for task in tasks:
            pack(class_folders(task, SHARDS), self.daemon.state / "bucket" / "tasks", task)
        self.daemon.wait_for(lambda: self._serves(tasks), 240 + 120 * len(tasks), f"{', '.join(tasks)} to be served")

    def _serves(self, tasks: Sequence[str]) -> bool:
        states = self.daemon.states()
        self.traffic.tasks[:] = [task for task in sketches.TASKS if states.get(task) == "SERVING"]
        return all(states.get(task) == "SERVING" for task in tasks)

    def spoil(self) -> None:
        """Drop a task whose shard was cut off on its way, and one whose labels say nothing."""
        tasks = self.daemon.state / "bucket" / "tasks"
        pack(class_folders("tools", 20), self.daemon.folder / "whole", "torn")
        shard = next((self.daemon.folder / "whole" / "torn").glob("*.tar"))
        shard.write_bytes(shard.read_bytes()[:-3000])
        (self.daemon.folder / "whole" / "torn").rename(tasks / "torn")
        pack(self._mixed_up(), tasks, "mixed-up")

    def _mixed_up(self) -> Path:
        folder = self.daemon.folder / "mixed up"
        drawings = [question.picture for question in questions(["animals"])]
        random.Random(0).shuffle(drawings)
        for number, drawing in enumerate(drawings):
            place = folder / f"kind{number % 5}"
            place.mkdir(parents=True, exist_ok=True)
            (place / f"{number:03}.png").write_bytes(drawing)
        return folder


@contextmanager
def living(folder: Path, settings: Mapping[str, str], every_seconds: float = 0.05) -> Iterator[System]:
    """The whole system, from its start to its end; nothing is learned yet."""
    ports = {"serve.port": str(free_port()), "metrics.port": str(free_port())}
    daemon = RunningDaemon(folder, ports | dict(settings))
    daemon.state.mkdir()
    with webhook() as (url, told), watched(folder, daemon.state / "prometheus-targets.json", url) as prometheus:
        daemon.start()
        try:
            with Traffic(int(ports["serve.port"]), every_seconds) as traffic:
                yield System(daemon, traffic, prometheus, told, time.time())
        finally:
            daemon.end()
