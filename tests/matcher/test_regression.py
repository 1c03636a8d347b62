"""The regression over all tasks is that of all their data together, and a task's part never changes."""

import dataclasses

import pytest
import torch
from support.builders import frozen, random_images, random_pool, random_task, random_timm_vit

from mqmk.matcher.errors import MatchError, PoolError
from mqmk.matcher.fusion import Fusion
from mqmk.matcher.matchers import match_images
from mqmk.matcher.regression import PENALTY, WIDTH, features, fit_regression

DIM = 32


def with_statistics(pool, seen_by_task):
    """The pool with what each task would keep of these queries and labels, of full rank."""
    tasks = []
    for task, (query, labels) in zip(pool.tasks, seen_by_task, strict=True):
        seen, counts = features(query, 48), torch.bincount(labels)
        means = torch.zeros(len(task.classes), 48).index_add(0, labels, seen) / counts[:, None]
        factor = seen / counts[labels].sqrt()[:, None]
        tasks.append(dataclasses.replace(task, factor=factor, residual=torch.zeros(1, 48), feature_means=means))
    return dataclasses.replace(pool, tasks=tuple(tasks))


@pytest.fixture
def learned():
    classes = (3, 2, 4)
    pool = random_pool(classes, vit=frozen(random_timm_vit()))
    seen = [(torch.randn(30, DIM), torch.arange(30) % count) for count in classes]
    return with_statistics(pool, seen), seen


def test_tasks_learned_apart_give_the_regression_of_all_data_at_once(learned):
    pool, seen = learned
    rows = torch.cat([labels + offset for (_, labels), offset in zip(seen, (0, 3, 5), strict=True)])
    weights = 1 / torch.bincount(rows)[rows].double().sqrt()[:, None]
    everything = features(torch.cat([query for query, _ in seen]), 48).double() * weights
    penalty = (PENALTY * everything.square().sum() / 48).sqrt() * torch.eye(48).double()
    targets = torch.nn.functional.one_hot(rows, 9).double() * weights
    inputs, wanted = torch.cat([everything, penalty]), torch.cat([targets, torch.zeros(48, 9).double()])
    at_once = torch.linalg.lstsq(inputs, wanted).solution
    torch.testing.assert_close(fit_regression(pool).rows, at_once.T.float(), atol=1e-4, rtol=1e-3)


def test_a_class_with_more_images_does_not_weigh_more():
    pool = random_pool((2,), vit=frozen(random_timm_vit()))
    query, labels = torch.randn(10, DIM), torch.tensor([0, 0, 0, 0, 0, 1, 1, 1, 1, 1])
    again = torch.cat([torch.arange(10), torch.arange(5).repeat(9)])  # the first class ten times as often
    once, often = (with_statistics(pool, [(query[which], labels[which])]) for which in (torch.arange(10), again))
    torch.testing.assert_close(fit_regression(once).rows, fit_regression(often).rows, atol=1e-4, rtol=1e-3)


def test_a_forgotten_task_leaves_no_trace_in_the_regression(learned):
    pool, _ = learned
    new = dataclasses.replace(random_task("new", 2), factor=torch.eye(48), residual=torch.zeros(1, 48),
                              feature_means=torch.ones(2, 48))  # fmt: skip
    again = pool.with_task(new)
    assert not torch.equal(fit_regression(again).rows[:9], fit_regression(pool).rows)
    assert torch.equal(fit_regression(again.without_task("new")).rows, fit_regression(pool).rows)


def test_what_was_summed_before_changes_no_bit(learned):
    pool, _ = learned
    first = dataclasses.replace(pool, tasks=pool.tasks[:1])
    fit_regression(first)
    continued = fit_regression(dataclasses.replace(pool)).rows
    fit_regression(dataclasses.replace(pool, tasks=pool.tasks[1:]))  # another sum is kept now
    assert torch.equal(fit_regression(dataclasses.replace(pool)).rows, continued)


def test_features_are_the_same_numbers_everywhere():
    found = features(torch.ones(1, 3), 4)
    torch.testing.assert_close(found, torch.tensor([[2.0371, 0.0, 1.1968, 2.0460]]), atol=1e-4, rtol=0)
    assert features(torch.randn(2, DIM)).shape == (2, WIDTH)


def test_a_task_without_statistics_is_named():
    vit = frozen(random_timm_vit())
    lean = dataclasses.replace(random_task("lean", 2), factor=None, residual=None, feature_means=None)
    pool = random_pool((2,), vit=vit).with_task(lean)
    assert not pool.has_statistics
    with pytest.raises(MatchError, match="'lean' has no statistics of the anchor query"):
        match_images("fused", vit, pool, random_images(1))
    assert match_images("mqmk", vit, pool, random_images(1)).task.shape == (1,)


def test_statistics_that_do_not_fit_are_refused():
    task = random_task("new", 3)
    with pytest.raises(PoolError, match="expected factor, residual, feature_means together"):
        dataclasses.replace(task, factor=None)
    with pytest.raises(PoolError, match="feature_means has the shape"):
        dataclasses.replace(task, feature_means=torch.zeros(3, 7))
    with pytest.raises(PoolError, match="expected 3 rows in feature_means"):
        dataclasses.replace(task, feature_means=torch.zeros(2, 24))


@pytest.mark.parametrize("accept", [0.0, 1.1])
def test_fused_asks_the_shortlist_only_where_the_regression_is_not_certain(accept):
    vit = frozen(random_timm_vit())
    pool = random_pool((3, 2, 4, 2), vit=vit).with_matching({"fusion": vars(Fusion(accept=accept))})
    images = random_images(5)
    alone, fused = (match_images(name, vit, pool, images) for name in ("anchor", "fused"))
    assert fused.num_queries.tolist() == ([1] * 5 if accept == 0.0 else [4] * 5)
    assert torch.equal(fused.class_logits, alone.class_logits) == (accept == 0.0)


def test_the_matched_task_is_that_of_the_best_class():
    vit = frozen(random_timm_vit())
    pool = random_pool((3, 2, 4), vit=vit)
    for name in ("anchor", "fused"):
        found = match_images(name, vit, pool, random_images(6))
        assert torch.equal(pool.row_task[found.class_logits.argmax(dim=1)], found.task)
        assert torch.equal(found.class_logits.softmax(dim=1).amax(dim=1), found.score)
