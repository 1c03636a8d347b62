"""A preset holds the paper's settings; what is typed goes before it, and other data are refused."""

import pytest
from click.testing import CliRunner

from mqmk.daemon.cli.bench.accuracy import accuracy
from mqmk.daemon.cli.bench.stream_options import read_stream_settings
from mqmk.learner.bench import presets
from mqmk.learner.bench.presets import PRESETS

PUBLISHED = {  # tasks, classes, rows of an e-prompt, its blocks, epochs, images to train on, to test with
    "cifar100-10": (10, 100, 40, range(2, 9), 170, 50_000, 10_000),
    "imagenet-r-5": (5, 200, 80, range(2, 11), 200, 24_000, 6_000),
    "imagenet-r-10": (10, 200, 80, range(2, 11), 170, 24_000, 6_000),
    "imagenet-r-20": (20, 200, 20, range(2, 11), 150, 24_000, 6_000),
    "domainnet-10": (10, 200, 90, range(2, 11), 430, 47_532, 20_450),
}


def test_presets_hold_the_published_settings():
    assert PRESETS.keys() == PUBLISHED.keys()
    for name, (tasks, classes, length, layers, epochs, *images) in PUBLISHED.items():
        preset = PRESETS[name]
        assert (preset.tasks, preset.classes, preset.image_size) == (tasks, classes, 224)
        assert preset.images == tuple(images)
        assert preset.backbone == "vit_base_patch16_224.orig_in21k"  # the weights of ViT-B_16.npz
        train = preset.train
        assert (train.e_length, train.e_layers, train.epochs) == (length, tuple(layers), epochs)
        assert (train.batch, train.learning_rate, train.g_length) == (64, 0.00125, 5)
        assert (train.schedule, train.clip, train.spread) == ("constant", 1.0, 1.0)
        assert (train.keys, train.keys_per_task) == ("learned", None)
        assert (train.g_prompt, train.start, train.head) == ("always", "previous", "free")
        assert (preset.least_area, train.augmentation.mirror, train.patches) == (0.05, True, 1.0)
        assert train.augmentation.least_area == 1  # or the crop would be cropped again
        assert (preset.mean, preset.std, preset.crop) == ((0, 0, 0), (1, 1, 1), 0.875)


def test_the_page_about_presets_says_the_same():
    for name, (_, _, length, layers, epochs, _, _) in PUBLISHED.items():
        (line,) = [line for line in presets.__doc__.splitlines() if line.startswith(f"| {name} ")]
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert cells[2:] == [str(length), f"{layers[0]}-{layers[-1]}", str(epochs)]


def test_a_preset_streams_classes_in_the_order_of_their_names_and_crops_the_originals(tmp_path):
    options = {"data": tmp_path, "tasks": None, "train_per_class": None, "test_per_class": None}
    published = read_stream_settings(options | {"preset": "imagenet-r-20"})
    assert (published.tasks, published.classes, published.shuffle, published.least_area) == (20, 200, False, 0.05)
    own = read_stream_settings(options | {"preset": None})
    assert (own.tasks, own.classes, own.shuffle, own.least_area) == (10, None, True, None)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--preset", "cifar100-10"], "from 0 to 5 (the backbone has 6 blocks), got 2,3,4,5,6,7,8"),
        (["--preset", "cifar100-10", "--e-layers", "2-4"], "expected 100 classes, found 1"),
        (["--e-layers", "two"], "expected blocks in ascending order, such as 2-10 or 2,3,5, got 'two'"),
        (["--e-layers", "5-3"], "expected blocks in ascending order, such as 2-10 or 2,3,5, got '5-3'"),
        (["--e-layers", "3,3"], "expected blocks in ascending order, such as 2-10 or 2,3,5, got '3,3'"),
        (["--e-layers", "20-22"], "from 0 to 5 (the backbone has 6 blocks), got 20,21,22; use 2,3,4"),
        (["--e-layers", "4-6"], "got 4,5,6"),
        (["--matchers", "mqmk,best"], "best; choose among"),
        (["--patches", "0"], "0.0 is not in the range"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_reason(tmp_path, options, reason):
    for side in ("train", "test"):
        (tmp_path / side / "cat").mkdir(parents=True)
    chosen = ["--backbone", "embedded", "--image-size", "28", "--data", str(tmp_path), *options]
    found = CliRunner().invoke(accuracy, chosen)
    assert found.exit_code != 0
    assert reason in f"{found.output} {found.exception}"
