"""Evaluation from the table of queries says what the serving code says, picture by picture."""

import dataclasses

import pytest
import torch
from builders import frozen, random_pool, random_task, random_timm_vit

from mqmk.learner.evaluate import Evaluation, HeldOut, extend, first_table, matching_card
from mqmk.learner.metrics import average_accuracy, forgetting, forgetting_from_best
from mqmk.learner.tasks import InMemory
from mqmk.matcher.classifiers import logits
from mqmk.matcher.images import normalise
from mqmk.matcher.matchers import MATCHERS, MatchSettings, match
from mqmk.matcher.predictor import PredictSettings, predict

CLASSES = (3, 1, 4)


def noise(images: int, classes: int) -> InMemory:
    return InMemory(torch.randint(0, 256, (images, 3, 12, 12), dtype=torch.uint8), torch.randint(0, classes, (images,)))


@pytest.fixture
def vit():
    return frozen(random_timm_vit())


@pytest.fixture
def evaluation(vit):
    pool = random_pool(CLASSES, vit=vit)
    held_out = HeldOut.nothing(12)
    for number, classes in enumerate(CLASSES):
        held_out = held_out.with_task(number, noise(7, classes))
    return Evaluation(pool, extend(first_table(vit), vit, pool, held_out), held_out)


@pytest.mark.parametrize("matcher", MATCHERS)
def test_the_table_gives_what_the_service_answers(vit, evaluation, matcher):
    settings = MatchSettings(shortlist=2, accept_margin=0.02)
    images = normalise(evaluation.held_out.pixels, vit.info)
    served = match(matcher, vit, evaluation.pool, images, settings, evaluation.held_out.task)
    found = evaluation.match(matcher, settings)
    assert torch.equal(found.task, served.task)
    assert torch.equal(found.queries, served.queries)
    torch.testing.assert_close(found.query, served.query, atol=1e-5, rtol=1e-5)
    tally = evaluation.tally(matcher, settings)
    for readout, accuracy in (("all", tally.accuracy_all), ("task", tally.accuracy_task)):
        how = PredictSettings(matcher=matcher, readout=readout, match=settings)
        answers = predict(vit, evaluation.pool, images, how, evaluation.held_out.task).probabilities.argmax(dim=1)
        assert accuracy == pytest.approx((answers == evaluation.true_row).float().mean().item())


def test_a_table_extended_task_by_task_equals_one_made_at_once(vit):
    pool, held_out, table = random_pool((), vit=vit), HeldOut.nothing(12), first_table(vit)
    for number, classes in enumerate(CLASSES):
        pool = pool.with_task(random_task(f"task{number}", classes))
        held_out = held_out.with_task(number, noise(5, classes))
        table = extend(table, vit, pool, held_out)
    at_once = extend(first_table(vit), vit, pool, held_out)
    for field in dataclasses.fields(table):
        torch.testing.assert_close(getattr(table, field.name), getattr(at_once, field.name), atol=1e-5, rtol=1e-5)


def test_extending_computes_only_what_is_missing(vit, evaluation):
    rows = []
    run_query = vit.query
    vit.query = lambda stem, *prompts: (rows.append(len(stem)), run_query(stem, *prompts))[1]
    grown = evaluation.pool.with_task(random_task("new", 2))
    held_out = evaluation.held_out.with_task(3, noise(7, 2))
    extend(evaluation.table, vit, grown, held_out)
    old, new = 21, 7
    plus, newest, earlier, plain = old + new, old + new, 3 * new, new
    assert sum(rows) == plus + newest + earlier + plain


def test_the_figures_of_a_tally_agree_with_each_other(evaluation):
    tally = evaluation.tally("mqmk")
    confusion = torch.tensor(tally.confusion)
    assert confusion.sum(dim=1).tolist() == [7, 7, 7]
    assert tally.matching_rate == pytest.approx(confusion.diag().sum().item() / 21)
    assert tally.task_matching == pytest.approx((confusion.diag() / 7).tolist())
    assert tally.agreement == 1.0
    assert tally.recall_at_3 == 1.0  # there are only three tasks
    assert tally.accuracy_task <= tally.matching_rate
    assert evaluation.tally("perfect").matching_rate == 1.0


def test_a_label_known_to_two_tasks_counts_whichever_task_gives_it(vit):
    pool = random_pool((2,), vit=vit)
    pool = pool.with_task(dataclasses.replace(random_task("again", 2), classes=pool.tasks[0].classes))
    held_out = HeldOut.nothing(12).with_task(0, noise(9, 2))
    evaluation = Evaluation(pool, extend(first_table(vit), vit, pool, held_out), held_out)
    found = evaluation.match("mqmk")
    rows = torch.where(found.task == 0, held_out.label, held_out.label + 2)
    labels = torch.tensor([0, 1, 0, 1])
    expected = labels[logits(pool, found, "fc", "all").argmax(dim=1)] == labels[rows]
    assert torch.equal(evaluation.rightly(found, "fc", "all"), expected)


def test_the_card_of_a_pool_holds_rate_agreement_and_cost_of_each_matcher(evaluation):
    tallies = {name: evaluation.tally(name) for name in ("mqmk", "mqmk-ei", "cascade")}
    card = matching_card(len(evaluation.held_out.task), tallies)
    assert card["held_out"] == 21
    assert card["matchers"]["mqmk"]["cost"] == 3
    assert card["matchers"]["mqmk-ei"]["cost"] == 2
    assert card["matchers"]["mqmk"]["agreement"] == 1.0
    assert evaluation.pool.with_matching(card).matching == card


def test_average_accuracy_and_forgetting_by_hand():
    history = [[0.9], [0.95, 0.8], [0.7, 0.85, 0.6]]
    assert average_accuracy(history) == pytest.approx((0.7 + 0.85 + 0.6) / 3)
    assert forgetting(history) == pytest.approx(((0.9 - 0.7) + (0.8 - 0.85) + 0.0) / 3)
    assert forgetting_from_best(history) == pytest.approx(((0.95 - 0.7) + (0.8 - 0.85)) / 2)
    assert forgetting_from_best([[0.9]]) == 0.0
