"""Workers on Ray: as many trainers as resources allow, and beside the state directory a builder and a validator.

A trainer is an actor owned by the daemon: it dies with the daemon, and its task resumes from the last completed epoch.
One thread of an actor runs the job, another reports progress.

Builder and validator reserve no CPU of Ray: they start beside trainers and replicas on any machine, and they are nice.
Neither waits for the other: a large task may be read for hours. The validator lives only as long as there is something
to read.
"""

import os
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mqmk.daemon.config.sections import Config
from mqmk.daemon.errors import WorkerDied
from mqmk.daemon.jobs import (
    Build,
    EpochProgress,
    Failed,
    Finished,
    Job,
    JobContext,
    JobUpdate,
    Learn,
    ProgressUpdate,
    Result,
    Validate,
)
from mqmk.daemon.workers.runner import JobRunner, local_runner
from mqmk.matcher.errors import first_line

NICENESS = 10
"""When CPUs are scarce, requests come before training."""
IDLE_SECONDS: Final = 60.0
"""How long a validator waits for the next task."""


class Worker:
    """The actor: a job runner, and the progress that nobody has fetched yet."""

    def __init__(self) -> None:
        os.nice(max(0, NICENESS - os.nice(0)))
        self._runner: JobRunner | None = None
        self._mailbox: Any = None
        self._progress: list[EpochProgress] = []
        self._lock = threading.Lock()

    def run(self, job: Job, context: JobContext) -> tuple[Result | Exception, list[EpochProgress]]:
        """Run a job; an error is returned, not raised, so that its type survives."""
        try:
            result: Result | Exception = self._run(job, context)
        except Exception as error:
            result = error
        return result, self.take_progress()

    def _run(self, job: Job, context: JobContext) -> Result:
        if not isinstance(job, Learn) or context.config.ray.workers_per_task == 1:
            return self._get_runner(context).run(job, self._put_progress)
        from mqmk.daemon.workers.distributed import Mailbox, train_distributed

        self._mailbox = Mailbox.remote()  # type: ignore[attr-defined]
        with tempfile.TemporaryDirectory(prefix="mqmk-distributed-") as folder:
            return train_distributed(context, job, self._mailbox, folder)

    def take_progress(self) -> list[EpochProgress]:
        """Completed epochs since the last call."""
        if self._mailbox is not None:
            found: list[EpochProgress] = ray.get(self._mailbox.take_progress.remote())
            return found
        with self._lock:
            found, self._progress = self._progress, []
            return found

    def warm_up(self, context: JobContext) -> None:
        """Load the backbone before the first job."""
        _ = self._get_runner(context).vit

    def _get_runner(self, context: JobContext) -> JobRunner:
        with self._lock:
            if self._runner is None:
                self._runner = local_runner(context.apply())
            return self._runner

    def pid(self) -> int:
        """Its process."""
        return os.getpid()

    def _put_progress(self, progress: EpochProgress) -> None:
        with self._lock:
            self._progress = [progress]  # the newest checkpoint includes everything


@dataclass
class _RunningJob:
    job: Job
    worker: Any
    result_ref: Any
    progress_ref: Any = None


@dataclass(frozen=True)
class WarmWorkers:
    """Workers that were started before there is a job."""

    trainers: int
    """How many trainers fit into the cluster."""
    trainer: Any
    builder: Any


