"""A team's gradient is that of one worker."""

import torch
from torch import distributed, multiprocessing

from mqmk.learner.team import ALONE, Team


def _member(rank: int, address: str, queue: "multiprocessing.Queue[tuple[int, list[float], float]]") -> None:
    distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    team, weight = Team(rank, 2), torch.ones(3, requires_grad=True)
    rows = torch.arange(15.0).reshape(5, 3)
    total = 0.0
    for part in team.mine(rows.split(1)):
        loss = (part @ weight).sum()
        loss.backward()
        total += loss.item()
    team.add_up([weight])
    assert weight.grad is not None
    queue.put((rank, weight.grad.tolist(), team.total(total)))
    distributed.destroy_process_group()


def test_the_gradients_of_two_members_add_up_to_that_of_one(tmp_path: object) -> None:
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    members = [context.Process(target=_member, args=(rank, f"file://{tmp_path}/meet", queue)) for rank in (0, 1)]
    for member in members:
        member.start()
    found = sorted(queue.get(timeout=120) for _ in members)
    for member in members:
        member.join()
    rows = torch.arange(15.0).reshape(5, 3)
    assert [grad for _, grad, _ in found] == [rows.sum(0).tolist()] * 2
    assert [total for _, _, total in found] == [rows.sum().item()] * 2


def test_one_worker_alone_takes_every_part_and_changes_no_gradient() -> None:
    weight = torch.ones(3, requires_grad=True)
    (weight * 2).sum().backward()
    before = weight.grad
    ALONE.add_up([weight])
    assert weight.grad is before and ALONE.mine([1, 2, 3]) == [1, 2, 3] and ALONE.total(2.5) == 2.5
