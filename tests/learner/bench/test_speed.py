"""The speed benchmark compares like with like, and checks its criteria correctly."""

import pytest
import torch
from support.builders import frozen, random_images, random_pool, random_timm_vit

from mqmk.learner.bench.speed import Row, check_criteria, naive, whole_pass
from mqmk.learner.bench.timing import time_call, time_in_turns
from mqmk.matcher.matchers import match_images


def test_the_naive_way_computes_the_same_answer():
    vit = frozen(random_timm_vit())
    pool = random_pool((3, 2, 4), vit=vit)
    images = random_images(5)
    torch.testing.assert_close(
        naive(vit, pool, images), match_images("mqmk", vit, pool, images).query, atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("prompted", [False, True])
def test_whole_passes_compute_in_the_precision_of_ours(prompted):
    vit, images = frozen(random_timm_vit()), random_images(3)
    pool = random_pool((3,), vit=vit)
    prompts = (pool.g, pool.e(0)) if prompted else ()
    vit.autocast = lambda: torch.autocast("cpu", dtype=torch.bfloat16)  # as on a GPU
    seen = set()
    for block in vit._vit.blocks:
        block.attn.proj.register_forward_hook(lambda _module, _given, found: seen.add(found.dtype))
    whole = whole_pass(vit, images, *prompts)
    assert (seen, whole.dtype) == ({torch.bfloat16}, torch.float32)
    stem = vit.stem(vit.embed(images), pool.g if prompted else None, pool.e_layers[0])
    torch.testing.assert_close(whole, vit.query(stem, *prompts), atol=0.2, rtol=0.1)


def test_every_timed_call_waits_for_the_gpu_before_and_after(monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("wait"))
    time_call(lambda: calls.append("speed"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 0)
    time_in_turns({"step": lambda: calls.append("training")}, rounds=2, turn_seconds=0.0)
    assert calls == ["wait", "speed", "wait"] + ["wait", "training", "wait"] * 2


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
    failed = [bar.promise for bar in check_criteria(rows(**changes)) if not bar.holds]
    assert failed == ([f"vit_base_patch16_224: {broken}"] if broken else [])
