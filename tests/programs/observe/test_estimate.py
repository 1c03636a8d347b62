"""On a stream of photographs the matching rate estimated without labels is close to the true one.

Ten tasks of CIFAR-100 on a real backbone, trained briefly: about five minutes on two cores. Runs with OBSERVE_TEST=1
(`make observe-test`) and needs the real weights and images (`assets` in conftest.py).
"""

import os
import tarfile
from pathlib import Path
from statistics import fmean

import pytest
import torch
from support.estimates import MATCHERS, describe_errors, estimate_errors

from mqmk.learner.data.streams import StreamSettings, read_stream
from mqmk.learner.evaluation.evaluate import Evaluation
from mqmk.learner.evaluation.query_table import HeldOut, QueryTable, extend
from mqmk.learner.settings import TrainSettings
from mqmk.learner.training.train import empty_pool, train_task
from mqmk.matcher.backbone import load_backbone

SIZE, TRAINING, HELD_OUT = 112, 60, 20
SETTINGS = TrainSettings(epochs=2, batch=16)

pytestmark = [
    pytest.mark.shared,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not os.environ.get("OBSERVE_TEST"), reason="trains for five minutes: make observe-test"),
]


@pytest.fixture(scope="module")
def evaluation(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Evaluation:
    torch.set_num_threads(2)
    folder = tmp_path_factory.mktemp("cifar")
    with tarfile.open(assets / "cifar100-200x50.tar") as tar:
        tar.extractall(folder, filter="data")
    weights = str(assets / "deit_tiny_patch16_224.safetensors")
    vit = load_backbone("deit_tiny_patch16_224", weights=weights, image_size=SIZE)
    pool, held_out = empty_pool(vit, SETTINGS), HeldOut.empty(SIZE)
    stream = StreamSettings(folder / "cifar100", 10, TRAINING, HELD_OUT)
    for number, task in enumerate(read_stream(stream, vit.info, seed=0)):
        pool = train_task(task, vit, pool, SETTINGS).added_to(pool)
        held_out = held_out.with_task(number, task.held_out)
    return Evaluation(pool, extend(QueryTable.empty(vit.dim), vit, pool, held_out), held_out)


@pytest.mark.parametrize("matcher", MATCHERS)
def test_the_matching_rate_estimated_without_labels_is_near_the_true_one(evaluation: Evaluation, matcher: str) -> None:
    """The documented limit is five points; with a thousand images per half, chance alone accounts for nearly two."""
    found = estimate_errors(evaluation, matcher)
    print("\n" + describe_errors("CIFAR-100", matcher, found, len(evaluation.held_out.task)))
    assert fmean(map(abs, found)) < 0.03
    assert abs(fmean(found)) < 0.015
