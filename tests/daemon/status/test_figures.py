"""One definition for each percentage: a share of images, with their number and a 95 % interval."""

import pytest

from mqmk.daemon.status.figures import Figures, Share, task_figures, version_figures
from mqmk.daemon.words import command, plural

SHARES = {Share(520 / 550, 550): "94.5% (±2.2, 550 images)", Share(1.0, 5): "100.0% (±43, 5 images)",
          Share(0.0, 1): "0.0% (±79, 1 image)"}  # fmt: skip


@pytest.mark.parametrize("share", SHARES)
def test_a_share_is_said_with_the_number_of_images_and_how_far_its_interval_reaches(share):
    assert str(share) == SHARES[share]
    for end in share.interval:  # Wilson's definition: true shares of which the value is 1.96 deviations away
        deviation = (end * (1 - end) / share.images) ** 0.5
        assert abs(share.value - end) == pytest.approx(1.959964 * deviation, abs=1e-6)


def test_without_a_number_of_images_no_interval_is_claimed():
    assert (str(Share(0.5)), Share(0.5).cell(), Share(0.5).interval) == ("50.0%", "50.0%", None)


OLD = {  # as releases before 0.2 wrote it: means over tasks, no number of images
    "held_out": 40, "matching_rate": 0.85, "accuracy": 0.75,
    "tasks": {"few": {"matching_rate": 0.8, "accuracy": 0.5}, "many": {"matching_rate": 0.9, "accuracy": 1.0}},
    "confusion": {"few": {"few": 8, "many": 2}, "many": {"many": 27, "few": 3}},
}  # fmt: skip


def test_a_version_without_a_number_of_images_is_counted_from_its_tasks():
    found = version_figures(OLD)
    assert found.accuracy and found.accuracy.value == pytest.approx((10 * 0.5 + 30 * 1.0) / 40)
    assert found.matching and found.matching.value == pytest.approx((10 * 0.8 + 30 * 0.9) / 40)
    assert found.images == 40
    assert task_figures(OLD, "few") == Figures(Share(0.8, 10), Share(0.5, 10))


def test_a_version_that_says_how_many_images_is_believed():
    document = OLD | {"images": 20, "matching_rate": 0.7, "accuracy": 0.6}
    document["tasks"] = {"few": {"matching_rate": 0.8, "accuracy": 0.5, "images": 4}}
    assert version_figures(document) == Figures(Share(0.7, 20), Share(0.6, 20))
    assert version_figures(document).version_document()["calibration_error"] is None, "of an older release"
    assert version_figures(document | {"calibration_error": 0.02}).version_document()["calibration_error"] == 0.02
    assert task_figures(document, "few").images == 4


def test_what_was_not_measured_has_no_figures():
    assert version_figures({"held_out": 0, "tasks": {}}) == task_figures(OLD, "other") == Figures()
    empty = {"images": None, "matching_rate": None, "matching_rate_interval": None, "accuracy": None}
    assert Figures().document() == empty | {"accuracy_interval": None}


def test_counts_and_commands_are_written_as_a_person_would_type_them():
    assert [plural(1, "task"), plural(0, "task"), plural(1500, "class", "classes")] == [
        "1 task", "0 tasks", "1,500 classes",
    ]  # fmt: skip
    assert command("promote", "my mixed up") == "`mqmk-daemon promote 'my mixed up'`"
