"""How certain a match is, and whether an image is known."""

import json
import math
from dataclasses import asdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mqmk.learner.evaluation.calibration_fit import (
    build_reference,
    calibration_error,
    fit_calibration,
    fit_confidence,
    unknown_threshold,
)
from mqmk.learner.evaluation.sample_matches import SampleMatch
from mqmk.matcher.calibration import Calibration, read_confidence
from mqmk.matcher.errors import MatchError

FINITE = st.floats(-2, 2, allow_nan=False)
ROWS = st.lists(st.tuples(FINITE, st.floats(0, 2), st.booleans()), min_size=1, max_size=60)


def calibrate(rows: list[tuple[float, float, bool]]) -> Calibration:
    score, margin, right = zip(*rows, strict=True)
    return fit_calibration(torch.tensor(score), torch.tensor(margin), torch.tensor(right))


def traffic(images: int, seed: int, hardness: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    """Scores, margins and whether the match was right: the clearer, the likelier."""
    source = torch.Generator().manual_seed(seed)
    margin = torch.rand(images, generator=source) ** 2 * 0.3 / (1 + hardness)
    score = 0.5 + margin + 0.1 * torch.randn(images, generator=source)
    sure = torch.sigmoid(25 * margin - 0.5)
    return score, margin, torch.rand(images, generator=source) < sure


@settings(max_examples=60, deadline=None)
@given(ROWS, FINITE, FINITE, st.floats(0, 3), st.floats(0, 3))
def test_a_probability_lies_between_0_and_1_and_a_clearer_match_is_never_less_sure(rows, low, high, near, far):
    sure = calibrate(rows)
    low, high, near, far = min(low, high), max(low, high), min(near, far), max(near, far)
    assert 0 <= sure.probability(low, near) <= sure.probability(high, near) <= 1
    assert sure.probability(low, near) <= sure.probability(low, far) <= sure.probability(low, None) <= 1


@settings(max_examples=40, deadline=None)
@given(ROWS, FINITE, st.floats(0, 3))
def test_a_calibration_says_the_same_after_a_journey_through_json(rows, score, margin):
    before = calibrate(rows)
    after = Calibration(**json.loads(json.dumps(asdict(before), allow_nan=False)))
    assert after == before
    assert after.probability(score, margin) == before.probability(score, margin)


@pytest.mark.parametrize("hardness", [0.0, 2.0])
def test_the_estimate_without_labels_is_near_the_true_rate_also_when_traffic_is_harder(hardness):
    sure = fit_calibration(*traffic(2000, seed=0))
    assert sure.error < 0.05 and sure.rate_error < 0.03
    score, margin, right = traffic(2000, seed=1, hardness=hardness)
    estimated = [sure.probability(*pair) for pair in zip(score.tolist(), margin.tolist(), strict=True)]
    assert abs(sum(estimated) / 2000 - right.float().mean().item()) < 0.05


def test_the_stated_error_of_the_rate_is_what_other_images_show_and_on_the_safe_side():
    stated, seen = [], []
    for seed in range(20):
        sure = fit_calibration(*traffic(300, seed))
        score, margin, right = traffic(300, seed + 1000)
        estimated = [sure.probability(*pair) for pair in zip(score.tolist(), margin.tolist(), strict=True)]
        seen.append(abs(sum(estimated) / 300 - right.float().mean().item()))
        stated.append(sure.rate_error)
    assert sum(seen) < sum(stated) < 2 * sum(seen)
    assert max(stated) < 4 * min(stated), "one fit's statement is not a matter of luck"


def test_the_error_of_a_calibration_that_is_always_sure_is_the_share_of_wrong_matches():
    right = torch.arange(100) % 4 != 0
    assert calibration_error(torch.ones(100).double(), right) == pytest.approx(0.25, abs=0.01)


def test_one_task_alone_has_no_margins_and_is_nearly_always_right():
    sure = fit_calibration(torch.rand(50), torch.full((50,), math.inf), torch.ones(50, dtype=torch.bool))
    assert 0.95 < sure.probability(0.5, None) < 1
    json.dumps(asdict(sure), allow_nan=False)


def test_nothing_cannot_be_calibrated_on():
    with pytest.raises(MatchError, match="held-out"):
        fit_calibration(torch.zeros(0), torch.zeros(0), torch.zeros(0, dtype=torch.bool))


@settings(max_examples=60, deadline=None)
@given(st.lists(FINITE, min_size=1, max_size=300), st.sampled_from([0.0, 0.01, 0.05, 0.5]))
def test_no_more_known_images_than_stated_are_called_unknown(scores, false_alarm):
    threshold = unknown_threshold(torch.tensor(scores, dtype=torch.float64), false_alarm)
    assert sum(score < threshold for score in scores) <= false_alarm * len(scores)


def test_the_threshold_calls_strange_images_unknown():
    threshold = unknown_threshold(0.6 + 0.05 * torch.randn(1000, generator=torch.Generator().manual_seed(0)))
    assert 0.45 < threshold < 0.52


@settings(max_examples=60, deadline=None)
@given(st.lists(FINITE, min_size=2, max_size=300))
def test_a_reference_holds_every_value_in_at_most_ten_bins(values):
    reference = build_reference(values)
    assert sum(reference.counts) == len(values) and len(reference.counts) == len(reference.edges) + 1 <= 10
    assert list(reference.edges) == sorted(set(reference.edges))


def a_match(task: Tensor, score: Tensor, margin: Tensor) -> SampleMatch:
    probability = score.clamp(0, 1)
    return SampleMatch(torch.arange(len(task)), task, score, margin, task[:, None], task, task, probability)


def test_a_pool_carries_what_a_replica_needs_for_every_matcher_and_drift_for_the_serving_one():
    score, margin, right = traffic(200, seed=0)
    true = torch.arange(200) % 2
    task = torch.where(right, true, 1 - true)
    found = {name: a_match(task, score, margin) for name in ("mqmk", "cascade")}
    fitted = fit_confidence(found, ["sea", "birds"], "cascade")
    matching = json.loads(json.dumps(fitted, allow_nan=False))
    serving, other = read_confidence(matching, "cascade"), read_confidence(matching, "mqmk")
    assert serving.threshold == other.threshold
    expected = {"threshold": serving.threshold, "false_alarm": 0.01, "of": "probability"}
    assert matching["unknown"]["cascade"] == expected
    share = (found["cascade"].probability < serving.threshold).float().mean().item()
    assert 0 < share <= 0.01
    assert set(serving.reference) == {"sea", "birds"} and not other.reference
    assert sum(serving.reference["sea"].score.counts) == int((task == 0).sum())
    assert len(json.dumps(matching["reference"])) < 2 * 700  # bounded for each task


def test_a_task_with_few_held_out_images_gets_no_reference():
    score, margin, _ = traffic(30, seed=0)
    true = (torch.arange(30) >= 25).long()
    found = {"mqmk": a_match(true, score, margin)}
    matching = fit_confidence(found, ["sea", "birds"], "mqmk")
    assert set(matching["reference"]["tasks"]) == {"sea"}
