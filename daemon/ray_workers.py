"""Workers on Ray: trainers, as many as resources allow, and one builder beside the state directory.

A trainer is an actor that belongs to the daemon: it dies with it, and a task goes on from its last whole epoch. One
thread of an actor does the job, another answers how far it is.
"""

import os
import tempfile
import threading
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mqmk.daemon.config import Config
from mqmk.daemon.errors import WorkerDied
from mqmk.daemon.jobs import Failed, Finished, Job, Learn, News, Progressed, Reported, Result, Tools
from mqmk.daemon.workshop import Workshop, local_workshop

NICENESS = 10
"""Where CPUs are short, requests come before training."""


class Worker:
    """The actor: a workshop, and what it reported that nobody has fetched yet."""

    def __init__(self) -> None:
        os.nice(max(0, NICENESS - os.nice(0)))
        self._workshop: Workshop | None = None
        self._inbox: Any = None
        self._reported: list[Progressed] = []
        self._lock = threading.Lock()

    def do(self, job: Job, tools: Tools) -> tuple[Result | Exception, list[Progressed]]:
        """Do a job; an error is an answer, too, so that it arrives as what it was."""
        try:
            result: Result | Exception = self._done(job, tools)
        except Exception as error:
            result = error
        return result, self.progress()

    def _done(self, job: Job, tools: Tools) -> Result:
        if not isinstance(job, Learn) or tools.config.ray.workers_per_task == 1:
            return self._equipped(tools).do(job, self._report)
        from mqmk.daemon.team_training import Inbox, learn_together

        self._inbox = Inbox.remote()  # type: ignore[attr-defined]
        with tempfile.TemporaryDirectory(prefix="mqmk-team-") as folder:
            return learn_together(tools, job, self._inbox, folder)

    def progress(self) -> list[Progressed]:
        """Whole epochs since this was last asked."""
        if self._inbox is not None:
            found: list[Progressed] = ray.get(self._inbox.progress.remote())
            return found
        with self._lock:
            found, self._reported = self._reported, []
            return found

    def warm(self, tools: Tools) -> None:
        """Load the backbone before there is a job."""
        _ = self._equipped(tools).vit

    def _equipped(self, tools: Tools) -> Workshop:
        with self._lock:
            if self._workshop is None:
                self._workshop = local_workshop(tools.take_up())
            return self._workshop

    def pid(self) -> int:
        """Its process."""
        return os.getpid()

    def _report(self, progress: Progressed) -> None:
        with self._lock:
            self._reported = [progress]  # the newest checkpoint holds everything


@dataclass
class _Busy:
    job: Job
    worker: Any
    answer: Any
    asked: Any = None


@dataclass
class RayWorkers:
    """Jobs on a Ray that this process is attached to."""

    config: Config
    trainers: int
    _busy: list[_Busy] = field(default_factory=list)
    _idle: list[Any] = field(default_factory=list)
    _builder: Any = None
    _closed: bool = False
    """Ray is gone, or going."""

    def warm_up(self) -> None:
        """Start the builder and one trainer before the first task comes; nothing waits for them."""
        self._closed = False
        trainer = self._trainer()
        self._idle.append(trainer)
        for worker in (trainer, self._beside_the_state()):
            worker.warm.remote(Tools.of(self.config))

    def room_for(self, kind: type[Job]) -> bool:
        if self._closed or not ray.is_initialized():  # else the first job would start another Ray, inside this process
            return False
        trains = sum(isinstance(busy.job, Learn) for busy in self._busy)
        return trains < self.trainers if kind is Learn else len(self._busy) == trains

    def start(self, job: Job) -> None:
        worker = self._trainer() if isinstance(job, Learn) else self._beside_the_state()
        self._busy.append(_Busy(job, worker, worker.do.remote(job, Tools.of(self.config))))

    def _trainer(self) -> Any:
        if self._idle:
            return self._idle.pop()
        wanted = self.config.ray
        if wanted.workers_per_task > 1:  # it only waits for its team, whose members take the resources
            return self._worker(num_cpus=0)
        return self._worker(num_cpus=wanted.trainer_cpus, num_gpus=wanted.trainer_gpus)

    def _worker(self, **options: Any) -> Any:
        return ray.remote(Worker).options(max_concurrency=2, **options).remote()

    def _beside_the_state(self) -> Any:
        """Validates and builds: on this node, where the state directory is, and never waiting for a trainer's CPU."""
        if self._builder is None:
            here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
            self._builder = self._worker(num_cpus=0, scheduling_strategy=here)
        return self._builder

    def news(self) -> list[News]:
        found: list[News] = []
        for busy in list(self._busy):
            found += self._heard_from(busy)
        return found

    def _heard_from(self, busy: _Busy) -> list[News]:
        if not _ready(busy.answer):
            return self._progress(busy)
        self._busy.remove(busy)
        try:
            result, reported = ray.get(busy.answer)
        except ray.exceptions.RayError as error:
            self._bury(busy.worker)
            reason = str(error).strip().splitlines()[0]
            return [Failed(busy.job, WorkerDied(f"the worker of {busy.job.name} died: {reason}"))]
        if busy.worker is not self._builder:
            self._idle.append(busy.worker)
        news: list[News] = [Reported(busy.job, each) for each in reported if isinstance(busy.job, Learn)]
        return [*news, Failed(busy.job, result) if isinstance(result, Exception) else Finished(busy.job, result)]

    def _progress(self, busy: _Busy) -> list[News]:
        """Ask now, take the answer at a later pass: nothing waits for a busy worker."""
        if not isinstance(busy.job, Learn):
            return []
        if busy.asked is None:
            busy.asked = busy.worker.progress.remote()
        if not _ready(busy.asked):
            return []
        asked, busy.asked = busy.asked, None
        try:
            return [Reported(busy.job, each) for each in ray.get(asked)]
        except ray.exceptions.RayError:
            return []  # its death is told by its answer

    def _bury(self, worker: Any) -> None:
        if worker is self._builder:
            self._builder = None
        ray.kill(worker)

    def busy(self) -> list[Job]:
        return [busy.job for busy in self._busy]

    def stop(self) -> None:
        workers = [busy.worker for busy in self._busy] + self._idle + ([self._builder] if self._builder else [])
        for worker in workers:
            ray.kill(worker)
        self.forget()

    def forget(self) -> None:
        """Ray is gone, and every worker with it; jobs are given out again."""
        self._busy, self._idle, self._builder, self._closed = [], [], None, True


def trainers_that_fit(config: Config) -> int:
    """How many trainers the cluster has room for beside the replicas."""
    if config.ray.trainers is not None:
        return config.ray.trainers
    have: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    wanted, replicas = config.ray, config.serve.most_replicas if config.serve.enabled else 0
    rooms = []
    if wanted.trainer_cpus:
        rooms.append((have.get("CPU", 1.0) - replicas * config.serve.num_cpus) / wanted.trainer_cpus)
    if wanted.trainer_gpus:
        rooms.append((have.get("GPU", 0.0) - replicas * config.serve.num_gpus) / wanted.trainer_gpus)
    return max(1, int(min(rooms, default=1) / wanted.workers_per_task))


def _ready(reference: Any) -> bool:
    done, _ = ray.wait([reference], timeout=0)
    return bool(done)
