"""Drift is seen where there is some, and nowhere else."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mqmk.deploy.serving.telemetry.drift import DriftWindow, excess_drift, population_stability_index
from mqmk.learner.evaluation.calibration_fit import build_reference
from mqmk.matcher.calibration import Reference

COUNTS = st.lists(st.integers(0, 200), min_size=2, max_size=10)


@settings(max_examples=60, deadline=None)
@given(COUNTS, st.data())
def test_the_stability_index_is_never_negative_and_zero_for_the_same_counts(counts, data):
    other = data.draw(st.lists(st.integers(0, 200), min_size=len(counts), max_size=len(counts)))
    assert population_stability_index(counts, other) >= 0
    assert population_stability_index(counts, counts) == 0
    assert excess_drift(counts, other) >= 0
    assert excess_drift(counts, [0] * len(counts)) == 0


def test_drift_is_seen_in_other_images_and_not_in_more_of_the_same():
    source = torch.Generator().manual_seed(0)
    reference = build_reference(torch.randn(200, generator=source).tolist())
    same, shifted = DriftWindow(reference), DriftWindow(reference)
    for value in torch.randn(700, generator=source).tolist():
        same.add(value)
        shifted.add(value + 1)
    assert len(same) == 500
    assert same.drift < 0.1 and shifted.drift > 0.25


def test_the_drift_of_a_window_follows_every_image():
    reference = Reference((0.5,), (500, 500))
    window = DriftWindow(reference)
    for number in range(400):
        window.add(0.9)
        assert window.drift == window.drift == excess_drift((500, 500), (0, number + 1))


def test_few_images_of_many_tasks_give_no_false_alarm():
    source = torch.Generator().manual_seed(0)
    drifts = []
    for _ in range(200):  # tasks
        window = DriftWindow(build_reference(torch.randn(40, generator=source).tolist()))
        for value in torch.randn(100, generator=source).tolist():
            window.add(value)
        drifts.append(window.drift)
    assert max(drifts) < 0.1
