"""Evaluation from the table of queries says what the serving code says, image by image."""

import dataclasses
from collections import Counter

import pytest
import torch
from support.builders import frozen, random_pool, random_task, random_timm_vit

from mqmk.learner.data.tasks import InMemory
from mqmk.learner.evaluation.evaluate import Evaluation, merge_matches, split_halves
from mqmk.learner.evaluation.metrics import average_accuracy, forgetting, forgetting_from_best
from mqmk.learner.evaluation.query_table import HeldOut, QueryTable, extend, table_names
from mqmk.matcher.classifiers import logits
from mqmk.matcher.images import normalise
from mqmk.matcher.matcher_info import CLASS_MATCHERS
from mqmk.matcher.matchers import MATCHERS, MatchSettings, match_images
from mqmk.matcher.predictor import PredictSettings, predict
from mqmk.matcher.prompted_vit import FrozenViT

CLASSES = (3, 1, 4)


def noise(images: int, classes: int) -> InMemory:
    return InMemory(torch.randint(0, 256, (images, 3, 12, 12), dtype=torch.uint8), torch.randint(0, classes, (images,)))


@pytest.fixture
def vit():
    return frozen(random_timm_vit())


@pytest.fixture
def evaluation(vit):
    pool = random_pool(CLASSES, vit=vit)
    held_out = HeldOut.empty(12)
    for number, classes in enumerate(CLASSES):
        held_out = held_out.with_task(number, noise(7, classes))
    return Evaluation(pool, extend(QueryTable.empty(vit.dim), vit, pool, held_out), held_out)


@pytest.mark.parametrize("matcher", MATCHERS)
def test_the_table_gives_what_the_service_answers(vit, evaluation, matcher):
    settings = MatchSettings(shortlist=2)
    images = normalise(evaluation.held_out.pixels, vit.info)
    if matcher in CLASS_MATCHERS:  # its weights are fitted on the other half of the images
        halves = [match_images(matcher, vit, pool, images, settings) for pool in evaluation._fused_pools]
        served = merge_matches(evaluation._in_first, *halves)
    else:
        served = match_images(matcher, vit, evaluation.pool, images, settings, evaluation.held_out.task)
    found = evaluation.match(matcher, settings)
    assert torch.equal(found.task, served.task)
    assert torch.equal(found.num_queries, served.num_queries)
    torch.testing.assert_close(found.query, served.query, atol=1e-5, rtol=1e-5)
    tally = evaluation.tally(matcher, settings)
    for readout, accuracy in (("all", tally.accuracy_all), ("task", tally.accuracy_task)):
        if matcher in CLASS_MATCHERS:
            answers = served.class_logits.argmax(dim=1)
            assert accuracy == pytest.approx((answers == evaluation.true_row).float().mean().item())
            continue
        how = PredictSettings(matcher=matcher, readout=readout, match=settings)
        answers = predict(vit, evaluation.pool, images, how, evaluation.held_out.task).probabilities.argmax(dim=1)
        assert accuracy == pytest.approx((answers == evaluation.true_row).float().mean().item())


def test_a_table_extended_task_by_task_equals_one_made_at_once(vit):
    pool, held_out, table = random_pool((), vit=vit), HeldOut.empty(12), QueryTable.empty(vit.dim)
    for number, classes in enumerate(CLASSES):
        pool = pool.with_task(random_task(f"task{number}", classes))
        held_out = held_out.with_task(number, noise(5, classes))
        table = extend(table, vit, pool, held_out)
    at_once = extend(QueryTable.empty(vit.dim), vit, pool, held_out)
    assert_same(table, at_once)


def assert_same(table: QueryTable, other: QueryTable) -> None:
    assert table.names == other.names
    for name in ("task_queries", "enhanced", "plain"):
        torch.testing.assert_close(getattr(table, name), getattr(other, name), atol=1e-5, rtol=1e-5)


def counted(vit: FrozenViT) -> list[int]:
    """How many rows each pass from now on computes queries for."""
    rows: list[int] = []
    run_query = vit.query
    vit.query = lambda stem, *prompts: (rows.append(len(stem)), run_query(stem, *prompts))[1]
    return rows


