"""A complete system: a daemon that learns sketches, traffic, and the Prometheus and Alertmanager that monitor it.

Everything is real and uses the shipped configuration files, with shorter intervals (Prometheus scrapes every two
seconds, Alertmanager does not wait) and free ports.
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

from support.daemons.daemon import class_folders
from support.daemons.running_daemon import RunningDaemon
from support.servers.prometheus import watched, webhook

from mqmk.daemon.ports import free_port
from mqmk.learner.data import sketches
from mqmk.learner.data.pack import pack

DRAWINGS_PER_CLASS = 70  # drawings per class that go into the bucket; the others are traffic
TRAFFIC_DRAWINGS = range(DRAWINGS_PER_CLASS, 100)


@dataclass(frozen=True)
class LabelledDrawing:
    """A drawing that is in no shard, with its task and label."""

    image: bytes
    task: str
    label: str


def labelled_drawings(tasks: Sequence[str]) -> list[LabelledDrawing]:
    """Drawings of these tasks that were not used for training."""
    return [
        LabelledDrawing((class_folders(task, 100) / label / f"{number:03}.png").read_bytes(), task, label)
        for task in tasks
        for label in sketches.TASKS[task]
        for number in TRAFFIC_DRAWINGS
    ]


@dataclass
class Traffic:
    """A client that classifies drawings of the served tasks and sends feedback for some."""

    port: int
    every_seconds: float = 0.05
    tasks: list[str] = field(default_factory=list)
    asked: int = 0
    matched: int = 0
    _stop: threading.Event = field(default_factory=threading.Event)
    _rng: random.Random = field(default_factory=lambda: random.Random(0))

    def __enter__(self) -> "Traffic":
        self._thread = threading.Thread(target=self._run, name="traffic")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        known: dict[str, list[LabelledDrawing]] = {}
        while not self._stop.wait(self.every_seconds):
            if self.tasks:
                task = self._rng.choice(self.tasks)
                if task not in known:
                    known[task] = labelled_drawings([task])
                with suppress(OSError, http.client.HTTPException):  # the service is not up yet, or stopped
                    self._predict(self._rng.choice(known[task]))

    def _predict(self, drawing: LabelledDrawing) -> None:
        status, answer = self.send("/predict", drawing.image, "image/png")
        if status != 200:
            return
        self.asked += 1
        self.matched += answer["task"] == drawing.task
        if self._rng.random() < 0.3:
            self.send("/feedback", json.dumps({"id": answer["id"], "label": drawing.label}).encode())
        if self._rng.random() < 0.02:
            self._send_rare_requests(drawing)

    def _send_rare_requests(self, drawing: LabelledDrawing) -> None:
        """Rarer requests: another matcher, the other protocol, an invalid image, late feedback."""
        self.send("/predict?matcher=mqmk-ei", drawing.image, "image/png")
        self.send("/v2/models/mqmk/infer", b"{}")
        self.send("/predict", b"no image", "image/png")
        self.send("/feedback", b'{"id": "long ago", "label": "owl"}')

    def send(self, path: str, body: bytes, content_type: str = "application/json") -> tuple[int, Any]:
        """Send one request; the status and the JSON body."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request("POST", path, body, {"Content-Type": content_type})
            response = connection.getresponse()
            return response.status, json.loads(response.read() or b"null")
        finally:
            connection.close()


@dataclass(frozen=True)
class System:
    """The running system."""

    daemon: RunningDaemon
    traffic: Traffic
    prometheus: str
    alerts: list[dict[str, Any]]
    """Alerts that Alertmanager sent to the webhook."""
    began: float

    def learn(self, tasks: Sequence[str]) -> None:
        """Drop tasks into the bucket and wait until all are served; each then receives traffic."""
        for task in tasks:
            pack(class_folders(task, DRAWINGS_PER_CLASS), self.daemon.state / "bucket" / "tasks", task)
        self.daemon.wait_for(lambda: self._serves(tasks), 240 + 120 * len(tasks), f"{', '.join(tasks)} to be served")

    def _serves(self, tasks: Sequence[str]) -> bool:
        states = self.daemon.states()
        self.traffic.tasks[:] = [task for task in sketches.TASKS if states.get(task) == "SERVING"]
        return all(states.get(task) == "SERVING" for task in tasks)

    def drop_bad_tasks(self) -> None:
        """Drop a task with a truncated shard and one with random labels."""
        tasks = self.daemon.state / "bucket" / "tasks"
        pack(class_folders("tools", 20), self.daemon.folder / "whole", "torn")
        shard = next((self.daemon.folder / "whole" / "torn").glob("*.tar"))
        shard.write_bytes(shard.read_bytes()[:-3000])
        (self.daemon.folder / "whole" / "torn").rename(tasks / "torn")
        pack(self._random_labels_folder(), tasks, "mixed-up")

    def _random_labels_folder(self) -> Path:
        folder = self.daemon.folder / "mixed up"
        drawings = [drawing.image for drawing in labelled_drawings(["animals"])]
        random.Random(0).shuffle(drawings)
        for number, drawing in enumerate(drawings):
            index = folder / f"kind{number % 5}"
            index.mkdir(parents=True, exist_ok=True)
            (index / f"{number:03}.png").write_bytes(drawing)
        return folder


@contextmanager
def run_system(folder: Path, settings: Mapping[str, str], every_seconds: float = 0.05) -> Iterator[System]:
    """Start the system, without any tasks, and stop it at the end."""
    ports = {"serve.port": str(free_port()), "metrics.port": str(free_port())}
    daemon = RunningDaemon(folder, ports | dict(settings))
    daemon.state.mkdir()
    with webhook() as (url, alerts), watched(folder, daemon.state / "prometheus-targets.json", url) as prometheus:
        daemon.start()
        try:
            with Traffic(int(ports["serve.port"]), every_seconds) as traffic:
                yield System(daemon, traffic, prometheus, alerts, time.time())
        finally:
            daemon.end()
