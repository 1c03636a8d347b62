"""Distributed training of one task by several processes, through Ray Train: `ray.workers_per_task` above 1."""

from typing import Any

import ray
import torch
from ray.train import RunConfig, ScalingConfig, get_context
from ray.train.torch import TorchConfig, TorchTrainer

from mqmk.daemon.jobs import EpochProgress, JobContext, Learn, Learned
from mqmk.daemon.workers.runner import local_runner
from mqmk.learner.training.process_group import ProcessGroup


@ray.remote(num_cpus=0)
class Mailbox:
    """Where the training processes get their job, and the first of them puts its progress and its result."""

    def __init__(self) -> None:
        self._job: tuple[JobContext, Learn] | None = None
        self._progress: list[EpochProgress] = []
        self._result: Learned | None = None

    def put_job(self, context: JobContext, job: Learn) -> None:
        """Store the job: as an argument, Ray Train would write it into its records."""
        self._job = context, job

    def get_job(self) -> tuple[JobContext, Learn] | None:
        """The job."""
        return self._job

    def put_progress(self, progress: EpochProgress) -> None:
        """Store the newest epoch."""
        self._progress = [progress]

    def take_progress(self) -> list[EpochProgress]:
        """Epochs since the last call."""
        found, self._progress = self._progress, []
        return found

    def put_result(self, result: Learned) -> None:
        """Store the result."""
        self._result = result

    def get_result(self) -> Learned | None:
        """The result."""
        return self._result


def train_distributed(context: JobContext, job: Learn, mailbox: Any, storage: str) -> Learned:
    """Start the training processes, wait for them, and return the result of the first."""
    ray.get(mailbox.put_job.remote(context, job))
    wanted = context.config.ray
    resources = {"CPU": wanted.trainer_cpus} | ({"GPU": wanted.trainer_gpus} if wanted.trainer_gpus else {})
    trainer = TorchTrainer(
        _train_in_process,
        train_loop_config={"mailbox": mailbox},
        scaling_config=ScalingConfig(
            num_workers=wanted.workers_per_task, use_gpu=bool(wanted.trainer_gpus), resources_per_worker=resources
        ),
        torch_config=TorchConfig(backend="nccl" if wanted.trainer_gpus else "gloo"),
        run_config=RunConfig(storage_path=storage),
    )
    trainer.fit()
    result: Learned | None = ray.get(mailbox.get_result.remote())
    assert result is not None, "distributed training ended without a result"
    return result


def _train_in_process(settings: dict[str, Any]) -> None:
    """Runs in every process; only the first reports."""
    train_context = get_context()
    group = ProcessGroup(train_context.get_world_rank(), train_context.get_world_size())
    mailbox = settings["mailbox"]
    context, job = ray.get(mailbox.get_job.remote())
    config = context.apply()
    device = torch.device("cuda" if config.ray.trainer_gpus else "cpu")
    runner = local_runner(config, device=device)

    def report(progress: EpochProgress) -> None:
        if group.rank == 0:
            ray.get(mailbox.put_progress.remote(progress))

    result = runner.learn(job, report, group)
    if group.rank == 0:
        ray.get(mailbox.put_result.remote(result))
