"""Answers in words, and which matcher `auto` means."""

import dataclasses

import pytest
import torch
from support.builders import frozen, random_images, random_pool, random_task, random_timm_vit

from mqmk.matcher.errors import MatchError
from mqmk.matcher.matchers import MatchSettings
from mqmk.matcher.predictor import PredictSettings, choose_matcher, name_answers, predict


@pytest.fixture
def vit():
    return frozen(random_timm_vit())


@pytest.fixture
def pool(vit):
    return random_pool((3, 1, 4), vit=vit)


def rates(**matchers):
    return {
        "matchers": {name.replace("_", "-"): {"rate": r, "accuracy": r, "cost": c} for name, (r, c) in matchers.items()}
    }


def test_an_answer_names_task_score_runner_up_margin_and_cost(vit, pool):
    images = random_images(4)
    predicted = predict(vit, pool, images, PredictSettings(matcher="mqmk"))
    for place, answer in enumerate(name_answers(pool, predicted, top_k=2)):
        found = predicted.match
        assert answer.task == pool.tasks[int(found.task[place])].name
        assert answer.runner_up == pool.tasks[int(found.runner_up[place])].name
        assert answer.runner_up != answer.task
        assert answer.margin == pytest.approx(float(found.scores[place].topk(2).values.diff().abs()))
        assert answer.label == answer.top[0].label
        assert answer.label in pool.tasks[int(found.task[place])].classes
        assert (answer.matcher, answer.num_queries) == ("mqmk", 3)
        assert 1 <= len(answer.top) <= 2
        assert answer.probability == pytest.approx(float(predicted.probabilities[place].max()))


def test_the_read_out_over_all_classes_may_answer_another_tasks_label(vit, pool):
    predicted = predict(vit, pool, random_images(32), PredictSettings(matcher="mqmk", readout="all"))
    assert predicted.probabilities.sum(dim=1).tolist() == pytest.approx([1.0] * 32)
    answers = name_answers(pool, predicted)
    assert any(answer.top[0].task != answer.task for answer in answers)
    inside = predict(vit, pool, random_images(32), PredictSettings(matcher="mqmk", readout="task"))
    assert inside.probabilities.sum(dim=1).tolist() == pytest.approx([1.0] * 32)


def test_with_one_task_there_is_no_runner_up(vit):
    answer = name_answers(pool := random_pool((2,), vit=vit), predict(vit, pool, random_images(1)))[0]
    assert (answer.runner_up, answer.margin) == (None, None)


def test_a_label_that_two_tasks_know_counts_once(vit):
    pool = random_pool((2,), vit=vit)
    twin = dataclasses.replace(random_task("photos", 2), classes=pool.tasks[0].classes)
    pool = pool.with_task(twin)
    predicted = predict(vit, pool, random_images(3), PredictSettings(matcher="mqmk", readout="all"))
    for place, answer in enumerate(name_answers(pool, predicted)):
        assert sorted(entry.label for entry in answer.top) == ["task0-0", "task0-1"]
        assert sum(entry.probability for entry in answer.top) == pytest.approx(1.0)
        both = predicted.probabilities[place].reshape(2, 2).sum(dim=0)
        assert answer.probability == pytest.approx(float(both.max()))


def test_auto_takes_the_best_held_out_accuracy_within_the_budget(pool):
    measured = pool.with_matching(rates(mqmk=(0.9, 10.0), mqmk_ei=(0.8, 2.0), cascade=(0.85, 4.0)))
    assert choose_matcher(measured, budget=20.0, shortlist=3) == "mqmk"
    assert choose_matcher(measured, budget=5.0, shortlist=3) == "cascade"
    assert choose_matcher(measured, budget=3.0, shortlist=3) == "mqmk-ei"
    tied = pool.with_matching(rates(mqmk=(0.8, 10.0), mqmk_ei=(0.8, 2.0)))
    assert choose_matcher(tied, budget=20.0, shortlist=3) == "mqmk-ei"
    perfect = pool.with_matching(rates(mqmk=(0.8, 3.0), perfect=(1.0, 1.0)))
    assert choose_matcher(perfect, budget=20.0, shortlist=3) == "mqmk"


def test_auto_without_measurements_is_exact_while_that_is_affordable(pool):
    assert choose_matcher(pool, budget=3.0, shortlist=3) == "mqmk"
    assert choose_matcher(pool, budget=2.0, shortlist=1) == "fused"
    without_anchor = dataclasses.replace(pool, anchor=None)
    assert choose_matcher(without_anchor, budget=2.0, shortlist=1) == "cascade"
    assert choose_matcher(pool, budget=2.0, shortlist=3) == "mqmk-ei"


def test_the_predictor_uses_what_auto_chose(vit, pool):
    measured = pool.with_matching(rates(mqmk=(0.7, 3.0), mqmk_ei=(0.8, 2.0)))
    assert predict(vit, measured, random_images(2)).matcher == "mqmk-ei"


def test_settings_may_be_overridden_for_one_call(vit, pool):
    settings = PredictSettings(matcher="cascade", match=MatchSettings(shortlist=1))
    assert predict(vit, pool, random_images(2), settings).match.num_queries.tolist() == [2, 2]


def test_a_pool_of_another_backbone_is_refused(vit, pool):
    other = dataclasses.replace(pool, backbone=dataclasses.replace(pool.backbone, weights_sha256="f" * 64))
    with pytest.raises(MatchError, match="the pool was trained on random"):
        predict(vit, other, random_images(1))


def test_prediction_needs_no_gradient(vit, pool):
    assert not predict(vit, pool, random_images(1)).probabilities.requires_grad
    assert torch.is_inference(predict(vit, pool, random_images(1)).probabilities)


class ReachedError(Exception):
    """Where the images were when the backbone was given them."""


def test_images_go_to_the_device_of_the_backbone(vit, pool):
    def embed(images):
        raise ReachedError(images.device.type)

    vit.device, vit.embed = torch.device("meta"), embed
    with pytest.raises(ReachedError, match="meta"):
        predict(vit, pool, random_images(2), PredictSettings(matcher="mqmk"))
