"""Methods on statistics of frozen features compute what their papers say."""

import dataclasses

import numpy as np
import pytest
import torch
from support.method_tasks import QUICK, learned
from torch.nn import functional as F

from mqmk.learner.bench.methods.fecam import FeCAM, mahalanobis_scores, normalise_covariances
from mqmk.learner.bench.methods.joint import LinearProbe
from mqmk.learner.bench.methods.ncm import NCM
from mqmk.learner.bench.methods.probe_replay import ProbeReplay
from mqmk.learner.bench.methods.ranpac import PENALTIES, RanPAC, penalty_errors
from mqmk.matcher.images import normalise


@pytest.fixture(scope="module")
def images(vit, tasks):
    return torch.cat([normalise(task.held_out.pixels, vit.info) for task in tasks])


def plain(vit, images):
    return vit.plain(normalise(images.pixels, vit.info))


def test_ncm_is_the_cosine_with_the_mean_of_normalised_features(vit, tasks, images):
    scores = learned(NCM(vit, QUICK), tasks).predict(images).scores
    query = F.normalize(vit.plain(images), dim=1)
    training = tasks[0].training
    mean = F.normalize(plain(vit, training), dim=1)[training.labels == 1].mean(dim=0)
    torch.testing.assert_close(scores[:, 1], query @ mean / mean.norm())


def test_ranpac_is_ridge_regression_over_all_tasks_at_once(vit, tasks, images):
    settings = dataclasses.replace(QUICK, width=0)
    method = learned(RanPAC(vit, settings), tasks)
    features = torch.cat([plain(vit, task.training) for task in tasks]).double()
    labels = torch.cat([task.training.labels + first for task, first in zip(tasks, (0, 3, 4), strict=True)])
    gram = features.T @ features + method.penalty * torch.eye(vit.dim)
    head = torch.linalg.inv(gram) @ features.T @ F.one_hot(labels, 6).double()
    torch.testing.assert_close(method.predict(images).scores, (vit.plain(images).double() @ head).float())


def test_random_features_are_relu_of_the_unnormalised_class_token(vit, images):
    directions = torch.from_numpy(np.random.RandomState(0).standard_normal((vit.dim, 24)))
    expected = (vit.plain(images).double() @ directions).clamp(min=0)
    torch.testing.assert_close(RanPAC(vit, QUICK)._expand(images), expected, atol=1e-4, rtol=1e-4)


def test_the_order_of_tasks_does_not_matter_to_ranpac(vit, tasks, images):
    forwards, backwards = learned(RanPAC(vit, QUICK), tasks), learned(RanPAC(vit, QUICK), tasks[::-1])
    one, other = forwards.predict(images).scores, backwards.predict(images).scores
    assert forwards.penalty == backwards.penalty
    torch.testing.assert_close(one, other[:, [3, 4, 5, 2, 0, 1]], atol=1e-6, rtol=1e-6)


def test_penalties_are_judged_alike_with_more_images_than_features_and_with_fewer():
    generator = torch.Generator().manual_seed(0)
    seen, targets = torch.rand(20, 30, generator=generator).double(), torch.eye(4).double().repeat(5, 1)
    order = torch.randperm(20, generator=torch.Generator().manual_seed(5))
    held, rest = order[:4], order[4:]
    for width in (8, 30):
        part = seen[:, :width]
        errors = penalty_errors(part, targets, seed=5)
        for place in (8, 10, 16):  # penalties 1, 100 and 10^8
            gram = part[rest].T @ part[rest] + PENALTIES[place] * torch.eye(width).double()
            fitted = part[held] @ torch.linalg.solve(gram, part[rest].T @ targets[rest])
            torch.testing.assert_close(errors[place], (fitted - targets[held]).square().sum())


def test_a_huge_penalty_gives_the_direction_of_class_sums():
    seen, targets = torch.randn(20, 5, dtype=torch.float64), F.one_hot(torch.arange(20) % 2).double()
    head = torch.linalg.solve(seen.T @ seen + 1e9 * torch.eye(5), seen.T @ targets)
    torch.testing.assert_close(F.normalize(head, dim=0), F.normalize(seen.T @ targets, dim=0), atol=1e-6, rtol=1e-6)


