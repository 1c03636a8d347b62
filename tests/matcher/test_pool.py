"""A pool is a value: changes return another pool and share what is kept."""

import dataclasses

import pytest
import torch
from support.builders import frozen, random_pool, random_task, random_timm_vit

from mqmk.matcher.errors import PoolError
from mqmk.matcher.pool import PromptPool, group_classes


@pytest.fixture
def pool() -> PromptPool:
    return random_pool((3, 1, 4), vit=frozen(random_timm_vit()))


def test_with_task_returns_a_new_pool_and_leaves_the_old_one_alone(pool):
    grown = pool.with_task(random_task("new", 2))
    assert [task.name for task in pool.tasks] == ["task0", "task1", "task2"]
    assert [task.name for task in grown.tasks] == ["task0", "task1", "task2", "new"]
    assert all(mine is theirs for mine, theirs in zip(pool.tasks, grown.tasks, strict=False))


def test_without_task_drops_one_and_keeps_the_others(pool):
    smaller = pool.without_task("task1")
    assert [task.name for task in smaller.tasks] == ["task0", "task2"]
    assert smaller.tasks[1] is pool.tasks[2]
    with pytest.raises(PoolError, match="no task 'birds' in the pool; it has task0, task1, task2"):
        pool.without_task("birds")


def test_measurements_do_not_outlive_the_pool_they_were_made_on(pool):
    measured = pool.with_matching({"matchers": {"mqmk": {"rate": 0.9, "cost": 3}}})
    assert measured.matching
    assert measured.with_task(random_task("new", 2)).matching == {}
    assert measured.without_task("task0").matching == {}


def test_a_pool_cannot_be_changed(pool):
    with pytest.raises(dataclasses.FrozenInstanceError):
        pool.tasks = ()
    with pytest.raises(dataclasses.FrozenInstanceError):
        pool.tasks[0].name = "other"


def test_derived_rows_follow_the_order_of_tasks(pool):
    assert pool.labels[0] == (0, "task0-0")
    assert pool.labels[3] == (1, "task1-0")
    assert pool.row_task.tolist() == [0, 0, 0, 1, 2, 2, 2, 2]
    torch.testing.assert_close(pool.head[3], pool.tasks[1].head[0] / pool.tasks[1].head[0].norm())
    torch.testing.assert_close(pool.mean_e.rows[0], torch.stack([task.e_prompt for task in pool.tasks]).mean(dim=0))


def test_neighbouring_classes_share_a_key():
    assert group_classes(5, 5).tolist() == [0, 1, 2, 3, 4]
    assert group_classes(5, 2).tolist() == [0, 0, 0, 1, 1]
    assert group_classes(4, 1).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"name": ""}, "expected a name"),
        ({"classes": ()}, "distinct classes"),
        ({"classes": ("a", "a", "b")}, "distinct classes"),
        ({"keys": torch.randn(4, 32)}, "expected 1 to 3 keys, got 4"),
        ({"head": torch.randn(2, 32)}, "expected 3 rows in head, got 2"),
        ({"head": torch.randn(3, 16)}, r"head has the shape \[3, 16\], of another width or rank"),
        ({"keys": torch.randn(3)}, "of another width or rank"),
        ({"means": torch.full((3, 32), torch.nan)}, "means has values that are not finite"),
        ({"e_prompt": torch.randn(2, 2, 3, 32).double()}, "expected float32 in e_prompt"),
        ({"class_samples": (4, 4)}, r"expected 3 numbers in class_samples, got \[4, 4\]"),
        ({"class_samples": (4, 4, -1)}, "expected 3 numbers in class_samples"),
        ({"class_samples": (4, 4, True)}, "expected 3 numbers in class_samples"),
    ],
)
def test_a_task_prompt_refuses_what_does_not_fit(change, reason):
    with pytest.raises(PoolError, match=reason):
        dataclasses.replace(random_task("new", 3), **change)


@pytest.mark.parametrize(
    ("task", "reason"),
    [
        (lambda: random_task("task0", 2), "already has a task 'task0'"),
        (lambda: random_task("new", 2, length=4), r"expected an e-prompt \[2, 2, 3, 32\].*got \[2, 2, 4, 32\]"),
        (lambda: random_task("new", 2, layers=3), "expected an e-prompt"),
        (lambda: random_task("new", 2, dim=16), "expected an e-prompt"),
    ],
)
def test_a_pool_refuses_a_task_that_does_not_fit(pool, task, reason):
    with pytest.raises(PoolError, match=reason):
        pool.with_task(task())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"g_layers": (0,)}, "g_prompt: expected"),
        ({"e_layers": ()}, "layers must rise"),
        ({"e_layers": (3, 2)}, "layers must rise"),
        ({"e_layers": (-1, 2)}, "layers must rise"),
        ({"e_layers": (-2, 3)}, "layers must rise"),
        ({"g_layers": (-5, 0)}, "layers must rise"),
        ({"g_prompt": torch.full((2, 2, 5, 32), torch.inf)}, "finite"),
    ],
)
def test_a_pool_refuses_impossible_shapes(pool, change, reason):
    with pytest.raises(PoolError, match=reason):
        dataclasses.replace(pool, **change)
