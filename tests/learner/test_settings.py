"""Settings that cannot work are refused before any training, and those that can be understood are."""

import dataclasses

import pytest
from support.builders import frozen, random_pool, random_timm_vit
from support.daemons.demo_tasks import noise_task

from mqmk.learner.errors import LearnerError, SettingsError
from mqmk.learner.settings import TrainSettings, check_settings, default_e_layers
from mqmk.learner.training.train import empty_pool, train_task
from mqmk.matcher.errors import MqmkError


@pytest.fixture
def vit():
    return frozen(random_timm_vit())  # of four blocks


@pytest.mark.parametrize("layers", [None, (0,), (3,), (0, 1, 2, 3), (1, 3)])
def test_blocks_that_the_backbone_has_are_accepted(layers):
    check_settings(TrainSettings(e_layers=layers), depth=4)


@pytest.mark.parametrize(
    ("layers", "shown"),
    [((2, 50), "2,50"), ((4,), "4"), ((-1, 2), "-1,2"), ((-2, 3), "-2,3"), ((3, 2), "3,2"), ((2, 2), "2,2"),
     ((), "none of them")],
)  # fmt: skip
def test_blocks_that_it_has_not_are_refused_with_what_to_type(layers, shown):
    reason = (
        rf"e_layers: expected rising numbers of blocks from 0 to 3 \(the backbone has 4 blocks\), got {shown}; use 2"
    )
    with pytest.raises(SettingsError, match=reason) as found:
        check_settings(TrainSettings(e_layers=layers), depth=4)
    assert isinstance(found.value, MqmkError)


@pytest.mark.parametrize("depth", [1, 2, 3, 4, 12])
def test_the_default_blocks_fit_every_backbone(depth):
    check_settings(TrainSettings(e_layers=default_e_layers(depth)), depth)


def test_training_is_refused_before_it_begins(vit):
    vit.embed = vit.query = None  # nothing is computed
    wrong = TrainSettings(e_layers=(2, 50))
    with pytest.raises(SettingsError, match="got 2,50"):
        empty_pool(vit, wrong)
    with pytest.raises(SettingsError, match="got 2,50"):
        train_task(noise_task(8, 8, 8), vit, random_pool((), vit=vit), wrong)
    with pytest.raises(LearnerError, match="expected images to train on, got 0 of 3 classes"):
        train_task(noise_task(0, 0, 0), vit, random_pool((), vit=vit), TrainSettings())


@pytest.mark.parametrize("keys", ["closed-form", "learned"])
@pytest.mark.parametrize(("wanted", "got"), [(1, 1), (2, 2), (3, 3), (10, 3)])
def test_a_task_never_has_more_keys_than_classes(vit, keys, wanted, got):
    settings = TrainSettings(epochs=1, e_length=2, keys=keys, keys_per_task=wanted)
    assert len(train_task(noise_task(8, 8, 8), vit, empty_pool(vit, settings), settings).prompt.keys) == got


@pytest.mark.parametrize("start", ["first", "previous", "random"])
def test_a_later_task_keeps_the_length_of_the_first_ones_e_prompt(vit, start):
    settings = TrainSettings(epochs=1, e_length=2)
    first = train_task(noise_task(8, 8, 8), vit, empty_pool(vit, settings), settings).added_to(
        empty_pool(vit, settings)
    )
    longer = dataclasses.replace(settings, e_length=5, start=start)
    second = train_task(noise_task(8, 8, 8, name="second"), vit, first, longer).added_to(first)
    assert [task.e_prompt.shape[2] for task in second.tasks] == [2, 2]


EXTREMES = {
    "learning_rate": 0.0,
    "clip": 0.0,
    "spread": 0.0,
    "head_scale": 0.0,
    "patches": 0.0,
    "batch": 1,
    "g_length": 1,
}


@pytest.mark.parametrize("name", EXTREMES)
@pytest.mark.parametrize("keys", ["closed-form", "learned"])
def test_the_ends_of_what_is_accepted_give_finite_tensors(vit, name, keys):
    settings = TrainSettings(**({"epochs": 1, "e_length": 2, "keys": keys} | {name: EXTREMES[name]}))
    train_task(noise_task(8, 8, 8), vit, empty_pool(vit, settings), settings)  # a pool refuses what is not finite
