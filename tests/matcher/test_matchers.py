"""Every matcher gives what a naive reference gives, and an image's answer does not depend on its batch."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.builders import SHAPES, frozen, random_images, random_pool, random_task, random_timm_vit
from support.reference import Naive

from mqmk.matcher.classifiers import CLASSIFIERS, READOUTS, logits
from mqmk.matcher.errors import MatchError
from mqmk.matcher.matcher_info import MATCHER_INFO
from mqmk.matcher.matchers import MATCHERS, NO_RUNNER_UP, MatchSettings, match_images

TOLERANCE = 1e-5


def assert_equals_naive(vit, pool, images, matcher, settings=None, true_task=None):
    settings = settings or MatchSettings()
    found = match_images(matcher, frozen(vit), pool, images, settings, true_task)
    naive = Naive(vit, pool, settings.top_keys, settings.keys_per_task)
    for i, image in enumerate(images):
        true = 0 if true_task is None else int(true_task[i])
        expected = naive.match(matcher, image, shortlist=settings.shortlist, true=true)
        assert int(found.task[i]) == expected.task
        assert int(found.num_queries[i]) == expected.num_queries
        for task in range(len(pool.tasks)):
            assert found.scores[i, task].item() == pytest.approx(expected.scores.get(task, -torch.inf), abs=TOLERANCE)
        ranked = sorted(expected.scores, key=lambda t: -expected.scores[t])
        assert found.score[i].item() == pytest.approx(expected.scores[ranked[0]], abs=TOLERANCE)
        if len(ranked) > 1:
            assert int(found.runner_up[i]) == ranked[1]
            lead = expected.scores[ranked[0]] - expected.scores[ranked[1]]
            assert found.margin[i].item() == pytest.approx(lead, abs=TOLERANCE)
        else:
            assert int(found.runner_up[i]) == NO_RUNNER_UP
            assert found.margin[i].item() == torch.inf
        torch.testing.assert_close(found.query[i].double(), expected.query, atol=TOLERANCE, rtol=TOLERANCE)
        for classifier in CLASSIFIERS:
            for readout in READOUTS:
                values = logits(pool, found, classifier, readout)[i]
                assert values.tolist() == pytest.approx(naive.logits(expected, classifier, readout), abs=TOLERANCE)


def test_every_matcher_is_described_once():
    assert list(MATCHERS) == list(MATCHER_INFO)
    assert all(name == info.name and info.description for name, info in MATCHER_INFO.items())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("matcher", MATCHERS)
def test_a_matcher_equals_the_naive_reference(matcher, shape):
    vit = random_timm_vit(shape)
    pool = random_pool((3, 1, 5, 2), vit=frozen(vit))
    true_task = torch.tensor([0, 3, 1, 2, 2])
    assert_equals_naive(vit, pool, random_images(5), matcher, true_task=true_task if matcher == "perfect" else None)


@pytest.mark.parametrize("matcher", [m for m in MATCHERS if m != "perfect"])
@pytest.mark.parametrize("settings", [MatchSettings(top_keys=2), MatchSettings(keys_per_task=2),
                                      MatchSettings(top_keys=3, keys_per_task=2, shortlist=2)], ids=str)  # fmt: skip
def test_top_k_and_keys_per_task_equal_the_naive_reference(matcher, settings):
    vit = random_timm_vit()
    pool = random_pool((3, 1, 5, 4), vit=frozen(vit))
    assert_equals_naive(vit, pool, random_images(3), matcher, settings)


def test_cascade_with_a_full_shortlist_is_exact_matching():
    vit = frozen(random_timm_vit())
    pool = random_pool((3, 2, 5, 2), vit=vit)
    images = random_images(6)
    exact = match_images("mqmk", vit, pool, images, MatchSettings())
    full = match_images("cascade", vit, pool, images, MatchSettings(shortlist=99))
    torch.testing.assert_close(full.scores, exact.scores, atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(full.query, exact.query, atol=TOLERANCE, rtol=TOLERANCE)


def test_prompts_may_share_layers_and_reach_the_last_block():
    vit = random_timm_vit()
    pool = random_pool((2, 3, 2), vit=frozen(vit), g_layers=(0, 1, 3), e_layers=(1, 2, 3))
    assert_equals_naive(vit, pool, random_images(3), "mqmk")
    assert_equals_naive(vit, pool, random_images(3), "cascade", MatchSettings(shortlist=2))


def test_fewer_keys_than_classes_are_shared_by_neighbouring_classes():
    vit = random_timm_vit()
    pool = random_pool((4,), vit=frozen(vit)).with_task(random_task("grouped", 5, keys=2))
    assert_equals_naive(vit, pool, random_images(3), "mqmk")


@pytest.mark.parametrize("matcher", MATCHERS)
@given(data=st.data())
def test_an_answer_does_not_depend_on_batch_size_position_or_batch_mates(matcher, data):
    torch.manual_seed(data.draw(st.integers(0, 2**20)))
    vit = frozen(random_timm_vit(data.draw(st.sampled_from(sorted(SHAPES)))))
    classes = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=6))
    pool = random_pool(tuple(classes), vit=vit)
    images = random_images(data.draw(st.integers(1, 9)))
    settings = MatchSettings(
        shortlist=data.draw(st.integers(1, 4)),
        tokens_per_pass=data.draw(st.sampled_from([1, 40, 1000])),
    )
    true_task = torch.randint(0, len(classes), (len(images),))
    order = torch.tensor(data.draw(st.permutations(range(len(images)))))[: data.draw(st.integers(1, len(images)))]

    def ask(chosen, how):
        found = match_images(matcher, vit, pool, images[chosen], how, true_task[chosen])
        return found, logits(pool, found, "fc", "task"), logits(pool, found, "fc", "all")

    everyone = torch.arange(len(images))
    alone = dataclasses.replace(settings, tokens_per_pass=None)
    batch, in_task, in_all = ask(order, settings)
    for place, image in enumerate(order.tolist()):
        one, one_task, one_all = ask(everyone[image : image + 1], alone)
        if one.margin[0] < TOLERANCE:
            continue  # a tie may fall either way
        assert batch.task[place] == one.task[0]
        torch.testing.assert_close(in_task[place], one_task[0], atol=TOLERANCE, rtol=0)
        torch.testing.assert_close(in_all[place], one_all[0], atol=TOLERANCE, rtol=0)


def test_new_tasks_leave_the_scores_of_old_ones_as_they_were():
    vit = frozen(random_timm_vit())
    pool = random_pool((3, 2), vit=vit)
    images = random_images(4)
    before = match_images("mqmk", vit, pool, images, MatchSettings())
    after = match_images("mqmk", vit, pool.with_task(random_task("new", 4)), images, MatchSettings())
    torch.testing.assert_close(after.scores[:, :2], before.scores, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("matcher", ["mqmk", "mqmk-ei", "cascade", "anchor", "fused"])
def test_a_forgotten_task_leaves_no_trace(matcher):
    vit = frozen(random_timm_vit())
    pool = random_pool((3, 2), vit=vit)
    forgotten = pool.with_task(random_task("new", 4)).without_task("new")
    images = random_images(4)
    before = match_images(matcher, vit, pool, images, MatchSettings())
    after = match_images(matcher, vit, forgotten, images, MatchSettings())
    assert torch.equal(after.scores, before.scores)
    assert torch.equal(after.query, before.query)


@pytest.mark.parametrize("matcher", ["mqmk", "cascade", "mqmk-ei"])
def test_memory_of_a_pass_is_bounded_with_two_hundred_tasks(matcher):
    vit = frozen(random_timm_vit())
    pool = random_pool((1,) * 200, vit=vit)
    largest = 0
    run_block = vit._block

    def watched(layer, hidden, *rest):
        nonlocal largest
        largest = max(largest, hidden.shape[0] * hidden.shape[1])
        return run_block(layer, hidden, *rest)

    vit._block = watched
    found = match_images(matcher, vit, pool, random_images(9), MatchSettings(tokens_per_pass=80))
    assert found.scores.shape == (9, 200)
    assert largest <= 80


def test_unknown_names_and_impossible_requests_say_what_to_do():
    vit = frozen(random_timm_vit())
    pool = random_pool((2, 2), vit=vit)
    images = random_images(2)
    with pytest.raises(MatchError, match=r"no matcher is called 'best'; choose one of sqsk, .*cascade"):
        match_images("best", vit, pool, images)
    with pytest.raises(MatchError, match="needs the true task"):
        match_images("perfect", vit, pool, images)
    with pytest.raises(MatchError, match="learned no task yet"):
        match_images("mqmk", vit, random_pool((), vit=vit), random_images(2), MatchSettings())
    with pytest.raises(MatchError, match="shortlist must be at least 1"):
        MatchSettings(shortlist=0)
    lean = dataclasses.replace(random_task("lean", 2), plain_means=None)
    with pytest.raises(MatchError, match="'lean' has no means of plain queries"):
        match_images("sqsk", vit, pool.with_task(lean), random_images(2), MatchSettings())
    found = match_images("mqmk", vit, pool, images)
    with pytest.raises(MatchError, match="no classifier is called 'svm'; choose one of fc, ncm, km"):
        logits(pool, found, "svm", "all")
    with pytest.raises(MatchError, match="no read-out"):
        logits(pool, found, "fc", "some")