def test_penalties_are_judged_on_images_they_were_not_fitted_on():
    generator = torch.Generator().manual_seed(1)
    seen = torch.randn(50, 8, generator=generator, dtype=torch.float64)
    targets = F.one_hot(torch.arange(50) % 2).double()
    errors = penalty_errors(seen, targets, seed=0)
    order = torch.randperm(50, generator=torch.Generator().manual_seed(0))
    held, rest = order[:10], order[10:]
    for number in (4, 9):
        gram = seen[rest].T @ seen[rest] + PENALTIES[number] * torch.eye(8)
        head = torch.linalg.solve(gram, seen[rest].T @ targets[rest])
        torch.testing.assert_close(errors[number], (seen[held] @ head - targets[held]).square().sum())


@pytest.mark.parametrize("kind", ["prefix", "adapter"])
def test_a_first_session_adapts_on_the_first_task_only(kind, vit, tasks):
    method = RanPAC(vit, QUICK, kind)
    method.learn(tasks[0])
    first = {name: value.clone() for name, value in method.kept().items() if "adapted" in name}
    assert method.trained > 0
    method.learn(tasks[1])
    assert method.trained == 0
    assert all(torch.equal(method.kept()[name], value) for name, value in first.items())
    assert sum(value.numel() for value in first.values()) == (
        vit.depth * 2 * 20 * vit.dim if kind == "prefix" else vit.depth * 2 * 64 * vit.dim
    )


def test_fecam_with_the_identity_is_euclidean_distance():
    query, means = torch.randn(4, 3), torch.randn(2, 3)
    scores = mahalanobis_scores(query, means, torch.eye(3).expand(2, 3, 3))
    torch.testing.assert_close(scores, -torch.cdist(query, means).square(), atol=1e-5, rtol=1e-5)


def test_fecam_with_one_covariance_for_all_classes_is_linear_discriminant_analysis():
    query, means = torch.randn(50, 3), torch.randn(4, 3)
    root = torch.randn(3, 3)
    precision = torch.linalg.inv(root @ root.T + torch.eye(3))
    scores = mahalanobis_scores(query, means, precision.expand(4, 3, 3))
    linear = query @ precision @ means.T - 0.5 * (means @ precision * means).sum(dim=1)
    assert scores.argmax(dim=1).tolist() == linear.argmax(dim=1).tolist()


def test_fecam_shrinks_by_mean_entries_and_divides_by_deviations():
    covariance = torch.tensor([[4.0, 1.0], [1.0, 2.0]])
    found = normalise_covariances(covariance[None], diagonal=1.0, off_diagonal=2.0)[0]
    shrunk = torch.tensor([[4.0 + 3.0, 1.0 + 2.0], [1.0 + 2.0, 2.0 + 3.0]])
    torch.testing.assert_close(found, shrunk / torch.tensor([[7.0, 35**0.5], [35**0.5, 5.0]]))


def test_fecam_keeps_a_matrix_for_each_class(vit, tasks):
    kept = learned(FeCAM(vit, QUICK), tasks[:2]).kept()
    assert kept["task0/precisions"].shape == (3, vit.dim, vit.dim)
    assert kept["task1/means"].shape == (1, vit.dim)


def test_a_probe_follows_from_its_statistics_alone(vit, tasks, images):
    settings = dataclasses.replace(QUICK, replay_epochs=3)
    one = learned(ProbeReplay(vit, settings), [tasks[0], tasks[2]])
    other = learned(ProbeReplay(vit, settings), [tasks[0], tasks[2]])
    assert torch.equal(one.predict(images).scores, other.predict(images).scores)
    kept = one.kept()
    assert kept["task0/covariances"].shape == (1, vit.dim, vit.dim)
    assert kept["head"].shape == (5, vit.dim)


def test_a_linear_probe_learns_its_training_images(vit, tasks):
    method = learned(LinearProbe(vit, QUICK), tasks[:1])
    training = tasks[0].training
    found = method.predict(normalise(training.pixels, vit.info)).scores.argmax(dim=1)
    assert (found == training.labels).float().mean() > 0.8
