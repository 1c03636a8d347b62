"""Methods on our own pool: matchers as served, EASE's completion, MOS's loop, and the batch bug as published."""

import dataclasses

import pytest
import torch
from support.builders import random_images
from support.method_tasks import QUICK, learned
from torch.nn import functional as F

from mqmk.learner.bench.methods.ease_prefix import EasePrefix, complete
from mqmk.learner.bench.methods.leaky import mix_up
from mqmk.learner.bench.methods.mos_refine import MosRefine
from mqmk.learner.bench.methods.mqmk import MQMK
from mqmk.learner.bench.methods.parts.forward import PassMeter
from mqmk.learner.bench.methods.registry import list_methods
from mqmk.matcher.classifiers import logits
from mqmk.matcher.matchers import match_images


@pytest.mark.parametrize(("matcher", "readout"), [("sqsk", "all"), ("mqmk", "task"), ("mqmk-ei", "task")])
def test_a_pool_method_answers_as_the_matcher_does(matcher, readout, vit, tasks):
    method, images = learned(list_methods()[matcher].create(vit, QUICK), tasks), random_images(5)
    pool = method._trained.pool
    found = match_images(matcher, vit, pool, images)
    answer = method.predict(images)
    assert torch.equal(answer.matched_task, found.task)
    assert torch.equal(answer.scores, logits(pool, found, "fc", readout))


def test_the_g_prompt_of_our_pool_stays_as_the_first_task_left_it(vit, tasks):
    assert "task0/g_prompt" in learned(MQMK(vit, QUICK), tasks[:1]).kept()
    always = dataclasses.replace(QUICK, train=dataclasses.replace(QUICK.train, g_prompt="always"))
    assert "g_prompt" in learned(MQMK(vit, always), tasks[:1]).kept()


def test_a_class_never_seen_under_a_prompt_gets_a_mean_of_newer_classes():
    real = [torch.randn(1, 2, 4), torch.randn(2, 3, 4), torch.randn(3, 1, 4)]  # prompts, classes, dim
    found = complete(real)
    assert found.shape == (3, 6, 4)
    torch.testing.assert_close(
        found[0], torch.cat([real[0][0], real[1][0], real[2][0]])
    )  # all were seen under prompt 0
    torch.testing.assert_close(found[1, 2:], torch.cat([real[1][1], real[2][1]]))
    own = real[0][0, 1]
    newer_here, newer_there = torch.cat([real[1][0], real[2][0]]), torch.cat([real[1][1], real[2][1]])
    weights = F.cosine_similarity(own[None], newer_here).softmax(dim=0)
    torch.testing.assert_close(found[1, 1], weights @ newer_there)
    torch.testing.assert_close(found[2, 0], real[2][2, 0])  # one newer class only


def test_without_other_prompts_ease_is_mqmk_with_the_class_of_the_best_key(vit, tasks):
    method, images = learned(EasePrefix(vit, QUICK, others=0.0), tasks), random_images(8)
    pool = method._trained.pool
    found = match_images("mqmk", vit, pool, images)
    by_key = logits(pool, found, "km", "task").argmax(dim=1)
    assert method.predict(images).scores.argmax(dim=1).tolist() == by_key.tolist()


def test_other_prompts_count_a_tenth_of_a_class_in_all(vit, tasks):
    images = random_images(3)
    alone, both = (learned(EasePrefix(vit, QUICK, others=share), tasks) for share in (0.0, 0.1))
    queries = torch.stack(list(both._trained.queries(images).by_task()))
    cosines = F.normalize(queries, dim=-1) @ F.normalize(both.kept()["prototypes"], dim=-1).mT
    others = cosines[1, :, 0] + cosines[2, :, 0]  # of a class of task 0
    expected = alone.predict(images).scores[:, 0] + 0.05 * others
    torch.testing.assert_close(both.predict(images).scores[:, 0], expected)


def test_mos_with_one_task_is_the_plain_head(vit, tasks):
    method, images = learned(MosRefine(vit, QUICK), tasks[:1]), random_images(4)
    pool = method._trained.pool
    expected = logits(pool, match_images("mqmk", vit, pool, images), "fc", "task")
    torch.testing.assert_close(method.predict(images).scores, expected)


def test_mos_looks_again_only_while_the_head_disagrees(vit, tasks):
    method, images = learned(MosRefine(vit, QUICK), tasks), random_images(16)
    few = learned(MosRefine(vit, QUICK, passes=2), tasks)
    with PassMeter(vit) as meter:
        method.predict(images)
    with PassMeter(vit) as less:
        few.predict(images)
    stem = (2 * vit.tokens) / (vit.tokens * (vit.depth - 1) + 1)  # of the two blocks below the first e-prompt
    assert less.forward <= meter.forward <= 16 * (stem + 3 * (1 - stem)) + 1e-6
    head = method._head.clone()
    method._head = torch.zeros_like(head)  # of equal logits the first class wins: task 0
    assert method.predict(images).matched_task.tolist() == [0] * 16


def test_the_batch_bug_gives_an_image_its_batch_mates_prompts():
    rows = torch.arange(4)[:, None, None, None, None] * 10 + torch.arange(2)[None, None, :, None, None]
    rows = rows.expand(4, 3, 2, 5, 6).float()  # image * 10 + (0 for keys, 1 for values)
    found = mix_up(rows)
    assert found[:, 0, :, 0, 0].tolist() == [[0, 10], [20, 30], [1, 11], [21, 31]]
    assert torch.equal(mix_up(rows[:1]), rows[:1])  # a batch of one is right


@pytest.mark.parametrize("name", ["mqmk-leaky", "dualprompt-leaky"])
def test_a_leaky_method_depends_on_its_batch_and_says_so(name, vit, tasks):
    info = list_methods()[name]
    method, images = learned(info.create(vit, QUICK), tasks), random_images(6)
    together = method.predict(images).scores
    alone = torch.cat([method.predict(image[None]).scores for image in images])
    assert not torch.allclose(together, alone, atol=1e-3)
    assert info.is_leaky and "NOT A RESULT" in info.description