def test_extending_computes_only_what_is_missing(vit, evaluation):
    rows = counted(vit)
    grown = evaluation.pool.with_task(random_task("new", 2))
    held_out = evaluation.held_out.with_task(3, noise(7, 2))
    extend(evaluation.table, vit, grown, held_out)
    old, new = 21, 7
    plus, newest, earlier, plain_and_anchor = old + new, old + new, 3 * new, 2 * new
    assert sum(rows) == plus + newest + earlier + plain_and_anchor


def test_images_that_were_lost_shift_nobody_elses_queries(vit, evaluation):
    """As many new images as were lost: by position, the new task would be judged by the queries of others."""
    tasks = [evaluation.held_out.task == number for number in range(3)]
    kept = tasks[1] | tasks[2]
    left = HeldOut(*(getattr(evaluation.held_out, name)[kept] for name in ("pixels", "task", "label")))
    grown = evaluation.pool.with_task(random_task("new", 2))
    held_out = left.with_task(3, noise(7, 2))
    rows = counted(vit)
    table = extend(evaluation.table, vit, grown, held_out)
    # the new images for old tasks, all for the new one, the new images plain and with the anchor, Q+
    assert sum(rows) == 3 * 7 + 21 + 2 * 7 + 21
    assert_same(table, extend(QueryTable.empty(vit.dim), vit, grown, held_out))


def test_without_a_task_only_q_plus_is_computed_and_nothing_at_all_where_it_was_known(vit, evaluation):
    left = evaluation.pool.without_task("task1")
    held_out = HeldOut.empty(12)
    for number, task in enumerate((0, 2)):
        here = evaluation.held_out.task == task
        held_out = held_out.with_task(
            number, InMemory(evaluation.held_out.pixels[here], evaluation.held_out.label[here])
        )
    rows = counted(vit)
    table = extend(evaluation.table, vit, left, held_out)
    assert sum(rows) == len(held_out.task)  # Q+, with the mean of the two prompts that are left
    assert_same(table, extend(QueryTable.empty(vit.dim), vit, left, held_out))
    rows.clear()
    assert_same(extend(table, vit, left, held_out), table)
    assert not rows


def test_a_prompt_that_was_trained_anew_is_another_column(vit, evaluation):
    again = dataclasses.replace(evaluation.pool.tasks[2], e_prompt=evaluation.pool.tasks[2].e_prompt + 1)
    pool = evaluation.pool.without_task("task2").with_task(again)
    table = extend(evaluation.table, vit, pool, evaluation.held_out)
    assert_same(table, extend(QueryTable.empty(vit.dim), vit, pool, evaluation.held_out))
    moved = dataclasses.replace(evaluation.pool, g_prompt=evaluation.pool.g_prompt + 1)
    assert evaluation.table.names.shared_with(table_names(moved, evaluation.held_out)) == 21  # those without prompts


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
    held_out = HeldOut.empty(12).with_task(0, noise(9, 2))
    evaluation = Evaluation(pool, extend(QueryTable.empty(vit.dim), vit, pool, held_out), held_out)
    found = evaluation.match("mqmk")
    rows = torch.where(found.task == 0, held_out.label, held_out.label + 2)
    labels = torch.tensor([0, 1, 0, 1])
    expected = labels[logits(pool, found, "fc", "all").argmax(dim=1)] == labels[rows]
    assert torch.equal(evaluation.is_correct(found, "fc", "all"), expected)


def test_a_match_with_any_task_that_knows_the_class_is_right(vit):
    pool = random_pool((2, 3), vit=vit)
    pool = pool.with_task(dataclasses.replace(random_task("again", 2), classes=pool.tasks[0].classes))
    held_out = HeldOut.empty(12)
    for number, classes in enumerate((2, 3, 2)):
        held_out = held_out.with_task(number, noise(20, classes))
    evaluation = Evaluation(pool, extend(QueryTable.empty(vit.dim), vit, pool, held_out), held_out)
    found = evaluation.match("mqmk").task
    right = torch.where(held_out.task == 1, found == 1, found != 1)
    tally = evaluation.tally("mqmk")
    assert (right != (found == held_out.task)).any(), "the two tasks of the same classes are mistaken for each other"
    assert tally.matching_rate == pytest.approx(right.float().mean().item())
    assert tally.task_matching[0] == pytest.approx(right[:20].float().mean().item())


