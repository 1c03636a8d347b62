"""What methods share changes neither their answers nor what they are said to cost."""

import pytest
import torch
from support.method_tasks import QUICK, ragged_tasks

from mqmk.learner.bench.methods.parts import trained_pool
from mqmk.learner.bench.methods.parts.forward import PassMeter
from mqmk.learner.bench.methods.parts.remembering import Memory, RememberingViT, recall
from mqmk.learner.bench.methods.registry import list_methods
from mqmk.matcher.images import normalise

NAMES = [name for name, info in list_methods().items() if not info.is_leaky]


def run(vit, name):
    """Scores of all images after each task, and the passes that learning and answering took."""
    method, images, found = list_methods()[name].create(vit, QUICK), torch.zeros(0, 3, 12, 12), []
    for task in ragged_tasks():
        with PassMeter(vit) as learning:
            method.learn(task)
        images = torch.cat([images, normalise(task.held_out.pixels, vit.info)])
        with PassMeter(vit) as testing, torch.no_grad():
            scores = torch.cat([method.predict(part).scores for part in images.split(5)])
        found.append((scores, learning.forward, learning.backward, testing.forward))
    return found


@pytest.fixture(scope="module")
def warm(vit):
    """A ViT that remembers what all other methods computed."""
    return RememberingViT(vit, Memory())


@pytest.mark.parametrize("name", NAMES)
def test_a_method_answers_and_costs_the_same_whatever_is_remembered(name, vit, warm):
    alone, first, again = run(vit, name), run(warm, name), run(warm, name)
    for expected, *others in zip(alone, first, again, strict=True):
        for found in others:
            torch.testing.assert_close(found[0], expected[0], atol=1e-5, rtol=1e-4)
            assert found[1:] == pytest.approx(expected[1:], rel=1e-6)


def test_a_pool_is_trained_once_for_all_methods_with_the_same_settings(vit, monkeypatch):
    trained, real = [], trained_pool.train_task
    monkeypatch.setattr(trained_pool, "train_task", lambda task, *rest: trained.append(task.name) or real(task, *rest))
    remembering = RememberingViT(vit, Memory())
    for name in ("sqsk", "mqmk", "mqmk-ei", "ease-prefix", "mos-refine", "cascade"):
        run(remembering, name)
    assert trained == ["task0", "task1", "task2"]


def test_rows_are_computed_once_and_anew_when_the_memory_is_full(vit):
    computed = []

    def compute(images):
        return lambda some: computed.append(some.tolist()) or images[some].mean(dim=(1, 2, 3))[:, None]

    images = torch.rand(3, 3, 12, 12)
    remembering = RememberingViT(vit, Memory())
    first = recall(remembering, images, ["a", "b", "a"], compute(images))
    assert torch.equal(recall(remembering, images, ["a", "a", "a"], compute(images)), first)
    assert computed == [[0, 1, 2], [1]]  # another kind of row of the same image
    computed.clear()
    full = RememberingViT(vit, Memory(most_bytes=4))
    for _ in range(2):
        torch.testing.assert_close(recall(full, images, ["a"] * 3, compute(images)), first)
    assert computed == [[0, 1, 2], [1, 2]]
