"""What training keeps of a task's queries is what a direct count over its images gives."""

import dataclasses

import pytest
import torch
from support.daemons.demo_tasks import demo_task
from torch.nn import functional as F

from mqmk.learner.settings import TrainSettings
from mqmk.learner.training.train import empty_pool, train_task
from mqmk.matcher.backbone import load_backbone
from mqmk.matcher.images import normalise
from mqmk.matcher.ridge import features

QUICK = TrainSettings(epochs=1, batch=32, e_length=4)


@pytest.fixture(scope="module")
def vit():
    return load_backbone(device=torch.device("cpu"))


def test_plain_statistics_are_sums_over_the_training_images_without_variation(vit):
    task = demo_task("birds", per_class=8)
    prompt = train_task(task, vit, empty_pool(vit, QUICK), QUICK, regression=True).prompt
    query, labels = vit.plain(normalise(task.training.pixels, vit.info)), task.training.labels
    seen = features(query).double()
    torch.testing.assert_close(prompt.plain_gram.double(), seen.T @ seen, atol=1e-3, rtol=1e-4)
    for label in range(5):
        own = labels == label
        torch.testing.assert_close(prompt.plain_sums[label].double(), seen[own].sum(dim=0), atol=1e-3, rtol=1e-4)
        mean = F.normalize(query[own], dim=1).mean(dim=0)
        torch.testing.assert_close(prompt.plain_means[label], mean, atol=1e-5, rtol=1e-4)


def test_a_task_is_not_burdened_with_the_regression_unless_asked(vit):
    prompt = train_task(demo_task("birds", per_class=4), vit, empty_pool(vit, QUICK), QUICK).prompt
    assert prompt.plain_means is not None
    assert (prompt.plain_gram, prompt.plain_sums) == (None, None)


def test_without_them_the_plain_pass_is_saved(vit):
    task, passes = demo_task("birds", per_class=8), []
    run_query = vit.query
    vit.query = lambda stem, *prompts: (passes.append(len(prompts)), run_query(stem, *prompts))[1]
    try:
        settings = dataclasses.replace(QUICK, plain_means=False)
        prompt = train_task(task, vit, empty_pool(vit, settings), settings).prompt
    finally:
        vit.query = run_query
    assert 0 not in passes  # no query without prompts
    assert (prompt.plain_means, prompt.plain_gram, prompt.plain_sums) == (None, None, None)
