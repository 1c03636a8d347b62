"""Every documented value of the settings of learning and judging has two tasks served, or is refused with a reason.

Each value is part of one of a few runs, so that all of them take seconds. `make settings-test` tries them one by one.
"""

import math
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.daemons.daemon import class_folders, daemon, drop, small_config

from mqmk.daemon.config.fields import Setting, all_settings, serialize
from mqmk.daemon.config.load import load
from mqmk.daemon.config.sections import Config
from mqmk.daemon.errors import ConfigError
from mqmk.daemon.replicas import Replica
from mqmk.deploy.serving.pools.live_pool import LivePool
from mqmk.learner.data.pack import pack
from mqmk.matcher.backbone import load_backbone
from mqmk.matcher.predictor import PredictSettings
from mqmk.matcher.prompted_vit import FrozenViT

SECTIONS = ("train", "similarity", "evaluate", "gate")
QUICK = {"train.epochs": "1", "train.batch": "8", "train.e_length": "2",
         "gate.accuracy_floor": "0", "gate.fresh_process": "false"}  # fmt: skip
WITHOUT_PLAIN_MEANS = {"train.plain_means": "false", "evaluate.matchers": "mqsk,mqmk-ei"}
REFUSED = {
    ("train.g_prompt", "always"): "every task would change the answers of all earlier ones",
    ("train.plain_means", "false"): "sqsk and sqmk need the means that the first one disables",
}
HELD = ("gate.accuracy_floor", "1")
SLOW = ("gate.fresh_process", "true")  # half of the tests of the orchestrator have it
KEYS = {name: key for name, key in all_settings().items() if name.split(".")[0] in SECTIONS}


def values(key: Setting) -> Iterator[str]:
    """Both truths, each choice, none where that is allowed, the ends of a range; and what the quick runs have."""
    if key.kind.name == "true or false":
        yield from ("true", "false")
    yield from key.choices
    if key.optional:
        yield "none"
    if key.range:
        yield from (serialize(end) for end in (key.range.least, key.range.most) if math.isfinite(end))
    yield QUICK.get(key.name, serialize(key.default))


VALUES = {
    name: [text for text in dict.fromkeys(values(key)) if (name, text) not in {*REFUSED, HELD, SLOW}]
    for name, key in KEYS.items()
}
TOGETHER = [
    {name: texts[(run + place) % len(texts)] for place, (name, texts) in enumerate(VALUES.items())}
    for run in range(max(map(len, VALUES.values())))
]
ONE_BY_ONE = [QUICK | {name: text} for name, texts in VALUES.items() for text in texts]
RUNS = ONE_BY_ONE if os.environ.get("SETTINGS_TEST") == "full" else TOGETHER


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tasks of two classes with six sketches each."""
    folder = tmp_path_factory.mktemp("two-tasks")
    for task in ("sea", "birds"):
        for source in sorted(class_folders(task, 6).iterdir())[:2]:
            shutil.copytree(source, folder / task / source.name)
        pack(folder / task, folder / "bucket" / "tasks", task, holdout=0.3)
    return folder / "bucket"


@pytest.fixture(scope="module")
def vit() -> FrozenViT:
    """As a replica loads it."""
    return load_backbone("embedded", device=torch.device("cpu"))


def config_of(chosen: dict[str, str], bucket: Path, folder: Path) -> Config:
    """What the daemon would be started with; ConfigError if it refuses."""
    read, base = load(None, {}, chosen, folder).config, small_config(folder)
    sections = {name: getattr(read, name) for name in SECTIONS}
    return replace(base, bucket=replace(base.bucket, url=str(bucket)), **sections)


@pytest.mark.parametrize("chosen", RUNS, ids=range(len(RUNS)))
def test_every_documented_value_has_two_tasks_served(
    chosen: dict[str, str], bucket: Path, tmp_path: Path, vit: FrozenViT
) -> None:
    parts = daemon(config_of(chosen, bucket, tmp_path))
    parts.run(passes=20)
    reasons = [task.reason for task in parts.ledger.tasks()]
    assert parts.states == {"sea": "PUBLISHED", "birds": "PUBLISHED"}, (reasons, chosen)
    assert len(parts.ledger.versions()) == 2
    replica = LivePool(parts.files.store, vit, PredictSettings())
    assert replica.poll() and replica.loaded, replica.last_rejection
    parts.serving.live = [Replica("one", replica.loaded.version, replica.loaded.pointer.digest)]
    parts.run(passes=2)
    assert parts.states == {"sea": "SERVING", "birds": "SERVING"}
    parts.close()


def test_every_value_is_in_some_run() -> None:
    tried = {(name, text) for run in TOGETHER for name, text in run.items()}
    assert tried == {(name, text) for name, texts in VALUES.items() for text in texts}
    assert {("train.keys", "learned"), ("train.patches", "0"), ("similarity.near_bits", "7")} <= tried


@pytest.mark.parametrize(("name", "text"), REFUSED)
def test_what_cannot_work_is_refused_before_anything_starts(name: str, text: str, bucket: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        config_of(QUICK | {name: text}, bucket, tmp_path)
    assert name in str(refused.value) and REFUSED[name, text] in str(refused.value)


def test_without_plain_means_every_other_matcher_works(bucket: Path, tmp_path: Path) -> None:
    """Also later on, with matchers that some tasks of the pool lack the means for: those are not measured."""
    parts = daemon(config_of(QUICK | WITHOUT_PLAIN_MEANS, bucket, tmp_path))
    parts.run(passes=20)
    assert parts.states == {"sea": "PUBLISHED", "birds": "PUBLISHED"}
    parts.ledger.enqueue_command("forget", "sea")
    parts.close()
    parts = daemon(config_of(QUICK, bucket, tmp_path))
    parts.run(passes=20)
    assert parts.states == {"sea": "FORGOTTEN", "birds": "PUBLISHED"}
    assert parts.ledger.versions()[-1].evaluation["matchers"].keys() == {
        "mqsk", "mqmk", "mqmk-ei", "cascade", "anchor", "fused",
    }  # fmt: skip
    parts.close()
    with pytest.raises(ConfigError, match=r"train.plain_means \(command line\), serve.matcher \(command line\): sqsk"):
        load(None, {}, WITHOUT_PLAIN_MEANS | {"serve.matcher": "sqsk"}, tmp_path)


def test_a_floor_that_is_not_reached_holds_the_task_and_says_so(tmp_path: Path) -> None:
    larger = tmp_path / "larger"
    for task in ("sea", "birds"):  # of which no classifier recognises every image
        drop(larger, task, per_class=40)
    parts = daemon(config_of(QUICK | {"train.learning_rate": "0", HELD[0]: HELD[1]}, larger, tmp_path))
    parts.run(passes=20)
    assert parts.states == {"sea": "HELD", "birds": "HELD"}
    assert all("below gate.accuracy_floor 100.0%" in (task.reason or "") for task in parts.ledger.tasks())
    parts.close()