def test_a_task_that_was_not_scored_is_not_among_the_best_three(evaluation):
    one = evaluation.tally("cascade", MatchSettings(shortlist=1))
    assert one.recall_at_3 == one.matching_rate < 1


def test_a_task_without_images_has_no_figure_and_counts_in_no_mean(vit):
    pool = random_pool((3, 2), vit=vit)
    held_out = HeldOut.empty(12).with_task(0, noise(8, 3))
    evaluation = Evaluation(pool, extend(QueryTable.empty(vit.dim), vit, pool, held_out), held_out)
    tally = evaluation.tally("mqmk")
    assert tally.task_images == (8, 0)
    assert tally.task_matching[1] is tally.task_accuracy_all[1] is tally.task_accuracy_task[1] is None
    assert average_accuracy([tally.task_accuracy_task]) == tally.task_accuracy_task[0] == tally.accuracy_task
    assert forgetting([[0.9], [0.5, None]]) == pytest.approx(0.4)
    assert forgetting_from_best([[0.9], [0.95, None], [0.5, None, 0.3]]) == pytest.approx(0.45)


def halves_by_class(held_out: HeldOut) -> dict[tuple[int, int], tuple[int, int]]:
    halves = split_halves(held_out)
    keys = list(zip(held_out.task.tolist(), held_out.label.tolist(), strict=True))
    sides = [Counter(key for key, on in zip(keys, side.tolist(), strict=True) if on)
             for side in (halves.choosing, halves.reporting)]  # fmt: skip
    return {key: (sides[0][key], sides[1][key]) for key in keys}


def test_halves_are_drawn_from_every_class_and_do_not_depend_on_what_else_there_is():
    first = InMemory(torch.randint(0, 256, (33, 3, 12, 12), dtype=torch.uint8), torch.tensor([0] * 20 + [1] * 13))
    alone = HeldOut.empty(12).with_task(0, first)
    assert halves_by_class(alone) == {(0, 0): (10, 10), (0, 1): (6, 7)}
    halves = split_halves(alone)
    assert not halves.overlap and not (halves.choosing & halves.reporting).any()
    later = HeldOut.empty(12).with_task(0, noise(9, 1)).with_task(1, first)
    assert torch.equal(split_halves(later).reporting[9:], halves.reporting)
    assert split_halves(later).reporting[:9].all() and split_halves(later).choosing[:9].all(), "nine are too few"
    assert split_halves(later).overlap


def test_copies_of_an_image_are_in_one_half():
    pixels = torch.randint(0, 256, (10, 3, 12, 12), dtype=torch.uint8)
    held_out = HeldOut.empty(12).with_task(0, InMemory(pixels.repeat(2, 1, 1, 1), torch.zeros(20, dtype=torch.int64)))
    halves = split_halves(held_out)
    assert torch.equal(halves.reporting[:10], halves.reporting[10:]) and halves.reporting.sum() == 10


def test_a_tally_among_some_images_counts_only_these(evaluation):
    among = evaluation.held_out.task != 1
    tally = evaluation.tally("mqmk", among=among)
    assert tally.images == 14 and tally.task_images == (7, 0, 7)
    assert tally.task_matching[1] is None
    assert tally.matching_rate == pytest.approx(
        evaluation.is_matched(evaluation.match("mqmk"))[among].float().mean().item()
    )
    assert sum(map(sum, tally.confusion)) == 14


def test_average_accuracy_and_forgetting_by_hand():
    history = [[0.9], [0.95, 0.8], [0.7, 0.85, 0.6]]
    assert average_accuracy(history) == pytest.approx((0.7 + 0.85 + 0.6) / 3)
    assert forgetting(history) == pytest.approx(((0.9 - 0.7) + (0.8 - 0.85) + 0.0) / 3)
    assert forgetting_from_best(history) == pytest.approx(((0.95 - 0.7) + 0.0) / 2)
    assert forgetting_from_best([[0.5], [0.6, 0.8], [0.7, 0.9, 0.6]]) == 0.0  # tasks that only became better
    assert forgetting_from_best([[0.9]]) == 0.0
