"""The regression over all tasks is that of all their data together, and a task's part never changes."""

import dataclasses

import pytest
import torch
from support.builders import frozen, random_images, random_pool, random_task, random_timm_vit
from torch.nn import functional as F

from mqmk.matcher.errors import MatchError, PoolError
from mqmk.matcher.matchers import match_images
from mqmk.matcher.ridge import RIDGE, WIDTH, features, fit_ridge

DIM = 32


def with_statistics(pool, seen_by_task):
    """The pool with what each task would have counted of these queries and labels."""
    tasks = []
    for task, (query, labels) in zip(pool.tasks, seen_by_task, strict=True):
        seen = features(query, 48)
        sums = torch.zeros(len(task.classes), 48).index_add(0, labels, seen)
        tasks.append(dataclasses.replace(task, plain_gram=seen.T @ seen, plain_sums=sums))
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
    everything = features(torch.cat([query for query, _ in seen]), 48).double()
    penalty = (RIDGE * everything.square().sum() / 48).sqrt() * torch.eye(48).double()
    inputs, targets = torch.cat([everything, penalty]), F.one_hot(rows, 9).double()
    at_once = torch.linalg.lstsq(inputs, torch.cat([targets, torch.zeros(48, 9).double()])).solution
    torch.testing.assert_close(fit_ridge(pool).rows, at_once.T.float(), atol=1e-4, rtol=1e-3)


def test_the_score_of_a_task_is_that_of_its_best_class(learned):
    pool, _ = learned
    query = torch.randn(6, DIM)
    values = features(query, 48) @ fit_ridge(pool).rows.T
    expected = torch.stack([part.amax(dim=1) for part in values.split([3, 2, 4], dim=1)], dim=1)
    assert torch.equal(fit_ridge(pool).scores(query), expected)


def test_a_forgotten_task_leaves_no_trace_in_the_regression(learned):
    pool, _ = learned
    again = pool.with_task(dataclasses.replace(random_task("new", 2), plain_gram=torch.eye(48),
                                               plain_sums=torch.ones(2, 48)))  # fmt: skip
    assert not torch.equal(fit_ridge(again).rows[:9], fit_ridge(pool).rows)
    assert torch.equal(fit_ridge(again.without_task("new")).rows, fit_ridge(pool).rows)


def test_features_are_the_same_numbers_everywhere():
    found = features(torch.ones(1, 3), 4)
    torch.testing.assert_close(found, torch.tensor([[2.0371, 0.0, 1.1968, 2.0460]]), atol=1e-4, rtol=0)
    assert features(torch.randn(2, DIM)).shape == (2, WIDTH)


def test_a_task_without_statistics_is_named():
    vit = frozen(random_timm_vit())
    lean = dataclasses.replace(random_task("lean", 2), plain_gram=None, plain_sums=None)
    pool = random_pool((2,), vit=vit).with_task(lean)
    with pytest.raises(MatchError, match="'lean' has no statistics of plain queries, which ridge needs; use mqmk"):
        match_images("ridge", vit, pool, random_images(1))
    assert match_images("mqmk", vit, pool, random_images(1)).task.shape == (1,)


def test_statistics_that_do_not_fit_are_refused():
    task = random_task("new", 3)
    with pytest.raises(PoolError, match="expected plain_gram and plain_sums together"):
        dataclasses.replace(task, plain_gram=None)
    with pytest.raises(PoolError, match="plain_sums has the shape"):
        dataclasses.replace(task, plain_sums=torch.zeros(3, 7))
    with pytest.raises(PoolError, match="plain_gram has the shape"):
        dataclasses.replace(task, plain_gram=torch.zeros(24, 23))
    wide = dataclasses.replace(task, plain_gram=torch.eye(7), plain_sums=torch.zeros(3, 7))
    with pytest.raises(MatchError, match=r"features of one width, got \[7, 24\]"):
        fit_ridge(random_pool((2,), vit=frozen(random_timm_vit())).with_task(wide))