@dataclass
class RayWorkers:
    """Jobs on a Ray that this process is attached to."""

    config: Config
    trainers: int
    _running: list[_RunningJob] = field(default_factory=list)
    clock: Callable[[], float] = time.monotonic
    _idle: list[Any] = field(default_factory=list)
    """Trainers without a job."""
    _local: dict[type[Job], Any] = field(default_factory=dict)
    """The builder and the validator, by the jobs that they run."""
    _validated_at: float = 0.0
    _closed: bool = False
    """Ray is gone, or stopping."""

    def warm_up(self) -> WarmWorkers:
        """Start the builder and one trainer before the first task arrives; does not wait for them nor keep them."""
        warm = WarmWorkers(trainers_that_fit(self.config), self._new_trainer(), self._new_local_worker())
        for worker in (warm.trainer, warm.builder):
            worker.warm_up.remote(JobContext.of_this_process(self.config))
        return warm

    def adopt(self, warm: WarmWorkers) -> None:
        """Use these workers; from now on there is capacity for jobs."""
        self.trainers, self._idle, self._closed = warm.trainers, [warm.trainer], False
        self._local = {Build: warm.builder}

    def has_capacity(self, kind: type[Job]) -> bool:
        if self._closed or not ray.is_initialized():  # else the first job would start another Ray, inside this process
            return False
        busy = sum(isinstance(each.job, kind) for each in self._running)
        return busy < (self.trainers if kind is Learn else 1)

    def start(self, job: Job) -> None:
        worker = self._get_trainer() if isinstance(job, Learn) else self._get_local_worker(type(job))
        result_ref = worker.run.remote(job, JobContext.of_this_process(self.config))
        self._running.append(_RunningJob(job, worker, result_ref))

    def _get_trainer(self) -> Any:
        return self._idle.pop() if self._idle else self._new_trainer()

    def _new_trainer(self) -> Any:
        wanted = self.config.ray
        if wanted.workers_per_task > 1:  # it only waits for the training processes, which take the resources
            return self._new_worker(num_cpus=0)
        return self._new_worker(num_cpus=wanted.trainer_cpus, num_gpus=wanted.trainer_gpus)

    def _new_worker(self, **options: Any) -> Any:
        return ray.remote(Worker).options(max_concurrency=2, **options).remote()

    def _get_local_worker(self, kind: type[Job]) -> Any:
        if kind not in self._local:
            self._local[kind] = self._new_local_worker()
        return self._local[kind]

    def _new_local_worker(self) -> Any:
        """On this node, where the state directory is, without waiting for a trainer's CPU."""
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        return self._new_worker(num_cpus=0, scheduling_strategy=here)

    def poll(self) -> list[JobUpdate]:
        updates = [update for running in list(self._running) for update in self._poll_one(running)]
        self._stop_idle_validator()
        return updates

    def _stop_idle_validator(self) -> None:
        """An idle daemon needs its memory for nothing."""
        if any(isinstance(each.job, Validate) for each in self._running):
            self._validated_at = self.clock()
        elif Validate in self._local and self.clock() - self._validated_at > IDLE_SECONDS:
            self._discard(self._local[Validate])

    def _poll_one(self, running: _RunningJob) -> list[JobUpdate]:
        if not _is_ready(running.result_ref):
            return self._poll_progress(running)
        self._running.remove(running)
        job = running.job
        try:
            result, epochs = ray.get(running.result_ref)
        except ray.exceptions.RayError as error:
            self._discard(running.worker)
            return [Failed(job, WorkerDied(f"the worker of {job.name} died: {first_line(error)}"))]
        if isinstance(job, Learn):
            self._idle.append(running.worker)
        progress: list[JobUpdate] = [ProgressUpdate(job, epoch) for epoch in epochs if isinstance(job, Learn)]
        return [*progress, Failed(job, result) if isinstance(result, Exception) else Finished(job, result)]

    def _poll_progress(self, running: _RunningJob) -> list[JobUpdate]:
        """Request progress now and collect it at a later pass: nothing waits for a busy worker."""
        if not isinstance(running.job, Learn):
            return []
        if running.progress_ref is None:
            running.progress_ref = running.worker.take_progress.remote()
        if not _is_ready(running.progress_ref):
            return []
        progress_ref, running.progress_ref = running.progress_ref, None
        try:
            return [ProgressUpdate(running.job, epoch) for epoch in ray.get(progress_ref)]
        except ray.exceptions.RayError:
            return []  # the result will say that the worker died

    def _discard(self, worker: Any) -> None:
        self._local = {kind: each for kind, each in self._local.items() if each is not worker}
        ray.kill(worker)

    def running(self) -> list[Job]:
        return [each.job for each in self._running]

    def cancel(self, job: Job) -> None:
        """Kills its actor, and with it the processes of a distributed training."""
        for running in [each for each in self._running if each.job is job]:
            self._running.remove(running)
            self._discard(running.worker)

    def stop(self) -> None:
        trainers = [each.worker for each in self._running if isinstance(each.job, Learn)]
        for worker in (*trainers, *self._idle, *self._local.values()):
            ray.kill(worker)
        self.forget()

    def forget(self) -> None:
        """Ray is gone, and every worker with it; jobs will be started again."""
        self._running, self._idle, self._local, self._closed = [], [], {}, True


def trainers_that_fit(config: Config) -> int:
    """How many trainers fit into the cluster beside the replicas."""
    if config.ray.trainers is not None:
        return config.ray.trainers
    have: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    wanted, replicas = config.ray, config.serve.most_replicas if config.serve.enabled else 0
    limits = []
    if wanted.trainer_cpus:
        limits.append((have.get("CPU", 1.0) - replicas * config.serve.num_cpus) / wanted.trainer_cpus)
    if wanted.trainer_gpus:
        limits.append((have.get("GPU", 0.0) - replicas * config.serve.num_gpus) / wanted.trainer_gpus)
    return max(1, int(min(limits, default=1) / wanted.workers_per_task))


def _is_ready(reference: Any) -> bool:
    done, _ = ray.wait([reference], timeout=0)
    return bool(done)
