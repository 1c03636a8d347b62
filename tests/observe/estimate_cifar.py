"""On a stream of photographs the matching rate that is estimated without labels is near the true one.

CIFAR-100 in ten tasks on a real backbone, learned shortly: about five minutes on two cores. Needs ../shared/assets.
"""

import tarfile
from pathlib import Path
from statistics import fmean

import pytest
import torch
from estimates import MATCHERS, errors, told

from mqmk.learner.evaluate import Evaluation, HeldOut, extend, first_table
from mqmk.learner.settings import TrainSettings
from mqmk.learner.streams import StreamSettings, read_stream
from mqmk.learner.train import empty_pool, train_task
from mqmk.matcher.backbone import load_backbone

SIZE, TRAINING, HELD_OUT = 112, 60, 20
SETTINGS = TrainSettings(epochs=2, batch=16)

pytestmark = [pytest.mark.shared, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def evaluation(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Evaluation:
    torch.set_num_threads(2)
    folder = tmp_path_factory.mktemp("cifar")
    with tarfile.open(assets / "cifar100-200x50.tar") as tar:
        tar.extractall(folder, filter="data")
    weights = str(assets / "deit_tiny_patch16_224.safetensors")
    vit = load_backbone("deit_tiny_patch16_224", weights=weights, image_size=SIZE)
    pool, held_out = empty_pool(vit, SETTINGS), HeldOut.nothing(SIZE)
    stream = StreamSettings(folder / "cifar100", 10, TRAINING, HELD_OUT)
    for number, task in enumerate(read_stream(stream, vit.info, seed=0)):
        pool = train_task(task, vit, pool, SETTINGS).added_to(pool)
        held_out = held_out.with_task(number, task.held_out)
    return Evaluation(pool, extend(first_table(vit), vit, pool, held_out), held_out)


@pytest.mark.parametrize("matcher", MATCHERS)
def test_the_matching_rate_estimated_without_labels_is_near_the_true_one(evaluation: Evaluation, matcher: str) -> None:
    """Five points at most is the promise; with a thousand pictures on either side chance alone makes nearly two."""
    found = errors(evaluation, matcher)
    print("\n" + told("CIFAR-100", matcher, found, len(evaluation.held_out.task)))
    assert fmean(map(abs, found)) < 0.03
    assert abs(fmean(found)) < 0.015
