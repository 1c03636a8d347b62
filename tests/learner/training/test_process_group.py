"""A group's gradient is that of one process, its members vary images differently, and all of them stop together."""

from dataclasses import dataclass, field, replace
from datetime import timedelta
from operator import itemgetter
from typing import Any

import pytest
import torch
from support.builders import frozen, random_timm_vit
from support.daemons.demo_tasks import noise, noise_task
from torch import distributed, multiprocessing
from torch.testing._internal.distributed.fake_pg import FakeStore

from mqmk.learner.settings import TrainSettings
from mqmk.learner.training import train
from mqmk.learner.training.process_group import SINGLE_PROCESS, ProcessGroup

ROWS = torch.arange(15.0).reshape(5, 3)
Answers = Any  # a queue of what each member found


@dataclass(frozen=True)
class Found:
    """What one member of a group found."""

    gradient: list[float]
    total: float
    epochs: list[int] = field(default_factory=list)
    crops: list[list[float]] = field(default_factory=list)
    head: list[list[float]] = field(default_factory=list)
    error: str | None = None


def _member(rank: int, address: str, answers: Answers) -> None:
    torch.set_num_threads(1)
    wait = timedelta(seconds=20)
    distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=2, timeout=wait)
    added = _sum_gradients(ProcessGroup(rank, 2))
    try:
        answers.put((rank, Found(*added, *_train(ProcessGroup(rank, 2)))))
    except RuntimeError as error:
        answers.put((rank, Found(*added, error=str(error))))
    distributed.destroy_process_group()


def _sum_gradients(group: ProcessGroup) -> tuple[list[float], float]:
    weight, total = torch.ones(3, requires_grad=True), torch.zeros(())
    for part in group.my_parts(ROWS.split(1)):
        loss = (part @ weight).sum()
        loss.backward()
        total += loss.detach()
    group.all_reduce_grads([weight])
    assert weight.grad is not None
    return weight.grad.tolist(), float(group.all_reduce_sum(total))


def _train(group: ProcessGroup) -> tuple[list[int], list[list[float]], list[list[float]]]:
    """Training in which members find different answers to the images that decide when to stop."""
    torch.manual_seed(0)
    task, vit = replace(noise_task(40, 80, 120), held_out=noise(2, 4, 6)), frozen(random_timm_vit())
    settings = TrainSettings(epochs=8, batch=20, e_length=2, patience=2, anchor_steps=0)
    epochs: list[int] = []
    crops: list[list[float]] = []
    run_query, run_augment = train.compute_query, train.augment

    def query(vit: Any, state: Any, embedded: Any) -> torch.Tensor:
        if torch.is_grad_enabled():
            return run_query(vit, state, embedded)
        answer = min(state.epoch - 1, 2) if group.rank == 0 else 0  # the first member's answers get better for a while
        return state.head[answer].expand(len(embedded), -1)

    def augment(images: torch.Tensor, how: Any, random: torch.Generator) -> torch.Tensor:
        crops.append(torch.rand(4, generator=random).tolist())
        return run_augment(images, how, random)

    train.compute_query, train.augment = query, augment  # type: ignore[assignment]
    pool = train.empty_pool(vit, settings)
    trained = train.train_task(task, vit, pool, settings, on_epoch=lambda now: epochs.append(now.epoch), group=group)
    return epochs, crops, trained.prompt.head.tolist()


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    """What two processes found, the first one's first."""
    context = multiprocessing.get_context("spawn")
    answers, address = context.Queue(), f"file://{tmp_path_factory.mktemp('group')}/meet"
    processes = [context.Process(target=_member, args=(rank, address, answers)) for rank in (0, 1)]
    for process in processes:
        process.start()
    try:
        return [found for _, found in sorted((answers.get(timeout=120) for _ in processes), key=itemgetter(0))]
    finally:
        for process in processes:
            process.join(timeout=30)
            process.kill()


def test_the_gradients_of_two_members_add_up_to_that_of_one(members: list[Found]) -> None:
    assert [member.gradient for member in members] == [ROWS.sum(0).tolist()] * 2
    assert [member.total for member in members] == [ROWS.sum().item()] * 2


def test_members_whose_own_results_differ_stop_at_the_same_epoch_with_the_same_tensors(members: list[Found]) -> None:
    first, second = members
    assert (first.error, second.error) == (None, None)
    assert first.epochs == second.epochs == list(range(1, len(first.epochs) + 1))
    assert 3 < len(first.epochs) < 8  # alone, the second one would stop after three
    assert first.head == second.head


def test_members_draw_different_crops(members: list[Found]) -> None:
    first, second = members
    assert first.crops
    assert all(mine != theirs for mine, theirs in zip(first.crops, second.crops, strict=True))


def test_sums_stay_on_the_device_that_the_groups_backend_knows() -> None:
    distributed.init_process_group("meta:fake", rank=0, world_size=2, store=FakeStore())
    try:
        with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
            distributed.all_reduce(torch.zeros(()))  # what NCCL says to a tensor on the CPU
        assert ProcessGroup(0, 2).all_reduce_sum(torch.zeros((), device="meta")).device.type == "meta"
    finally:
        distributed.destroy_process_group()


def test_a_single_process_takes_every_part_and_changes_no_gradient() -> None:
    weight = torch.ones(3, requires_grad=True)
    (weight * 2).sum().backward()
    before = weight.grad
    SINGLE_PROCESS.all_reduce_grads([weight])
    assert (
        weight.grad is before
        and SINGLE_PROCESS.my_parts([1, 2, 3]) == [1, 2, 3]
        and SINGLE_PROCESS.all_reduce_sum(torch.tensor(2.5)) == 2.5
    )
