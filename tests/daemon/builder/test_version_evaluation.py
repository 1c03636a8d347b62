"""What a version's document says: chosen on one half of the held-out images, reported on the other, counted once."""

import json
from dataclasses import replace

import pytest
from support.builders import frozen, random_pool, random_task, random_timm_vit
from support.noise import Noise

from mqmk.daemon.builder.version_evaluation import (
    MOST_CLASSES,
    MOST_MISTAKES,
    EvaluatedPool,
    NewTask,
    evaluate_version,
    needed_matchers,
)
from mqmk.daemon.config.sections import Config
from mqmk.deploy.serving.settings import ServeSettings
from mqmk.learner.evaluation.calibration_fit import fit_calibration_once
from mqmk.learner.evaluation.evaluate import split_halves
from mqmk.learner.evaluation.sample import choose_sample
from mqmk.learner.evaluation.sample_answers import MatchedSample
from mqmk.learner.evaluation.sample_evaluation import TaskShare
from mqmk.learner.evaluation.sample_matches import RowBudget, match_sample
from mqmk.matcher.pool import PromptPool
from mqmk.matcher.predictor import choose_matcher
from mqmk.matcher.prompted_vit import FrozenViT


@pytest.fixture
def vit() -> FrozenViT:
    return frozen(random_timm_vit())


def evaluation_of(vit: FrozenViT, pool: PromptPool, per_class: tuple[int, ...]) -> MatchedSample:
    """Noise, so many images for each class of a task."""
    noise = Noise(pool, per_class)
    sample = choose_sample(noise.tasks)
    matchers = needed_matchers(Config(), pool)
    found = match_sample(vit, pool, sample, noise.reader(sample), matchers, budget=RowBudget.of(1000))
    return MatchedSample(pool, sample, *found)


def measured(config: Config, evaluation: MatchedSample) -> EvaluatedPool:
    return evaluate_version(config, evaluation, len(evaluation.sample), {})


def test_the_matcher_is_chosen_on_one_half_and_every_figure_is_of_the_other(vit: FrozenViT) -> None:
    evaluation = evaluation_of(vit, random_pool((2, 3), vit=vit), (20, 20))
    found = measured(Config(), evaluation)
    halves, card = split_halves(evaluation.sample), found.pool.matching
    evaluation = evaluation.answer(evaluation.fit(halves.choosing, fit_calibration_once))
    assert (card["held_out"], found.document["images"], found.document["held_out"]) == (50, 50, 100)
    assert found.document["chosen_on_same_images"] is False
    matcher = found.document["matcher"]
    assert matcher == choose_matcher(found.pool, Config().serve.budget, 3)
    for side, rate in ((halves.choosing, card["matchers"][matcher]["rate"]),
                       (halves.reporting, found.document["matching_rate"]),
                       (halves.reporting, found.document["matchers"][matcher]["rate"])):  # fmt: skip
        assert rate == evaluation.tally(matcher, side).matching_rate
    used = evaluation.tally(matcher, halves.reporting)
    perfect = evaluation.tally("perfect", halves.reporting)
    assert found.document["accuracy"] == used.accuracy
    assert found.document["calibration_error"] == used.calibration_error
    assert found.document["tasks"]["task1"] == {
        "images": 30, "matching_rate": used.tasks[1].matching_rate, "accuracy": used.tasks[1].accuracy,
        "accuracy_given_task": perfect.tasks[1].accuracy,
    }  # fmt: skip
    assert sum(sum(row.values()) for row in found.document["confusion"].values()) == 50


def test_too_few_images_are_on_both_sides_and_the_document_says_so(vit: FrozenViT) -> None:
    evaluation = evaluation_of(vit, random_pool((2, 3), vit=vit), (20, 4))
    found = measured(Config(), evaluation)
    assert found.document["chosen_on_same_images"] is True
    assert (found.document["images"], found.document["held_out"]) == (20 + 12, 40 + 12)
    assert {name: row["images"] for name, row in found.document["tasks"].items()} == {"task0": 20, "task1": 12}
    named = measured(Config(serve=ServeSettings(matcher="mqmk")), evaluation)
    assert named.document["matcher"] == "mqmk" and named.document["chosen_on_same_images"] is False, (
        "nothing was chosen"
    )


