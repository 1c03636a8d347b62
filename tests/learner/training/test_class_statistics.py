"""What training keeps of a task's queries is what a direct count over its images gives."""

import dataclasses

import pytest
import torch
from support.daemons.demo_tasks import demo_task
from torch.nn import functional as F

from mqmk.learner.settings import TrainSettings
from mqmk.learner.training.class_statistics import AnchorStatisticsAccumulator, factorise
from mqmk.learner.training.train import empty_pool, train_task
from mqmk.matcher.backbone import load_backbone
from mqmk.matcher.images import normalise
from mqmk.matcher.regression import features

QUICK = TrainSettings(epochs=1, steps=1, anchor_steps=2, batch=32, e_length=4, anchor_length=3)


@pytest.fixture(scope="module")
def vit():
    return load_backbone(device=torch.device("cpu"))


def test_statistics_are_those_of_the_training_images_without_variation(vit):
    task = demo_task("birds", per_class=8)
    trained = train_task(task, vit, empty_pool(vit, QUICK), QUICK)
    prompt, pool = trained.prompt, trained.added_to(empty_pool(vit, QUICK))
    embedded, labels = vit.embed(normalise(task.training.pixels, vit.info)), task.training.labels
    stem = vit.stem(embedded, pool.g, pool.e_layers[0])
    seen = features(vit.query(stem, pool.g, pool.anchor_prompt)).double()
    plain = vit.query(embedded)
    gram = torch.zeros(seen.shape[1], seen.shape[1], dtype=torch.float64)
    for label in range(5):
        own = labels == label
        gram += seen[own].T @ seen[own] / own.sum()
        torch.testing.assert_close(prompt.feature_means[label].double(), seen[own].mean(dim=0), atol=2e-3, rtol=2e-3)
        mean = F.normalize(plain[own], dim=1).mean(dim=0)
        torch.testing.assert_close(prompt.plain_means[label], mean, atol=1e-5, rtol=1e-4)
    kept = prompt.factor.double().T @ prompt.factor.double() + prompt.residual[0].double().diag()
    torch.testing.assert_close(kept.diagonal(), gram.diagonal(), atol=1e-2, rtol=1e-2)
    assert (kept - gram).norm() < 0.05 * gram.norm()


def test_a_factor_is_the_best_of_its_rank():
    rows = torch.randn(50, 40, dtype=torch.float64) * torch.linspace(3, 0.1, 40)
    gram = rows.T @ rows
    factor = factorise(gram, 10)
    values = torch.linalg.eigvalsh(gram)
    assert float((gram - factor.T @ factor).norm()) == pytest.approx(float(values[:-10].norm()), rel=1e-3)
    assert torch.equal(factorise(gram, 10), factor)


def test_statistics_are_exact_in_half_precision():
    accumulator = AnchorStatisticsAccumulator((3, 2), torch.device("cpu"))
    accumulator.add(torch.randn(5, 8), torch.tensor([0, 0, 1, 0, 1]))
    for tensor in vars(accumulator.value()).values():
        assert torch.equal(tensor.half().float(), tensor)


def test_without_plain_means_the_plain_pass_is_saved(vit):
    task, passes = demo_task("birds", per_class=8), []
    run_query = vit.query
    vit.query = lambda stem, *prompts: (passes.append(len(prompts)), run_query(stem, *prompts))[1]
    try:
        settings = dataclasses.replace(QUICK, plain_means=False)
        prompt = train_task(task, vit, empty_pool(vit, settings), settings).prompt
    finally:
        vit.query = run_query
    assert 0 not in passes  # no query without prompts
    assert prompt.plain_means is None and prompt.factor is not None


def test_without_steps_for_it_there_is_no_anchor(vit):
    settings = dataclasses.replace(QUICK, anchor_steps=0)
    trained = train_task(demo_task("birds", per_class=4), vit, empty_pool(vit, settings), settings)
    assert trained.anchor is None and trained.prompt.factor is None
    assert not trained.added_to(empty_pool(vit, settings)).has_statistics


def test_later_tasks_take_the_anchor_as_it_is(vit):
    pool = train_task(demo_task("birds", per_class=4), vit, empty_pool(vit, QUICK), QUICK).added_to(
        empty_pool(vit, QUICK)
    )
    later = train_task(demo_task("sea", per_class=4), vit, pool, QUICK)
    assert torch.equal(later.anchor, pool.anchor)
    assert later.added_to(pool).has_statistics
