"""Several workers learn one task together, through Ray Train: `ray.workers_per_task` above 1."""

from typing import Any

import ray
import torch
from ray.train import RunConfig, ScalingConfig, get_context
from ray.train.torch import TorchConfig, TorchTrainer

from mqmk.daemon.jobs import Learn, Learned, Progressed, Tools
from mqmk.daemon.workshop import local_workshop
from mqmk.learner.team import Team


@ray.remote(num_cpus=0)
class Inbox:
    """Where the members of a team find their job, and the first one leaves its progress and its result."""

    def __init__(self) -> None:
        self._given: tuple[Tools, Learn] | None = None
        self._progress: list[Progressed] = []
        self._learned: Learned | None = None

    def give(self, tools: Tools, job: Learn) -> None:
        """Keep the job for the members: Ray Train would write it into its records."""
        self._given = tools, job

    def given(self) -> tuple[Tools, Learn] | None:
        """The job."""
        return self._given

    def report(self, progress: Progressed) -> None:
        """Keep the newest epoch."""
        self._progress = [progress]

    def progress(self) -> list[Progressed]:
        """Epochs since this was last asked."""
        found, self._progress = self._progress, []
        return found

    def finish(self, learned: Learned) -> None:
        """Keep the result."""
        self._learned = learned

    def learned(self) -> Learned | None:
        """The result."""
        return self._learned


def learn_together(tools: Tools, job: Learn, inbox: Any, storage: str) -> Learned:
    """Start the team, wait for it, and return what its first member learned."""
    ray.get(inbox.give.remote(tools, job))
    wanted = tools.config.ray
    resources = {"CPU": wanted.trainer_cpus} | ({"GPU": wanted.trainer_gpus} if wanted.trainer_gpus else {})
    trainer = TorchTrainer(
        _member,
        train_loop_config={"inbox": inbox},
        scaling_config=ScalingConfig(
            num_workers=wanted.workers_per_task, use_gpu=bool(wanted.trainer_gpus), resources_per_worker=resources
        ),
        torch_config=TorchConfig(backend="nccl" if wanted.trainer_gpus else "gloo"),
        run_config=RunConfig(storage_path=storage),
    )
    trainer.fit()
    learned: Learned | None = ray.get(inbox.learned.remote())
    assert learned is not None, "the team ended without a result"
    return learned


def _member(given: dict[str, Any]) -> None:
    """What every member does; the first one tells."""
    context = get_context()
    team = Team(context.get_world_rank(), context.get_world_size())
    inbox = given["inbox"]
    tools, job = ray.get(inbox.given.remote())
    config = tools.take_up()
    device = torch.device("cuda" if config.ray.trainer_gpus else "cpu")
    workshop = local_workshop(config, device=device)

    def report(progress: Progressed) -> None:
        if team.rank == 0:
            ray.get(inbox.report.remote(progress))

    learned = workshop.learn(job, report, team)
    if team.rank == 0:
        ray.get(inbox.finish.remote(learned))
