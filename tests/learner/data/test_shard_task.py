"""From a folder of sketches through shards to a learned task."""

import pytest
import torch
from PIL import Image

from mqmk.learner.data import sketches
from mqmk.learner.data.pack import pack
from mqmk.learner.data.shard_task import shard_task
from mqmk.learner.data.tasks import Streamed
from mqmk.learner.data.validation import validate_task
from mqmk.learner.settings import TrainSettings
from mqmk.learner.training.train import empty_pool, train_task
from mqmk.matcher.backbone import load_backbone


@pytest.fixture(scope="module")
def vit():
    return load_backbone(device=torch.device("cpu"))


@pytest.fixture
def packed(tmp_path):
    for name in sketches.TASKS["birds"]:
        (tmp_path / "birds" / name).mkdir(parents=True)
        for number, drawing in enumerate(sketches.read(name).training[:30]):
            Image.fromarray(drawing).save(tmp_path / "birds" / name / f"{number}.png")
    manifest = pack(tmp_path / "birds", tmp_path / "tasks", "birds", shard_size=20_000)
    return manifest, lambda name: (tmp_path / "tasks" / "birds" / name).open("rb")


def test_a_packed_folder_is_validated_and_learned(vit, packed):
    manifest, opener = packed
    assert len(manifest.shards) > 1
    report = validate_task(manifest, opener)
    task = shard_task(manifest, opener, report, vit.info)
    assert len(task.training) + len(task.held_out) == manifest.samples == 150
    assert len(task.held_out) == sum(report.held_out.values()) > 10
    seen = []
    settings = TrainSettings(epochs=3, batch=32, e_length=4)
    prompt = train_task(task, vit, empty_pool(vit, settings), settings, on_epoch=seen.append).prompt
    assert seen[-1].held_out_accuracy > 0.4
    assert prompt.classes == manifest.classes
    assert prompt.manifest_sha256 == manifest.identity
    assert prompt.samples == len(task.training)


def test_a_task_too_large_for_memory_is_streamed_and_holds_the_same_images(vit, packed, monkeypatch):
    manifest, opener = packed
    report = validate_task(manifest, opener)
    kept = shard_task(manifest, opener, report, vit.info)
    monkeypatch.setattr("mqmk.learner.data.tasks.MEMORY_FOR_IMAGES", 1000)
    streamed = shard_task(manifest, opener, report, vit.info, shuffle_buffer=16)
    assert isinstance(streamed.training, Streamed)

    def seen(images, seed):
        return [(p.numpy().tobytes(), int(y)) for b in images.batches(16, seed) for p, y in zip(b.pixels, b.labels)]  # noqa: B905

    assert sorted(seen(streamed.training, 1)) == sorted(seen(kept.training, None))
    assert seen(streamed.training, 1) == seen(streamed.training, 1)
    assert seen(streamed.training, 1) != seen(streamed.training, 2)
    assert seen(streamed.held_out, None) == seen(kept.held_out, None)
    assert not set(seen(kept.training, None)) & set(seen(kept.held_out, None))
