"""A stream of tasks from folders: which classes come together, and what training sees of an original image."""

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from support.builders import frozen, random_timm_vit

from mqmk.learner.data.random_crop import random_crop
from mqmk.learner.data.streams import StreamSettings, read_joint, read_stream
from mqmk.learner.data.tasks import Streamed
from mqmk.learner.training.stopping_slice import split_off

WIDTH, HEIGHT = 60, 40


@pytest.fixture(scope="module")
def info():
    torch.manual_seed(0)
    return frozen(random_timm_vit()).info


def gradient() -> Image.Image:
    """Red tells the column, green the row."""
    columns, rows = np.meshgrid(np.arange(WIDTH), np.arange(HEIGHT))
    return Image.fromarray(np.stack([columns, rows, np.zeros_like(rows)], axis=2).astype(np.uint8))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("stream")
    for side, count in (("train", 12), ("test", 2)):
        for label, name in enumerate("abcd"):
            (root / side / name).mkdir(parents=True)
            for number in range(count):
                pixels = np.asarray(gradient()).copy()
                pixels[:, :, 2] = 50 * label + number
                Image.fromarray(pixels).save(root / side / name / f"{number:02}.png")
    return root


def test_a_crop_is_of_the_whole_original_with_the_published_areas_and_shapes():
    rng, edges = random.Random(0), []
    for _ in range(300):
        pixels = np.asarray(random_crop(gradient(), 24, 0.05, rng)).astype(float)
        width = (pixels[:, -1, 0] - pixels[:, 0, 0]).mean() + 1
        height = (pixels[-1, :, 1] - pixels[0, :, 1]).mean() + 1
        assert 0.04 * WIDTH * HEIGHT < width * height <= WIDTH * HEIGHT + 1
        assert 0.6 < width / height < 1.6  # 3:4 to 4:3, but for rounding of small crops
        edges.append((pixels[:, 0, 0].min(), pixels[:, -1, 0].max()))
    assert min(left for left, _ in edges) < 4 and max(right for _, right in edges) > WIDTH - 5  # beyond a centre crop


def test_an_image_too_long_for_any_crop_gives_its_centre():
    strip = Image.new("RGB", (400, 4))
    assert random_crop(strip, 8, 1.0, random.Random(0)).size == (8, 8)


def test_training_sees_other_crops_of_an_image_in_every_epoch_and_statistics_see_the_centre(folder, info):
    settings = StreamSettings(folder, tasks=2, least_area=0.05)
    (task, _) = read_stream(settings, info, 0)
    assert isinstance(task.training, Streamed)
    first, again, other = (next(iter(task.training.batches(24, seed))) for seed in (1, 1, 2))
    assert torch.equal(first.training_pixels, again.training_pixels)
    assert not torch.equal(first.training_pixels, first.pixels)
    assert first.crops is not None and first.crops.shape == first.pixels.shape
    assert not torch.equal(first.crops, other.crops)
    (plain,) = task.training.batches(24, None)
    assert plain.crops is None and torch.equal(plain.training_pixels, plain.pixels)
    (centre, _) = read_stream(replace(settings, least_area=None), info, 0)
    assert torch.equal(plain.pixels, next(iter(centre.training.batches(24, None))).pixels)
    assert all(part.crops is not None for part in first.split(3))


def test_images_set_aside_are_never_trained_on_however_they_are_cropped(info):
    many = Streamed((60, 60), lambda _: [(image_of(n), n // 60) for n in range(120)], info, 0.05)
    rest, tenth = split_off(many)
    shown = torch.cat([batch.pixels for batch in rest.batches(16, seed=3)])
    aside = torch.cat([batch.pixels for batch in tenth.batches(16, seed=None)])
    assert (len(shown), len(aside)) == (108, 12)
    assert not (shown[:, None] == aside[None]).flatten(2).all(dim=2).any()


def image_of(number: int) -> Image.Image:
    pixels = np.asarray(gradient()).copy()
    pixels[:, :, 2] = number * 2
    return Image.fromarray(pixels)


def test_classes_come_in_the_order_of_the_seed_or_of_their_names(folder, info):
    settings = StreamSettings(folder, tasks=2)
    assert [task.classes for task in read_stream(replace(settings, shuffle=False), info, 3)] == [("a", "b"), ("c", "d")]
    shuffled = [task.classes for task in read_stream(settings, info, 3)]
    assert shuffled != [("a", "b"), ("c", "d")]
    assert read_joint(settings, info, 3).classes == shuffled[0] + shuffled[1]
