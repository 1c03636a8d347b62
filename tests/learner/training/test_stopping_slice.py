"""Early stopping looks at a tenth of the training images, never at held-out ones, and keeps the best epoch."""

import dataclasses

import pytest
import torch
from PIL import Image
from support.daemons.demo_tasks import demo_task, noise
from torch.nn import functional as F

from mqmk.learner.data.tasks import InMemory, Streamed
from mqmk.learner.settings import TrainSettings
from mqmk.learner.training import checkpoint
from mqmk.learner.training.stopping_slice import split_off
from mqmk.learner.training.train import empty_pool, train_task
from mqmk.matcher.backbone import load_backbone
from mqmk.matcher.images import normalise
from mqmk.matcher.prompted_vit import Prompt

PATIENT = TrainSettings(epochs=12, batch=32, e_length=4, patience=1, learning_rate=0.5, anchor_steps=0)


@pytest.fixture(scope="module")
def vit():
    return load_backbone(device=torch.device("cpu"))


def images_of(side, **choices) -> dict[bytes, int]:
    """Label of every image that a side gives."""
    return {
        pixels.numpy().tobytes(): int(label)
        for batch in side.batches(7, **({"seed": None} | choices))
        for pixels, label in zip(batch.pixels, batch.labels, strict=True)
    }


def test_a_tenth_of_each_class_is_set_aside_and_the_rest_is_trained_on():
    whole = noise(40, 9, 75)
    rest, slice_ = split_off(whole)
    assert torch.tensor(list(images_of(slice_).values())).bincount(minlength=3).tolist() == [4, 0, 7]
    assert (len(rest), len(slice_)) == (113, 11)
    assert len(images_of(rest)) == 113
    assert images_of(rest) | images_of(slice_) == images_of(whole)
    assert not images_of(rest, seed=3, balanced=True).keys() & images_of(slice_).keys()


def test_the_choice_depends_on_the_images_alone(vit):
    whole = noise(60, 60, pixels=28)
    _, chosen = split_off(whole)
    order = torch.randperm(120)
    _, shuffled = split_off(InMemory(whole.pixels[order], whole.labels[order]))
    images = [
        (Image.fromarray(p.permute(1, 2, 0).numpy()), int(n)) for p, n in zip(whole.pixels, whole.labels, strict=True)
    ]
    _, streamed = split_off(Streamed((60, 60), lambda _: images, vit.info))
    assert images_of(chosen) == images_of(shuffled) == images_of(streamed)


def test_copies_stay_on_one_side_and_no_class_is_used_up():
    once = noise(100, 20)
    twice = InMemory(once.pixels.repeat(2, 1, 1, 1), once.labels.repeat(2))
    rest, slice_ = split_off(twice)
    assert (len(rest), len(slice_)) == (216, 24)
    assert not images_of(rest).keys() & images_of(slice_).keys()
    same = InMemory(
        torch.cat([once.pixels, once.pixels[:1].repeat(30, 1, 1, 1)]), torch.cat([once.labels, torch.full((30,), 2)])
    )
    assert 2 in images_of(split_off(same)[0]).values()


def test_a_task_too_small_to_spare_images_trains_all_epochs(vit):
    small = noise(20, 20, 50)  # nine images would decide
    assert split_off(small) == (small, None)
    task, seen, states = dataclasses.replace(demo_task("birds", per_class=8), held_out=noise(pixels=28)), [], []
    settings = dataclasses.replace(PATIENT, epochs=3)
    train_task(task, vit, empty_pool(vit, settings), settings, on_epoch=seen.append, on_checkpoint=states.append)
    assert [progress.epoch for progress in seen] == [1, 2, 3]
    state = checkpoint.from_bytes(states[-1])
    assert all(torch.equal(state[f"now.{name}"], state[f"best.{name}"]) for name in ("e_prompt", "head", "g_prompt"))


def test_early_stopping_keeps_the_best_epoch(vit):
    task, states, seen = demo_task("birds", per_class=24), [], []
    pool = empty_pool(vit, PATIENT)
    trained = train_task(task, vit, pool, PATIENT, on_checkpoint=states.append, on_epoch=seen.append)
    _, slice_ = split_off(task.training)
    (batch,) = slice_.batches(256, seed=None)

    def right(state: dict[str, torch.Tensor]) -> int:
        g, e = Prompt(pool.g_layers, (state["now.g_prompt"],)), Prompt(pool.e_layers, (state["now.e_prompt"],))
        query = vit.query(vit.stem(vit.embed(normalise(batch.pixels, vit.info)), g, pool.e_layers[0]), g, e)
        return int(((query @ F.normalize(state["now.head"], dim=1).T).argmax(dim=1) == batch.labels).sum())

    found = [right(checkpoint.from_bytes(state)) for state in states[:-1]]  # the last one went back to the best
    assert 1 < len(states) < PATIENT.epochs
    best = found.index(max(found))
    assert len(found) == best + 1
    assert torch.equal(trained.prompt.head, checkpoint.from_bytes(states[best])["now.head"])
    assert [progress.held_out_accuracy is None for progress in seen] == [True] * len(found) + [False]
    assert seen[-1].seconds_left == 0


def test_held_out_images_decide_nothing(vit):
    task = demo_task("birds", per_class=24)
    blind = dataclasses.replace(task, held_out=noise(pixels=28))
    pool = empty_pool(vit, PATIENT)
    looked, not_looked = train_task(task, vit, pool, PATIENT).prompt, train_task(blind, vit, pool, PATIENT).prompt
    for name, tensor in looked.tensors().items():
        assert torch.equal(tensor, not_looked.tensors()[name]), name
    assert looked.class_samples == (24,) * 5  # keys and means are of all training images