def test_the_document_lists_the_worst_classes_and_the_most_frequent_mistakes(vit: FrozenViT) -> None:
    found = measured(Config(), evaluation_of(vit, random_pool((2, 3), vit=vit), (20, 20))).document
    classes, mistakes = found["classes"], found["mistaken_classes"]
    assert sum(row["images"] for row in classes.values()) == found["images"] == 50
    assert sum(row["right"] for row in classes.values()) == round(found["accuracy"] * 50)
    rates = [row["right"] / row["images"] for row in classes.values()]
    assert rates == sorted(rates)
    counts = [images for _, _, images in mistakes]
    assert counts == sorted(counts, reverse=True) and sum(counts) == 50 - round(found["accuracy"] * 50) > 0
    assert all(true != answered for true, answered, _ in mistakes)


def test_what_is_recorded_of_classes_stays_small_however_many_there_are(vit: FrozenViT) -> None:
    found = measured(Config(), evaluation_of(vit, random_pool((30, 30), vit=vit), (4, 4))).document
    assert len(found["classes"]) == len(found["mistaken_classes"]) == MOST_CLASSES
    assert len(json.dumps([found["classes"], found["mistaken_classes"]])) < 6000


def test_a_task_without_held_out_images_lowers_no_figure(vit: FrozenViT) -> None:
    pool = random_pool((2,), vit=vit).with_task(random_task("unmeasured", 2))
    found = measured(Config(), evaluation_of(vit, pool, (20,))).document
    assert found["tasks"].keys() == {"task0"}
    assert found["accuracy"] == found["tasks"]["task0"]["accuracy"] > 0
    assert found["matching_rate"] == found["tasks"]["task0"]["matching_rate"]


def test_accuracy_and_matching_rate_are_shares_of_images_not_means_of_tasks(vit: FrozenViT) -> None:
    found = measured(Config(), evaluation_of(vit, random_pool((2, 3), vit=vit), (40, 10))).document
    for figure in ("accuracy", "matching_rate"):
        right = sum(row["images"] * row[figure] for row in found["tasks"].values())
        assert found[figure] == pytest.approx(right / found["images"])


def test_nothing_held_out_is_nothing_said(vit: FrozenViT) -> None:
    found = measured(Config(), evaluation_of(vit, random_pool((2,), vit=vit), ()))
    assert found.document == {"held_out": 0, "images": 0, "tasks": {}} and not found.files and not found.pool.matching


def test_a_pool_with_a_task_that_has_no_plain_means_is_measured_by_the_others(vit: FrozenViT) -> None:
    bare = replace(random_task("bare", 2), plain_means=None)
    found = measured(Config(), evaluation_of(vit, random_pool((2,), vit=vit).with_task(bare), (12, 12)))
    assert found.document["matchers"].keys() == {"mqsk", "mqmk", "mqmk-ei", "cascade", "anchor", "fused"}


def test_only_the_new_task_gets_metrics_and_by_images_outside_the_sample_where_there_are_more(vit: FrozenViT) -> None:
    pool = random_pool((2, 3), vit=vit)
    evaluation = evaluation_of(vit, pool, (20, 20))
    share, perfect = TaskShare(99, 0.123456, 0.0123456), TaskShare(99, 1.0, 0.876543)
    new = NewTask(60, lambda matcher, _fitted: perfect if matcher == "perfect" else share)
    found = evaluate_version(Config(), evaluation, 100, {1: new})
    old, _ = found.pool.tasks
    assert old.metrics == pool.tasks[0].metrics
    assert found.document["tasks"]["task1"]["images"] == 30 and found.document["sampled"] is False
    assert found.document["tasks"]["task1"]["accuracy_given_task"] == 0.876543
    more = evaluate_version(Config(), evaluation, 140, {1: replace(new, images=100)})
    assert more.document["tasks"]["task1"] == {
        "images": 99, "matching_rate": 0.123456, "accuracy": 0.0123456, "accuracy_given_task": 0.876543,
    }  # fmt: skip
    assert more.pool.tasks[-1].metrics == {
        "images": 99, "matching_rate": 0.1235, "accuracy": 0.0123, "accuracy_given_task": 0.8765,
    }  # fmt: skip
    assert more.document["sampled"] is True and more.document["held_out"] == 140
    none = evaluate_version(Config(), evaluation_of(vit, pool, (20, 0)), 40, {1: replace(new, images=0)})
    assert none.pool.tasks[-1].metrics == {} and none.document["tasks"].keys() == {"task0"}


def test_a_document_tells_of_the_most_frequent_mistakes_only(vit: FrozenViT) -> None:
    pool = random_pool((1,) * 40, vit=vit)
    evaluation = evaluation_of(vit, pool, (20,) * 40)
    confusion = measured(Config(), evaluation).document["confusion"]
    assert confusion.keys() == {task.name for task in pool.tasks}
    mistakes = [n for true, row in confusion.items() for matched, n in row.items() if matched != true]
    assert 0 < len(mistakes) <= MOST_MISTAKES
