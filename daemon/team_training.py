"""Several workers learn one task together, through Ray Train: `ray.workers_per_task` above 1."""

from typing import Any

import ray
import torch
from ray.train import RunConfig, ScalingConfig, get_context
from ray.train.torch import TorchConfig, TorchTrainer

from mqmk.daemon.config import Config
from mqmk.daemon.jobs import Learn, Learned, Progressed
from mqmk.daemon.workshop import local_workshop
from mqmk.learner.team import Team


@ray.remote(num_cpus=0)
class Inbox:
    """Where the first member of a team leaves its progress and its result."""

    def __init__(self) -> None:
        self._progress: list[Progressed] = []
        self._learned: Learned | None = None

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


def learn_together(config: Config, job: Learn, inbox: Any, storage: str) -> Learned:
    """Start the team, wait for it, and return what its first member learned."""
    wanted = config.ray
    resources = {"CPU": wanted.trainer_cpus} | ({"GPU": wanted.trainer_gpus} if wanted.trainer_gpus else {})
    trainer = TorchTrainer(
        _member,
        train_loop_config={"config": config, "job": job, "inbox": inbox},
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
    device = torch.device("cuda" if given["config"].ray.trainer_gpus else "cpu")
    workshop = local_workshop(given["config"], device=device)
    inbox = given["inbox"]

    def report(progress: Progressed) -> None:
        if team.rank == 0:
            ray.get(inbox.report.remote(progress))

    learned = workshop.learn(given["job"], report, team)
    if team.rank == 0:
        ray.get(inbox.finish.remote(learned))
