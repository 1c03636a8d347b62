"""A killed run goes on from its checkpoint and ends alike; one of another run is ignored, and the log says so."""

import dataclasses

import pytest
import torch
from support.builders import frozen, random_timm_vit
from support.daemons.demo_tasks import noise_task

from mqmk.learner.data.tasks import Task
from mqmk.learner.settings import Augmentation, TrainSettings
from mqmk.learner.training import checkpoint
from mqmk.learner.training.train import Trained, empty_pool, train_task
from mqmk.matcher.pool import PromptPool

QUICK = TrainSettings(epochs=2, batch=32, e_length=4, anchor_steps=0)


@pytest.fixture(scope="module")
def vit():
    torch.manual_seed(0)
    return frozen(random_timm_vit())


@pytest.fixture(scope="module")
def birds() -> Task:
    return noise_task(30, 40, 50, name="birds")


def tensors(trained: Trained) -> dict[str, torch.Tensor]:
    anchor = {} if trained.anchor is None else {"anchor": trained.anchor}
    return trained.prompt.tensors() | {"g_prompt": trained.g_prompt} | anchor


def assert_same(first: Trained, second: Trained) -> None:
    for name, tensor in tensors(first).items():
        assert torch.equal(tensor, tensors(second)[name]), name


class KilledError(Exception):
    pass


@pytest.mark.parametrize(
    "settings",
    [QUICK, dataclasses.replace(QUICK, keys="learned", patience=3)],
    ids=["plain", "learned-keys-early-stop"],
)
def test_a_killed_run_goes_on_and_ends_with_the_same_tensors(vit, birds, settings):
    settings = dataclasses.replace(settings, epochs=4)
    pool = empty_pool(vit, settings)
    whole = train_task(birds, vit, pool, settings)
    epochs, states = [], []

    def kill_after_two(progress):
        epochs.append(progress.epoch)
        if progress.epoch == 2:
            raise KilledError

    with pytest.raises(KilledError):
        train_task(birds, vit, pool, settings, on_checkpoint=states.append, on_epoch=kill_after_two)
    resumed = train_task(birds, vit, pool, settings, resume=states[-1], on_epoch=lambda p: epochs.append(p.epoch))
    assert epochs == [1, 2, 3, 4]
    assert_same(whole, resumed)


@pytest.mark.parametrize("epoch", [1, 2, 3], ids=["with the anchor", "between them", "with the task"])
def test_a_first_task_killed_anywhere_ends_with_the_same_anchor(vit, birds, epoch):
    settings = dataclasses.replace(QUICK, anchor_steps=1, anchor_length=3)
    pool = empty_pool(vit, settings)
    whole = train_task(birds, vit, pool, settings)
    states = []

    def kill(progress):
        if progress.epoch == epoch:
            raise KilledError

    with pytest.raises(KilledError):
        train_task(birds, vit, pool, settings, on_checkpoint=states.append, on_epoch=kill)
    seen = []
    resumed = train_task(
        birds, vit, pool, settings, resume=states[-1], on_epoch=lambda p: seen.append((p.epoch, p.epochs))
    )
    assert seen == [(number, 4) for number in range(epoch + 1, 5)]
    assert_same(whole, resumed)


@pytest.fixture(scope="module")
def begun(vit, birds) -> bytes:
    """The state after one epoch of the first task."""
    return first_state(birds, vit, empty_pool(vit, QUICK), QUICK)


def first_state(task: Task, vit, pool: PromptPool, settings: TrainSettings) -> bytes:
    states = []

    def kill(_progress):
        raise KilledError

    with pytest.raises(KilledError):
        train_task(task, vit, pool, settings, on_checkpoint=states.append, on_epoch=kill)
    return states[0]


def reasons(caplog) -> list[str]:
    return [line.ids["reason"] for line in caplog.records if line.event == "task.checkpoint_ignored"]


def assert_begins_anew(task, vit, pool, settings, state, caplog) -> None:
    epochs = []
    fresh = train_task(task, vit, pool, settings)
    resumed = train_task(task, vit, pool, settings, resume=state, on_epoch=lambda now: epochs.append(now.epoch))
    assert epochs == [1, 2]
    assert_same(fresh, resumed)
    assert len(reasons(caplog)) == 1


@pytest.mark.parametrize(
    "change",
    [{"e_length": 6}, {"e_length": 1}, {"keys": "learned"}, {"seed": 1}, {"learning_rate": 0.01}, {"e_layers": (1, 3)},
     {"augmentation": Augmentation(mirror=False)}],
    ids=str,
)  # fmt: skip
def test_a_checkpoint_of_other_settings_is_ignored(vit, birds, begun, change, caplog):
    other = dataclasses.replace(QUICK, **change)
    assert_begins_anew(birds, vit, empty_pool(vit, other), other, begun, caplog)


@pytest.mark.parametrize("change", [{"classes": ("a", "b", "c")}, {"manifest_sha256": "cd" * 32}], ids=str)
def test_a_checkpoint_of_another_task_is_ignored(vit, birds, begun, change, caplog):
    assert_begins_anew(dataclasses.replace(birds, **change), vit, empty_pool(vit, QUICK), QUICK, begun, caplog)


def test_a_checkpoint_from_another_base_is_ignored(vit, birds, begun, caplog):
    empty = empty_pool(vit, QUICK)
    base = train_task(noise_task(8, 8, name="fruit"), vit, empty, QUICK).added_to(empty)
    assert_begins_anew(birds, vit, base, QUICK, begun, caplog)
    caplog.clear()
    other = train_task(noise_task(8, 8, name="sea"), vit, empty, QUICK).added_to(empty)
    assert_begins_anew(birds, vit, other, QUICK, first_state(birds, vit, base, QUICK), caplog)


@pytest.mark.parametrize("state", [b"half a file", checkpoint.to_bytes({"numbers": torch.zeros(4)})], ids=len)
def test_a_checkpoint_that_cannot_be_understood_is_ignored(vit, birds, state, caplog):
    assert_begins_anew(birds, vit, empty_pool(vit, QUICK), QUICK, state, caplog)


@pytest.mark.parametrize("change", [{"accumulate": 2}, {"plain_means": False}], ids=str)
def test_what_changes_neither_shapes_nor_gradients_does_not_cost_a_checkpoint(vit, birds, begun, change, caplog):
    settings, epochs = dataclasses.replace(QUICK, **change), []
    train_task(
        birds, vit, empty_pool(vit, settings), settings, resume=begun, on_epoch=lambda now: epochs.append(now.epoch)
    )
    assert epochs == [2]
    assert not reasons(caplog)
