"""The speed benchmark compares like with like, and judges its promises correctly."""

import pytest
import torch
from builders import frozen, random_images, random_pool, random_timm_vit

from mqmk.learner.bench_speed import Row, judge, naive
from mqmk.matcher.matchers import match


def test_the_naive_way_computes_the_same_answer():
    vit = frozen(random_timm_vit())
    pool = random_pool((3, 2, 4), vit=vit)
    images = random_images(5)
    torch.testing.assert_close(naive(vit, pool, images), match("mqmk", vit, pool, images).query, atol=1e-5, rtol=1e-5)


def rows(**changes: float) -> list[Row]:
    ms = {"plain": 100.0, "naive": 1100.0, "mqmk": 760.0, "mqmk-ei": 180.0, "sqsk": 190.0, "sqmk": 190.0,
          "cascade": 320.0} | changes  # fmt: skip
    few = [Row("vit_base_patch16_224", 10, name, t, t / 1100, t / 100, 1.0) for name, t in ms.items()]
    many = [Row("vit_base_patch16_224", 100, "cascade", ms["cascade"] * 1.1, ms["cascade"] * 1.1 / 10100, 3.5, 1.0)]
    return few + many


@pytest.mark.parametrize(
    ("changes", "broken"),
    [
        ({}, None),
        ({"mqmk": 900.0}, "mqmk at 10 tasks, share of naive <= 0.8"),
        ({"cascade": 500.0}, "cascade at 100 tasks, times faster than naive >= 20"),
        ({"sqsk": 230.0}, "sqsk, plain forwards <= 2.2"),
    ],
)
def test_a_broken_promise_is_named(changes, broken):
    failed = [bar.promise for bar in judge(rows(**changes)) if not bar.holds]
    assert failed == ([f"vit_base_patch16_224: {broken}"] if broken else [])
