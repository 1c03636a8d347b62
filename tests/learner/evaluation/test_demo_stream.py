"""On ten tasks of sketches that the backbone never saw, many queries with many keys beat one query with one key."""

from statistics import fmean

import pytest
import torch
from support.daemons.demo_tasks import demo_task
from support.estimates import MATCHERS, describe_errors, estimate_errors

from mqmk.learner.data import sketches
from mqmk.learner.evaluation.evaluate import Evaluation
from mqmk.learner.evaluation.query_table import HeldOut, QueryTable, extend
from mqmk.learner.settings import TrainSettings
from mqmk.learner.training.train import empty_pool, train_task
from mqmk.matcher.backbone import load_backbone
from mqmk.matcher.pool_files import read_pool, write_pool
from mqmk.matcher.pool_store import PoolStore


@pytest.fixture(scope="module")
def evaluation() -> Evaluation:
    settings = TrainSettings(epochs=2)
    vit = load_backbone(device=torch.device("cpu"))
    pool, held_out = empty_pool(vit, settings), HeldOut.empty(28)
    for number, name in enumerate(sketches.TASKS):
        task = demo_task(name)
        pool = train_task(task, vit, pool, settings).added_to(pool)
        held_out = held_out.with_task(number, task.held_out)
    return Evaluation(pool, extend(QueryTable.empty(vit.dim), vit, pool, held_out), held_out)


def test_mqmk_matches_at_least_twelve_points_better_than_sqsk(evaluation):
    assert evaluation.tally("mqmk").matching_rate >= evaluation.tally("sqsk").matching_rate + 0.12


def test_the_read_out_within_the_matched_task_is_the_better_one(evaluation):
    tally = evaluation.tally("mqmk")
    assert tally.accuracy_task > tally.accuracy_all + 0.05
    assert tally.accuracy_task > 0.5  # of fifty classes


def test_knowing_the_task_is_an_upper_bound(evaluation):
    perfect = evaluation.tally("perfect").accuracy_task
    assert all(perfect >= evaluation.tally(name).accuracy_task for name in ("sqsk", "mqmk", "mqmk-ei", "cascade"))


def test_a_trained_pool_survives_its_files(evaluation, tmp_path):
    identity = write_pool(evaluation.pool, tmp_path, version=10, parent=9)
    _, exported = read_pool(tmp_path / identity.folder, evaluation.pool.backbone)
    store = PoolStore(tmp_path / "pools")
    stored = store.read(store.write(evaluation.pool, version=10, parent=9), evaluation.pool.backbone)
    for pool in (exported, stored):
        again = Evaluation(pool, evaluation.table, evaluation.held_out)
        assert again.tally("cascade") == evaluation.tally("cascade")


@pytest.mark.parametrize("matcher", MATCHERS)
def test_the_matching_rate_estimated_without_labels_is_near_the_true_one(evaluation, matcher):
    """The documented limit is five points; with five hundred images per half, chance alone accounts for about two."""
    found = estimate_errors(evaluation, matcher)
    print(describe_errors("sketches", matcher, found, len(evaluation.held_out.task)))
    assert fmean(map(abs, found)) < 0.03
    assert abs(fmean(found)) < 0.015  # neither too high nor too low
