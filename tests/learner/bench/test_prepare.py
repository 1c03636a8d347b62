"""Published data sets become {train,test}/CLASS with the published split; anything odd is refused with its reason."""

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image

from mqmk.daemon.cli.bench.group import bench
from mqmk.learner.bench.prepare import READERS, SIZES, Size, prepare
from mqmk.learner.data.streams import list_classes
from mqmk.learner.errors import LearnerError


def written(target):
    return sorted(str(path.relative_to(target)) for path in target.rglob("*") if path.is_file())


@pytest.fixture
def cifar(tmp_path):
    """Two classes; the pixels of a record tell its place."""
    source = tmp_path / "cifar-100-binary"
    source.mkdir()
    (source / "fine_label_names.txt").write_text("apple\nbear\n\n")
    for side, labels in (("train", [0, 1, 1]), ("test", [1, 0])):
        records = [
            bytes([9, label]) + bytes([place]) * 1024 + bytes([100]) * 1024 + bytes(1024)
            for place, label in enumerate(labels)
        ]
        (source / f"{side}.bin").write_bytes(b"".join(records))
    return source


def images(folder, names):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())


def test_cifar_keeps_its_split_its_names_and_its_pixels(cifar, tmp_path):
    assert prepare("cifar100", cifar, tmp_path / "out", Size(2, 3, 2)) == Size(2, 3, 2)
    assert written(tmp_path / "out") == [
        "test/apple/test-00001.png",
        "test/bear/test-00000.png",
        "train/apple/train-00000.png",
        "train/bear/train-00001.png",
        "train/bear/train-00002.png",
    ]
    pixels = np.asarray(Image.open(tmp_path / "out/train/bear/train-00002.png"))
    assert pixels.shape == (32, 32, 3) and (pixels == [2, 100, 0]).all()
    assert list_classes(tmp_path / "out") == ["apple", "bear"]


def test_imagenet_r_without_lists_is_drawn_as_the_published_code_draws_it(tmp_path):
    names = [f"n0{label}/{kind}_{number}.jpg" for label in range(2) for kind in "ab" for number in range(5)]
    images(tmp_path / "src", [*names, "README.txt"])
    prepare("imagenet-r", tmp_path / "src", tmp_path / "out", Size(2, 16, 4))
    torch.manual_seed(42)
    drawn = torch.utils.data.random_split(sorted(names), [16, 4])
    for side, part in zip(("train", "test"), drawn, strict=True):
        assert written(tmp_path / "out" / side) == sorted(part)


def test_lists_are_followed_and_number_the_classes_of_domainnet(tmp_path):
    source = tmp_path / "domainnet"
    images(
        source, ["real/truck/r1.jpg", "real/truck/r2.jpg", "clipart/ant/c1.jpg", "clipart/ant/c2.jpg", "real/x/no.jpg"]
    )
    (source / "train.txt").write_text("real/truck/r1.jpg 0\nclipart/ant/c2.jpg 1\n")
    (source / "test.txt").write_text("clipart/ant/c1.jpg 1\nreal/truck/r2.jpg 0\n")
    prepare("domainnet", source, tmp_path / "out", Size(2, 2, 2))
    assert written(tmp_path / "out") == [
        "test/000_truck/r2.jpg",
        "test/001_ant/c1.jpg",
        "train/000_truck/r1.jpg",
        "train/001_ant/c2.jpg",
    ]
    assert (tmp_path / "out/train/001_ant/c2.jpg").read_bytes() == b"clipart/ant/c2.jpg"
    images(tmp_path / "r", ["n01/a.jpg", "n01/b.jpg"])
    (tmp_path / "r" / "train.txt").write_text("n01/b.jpg 5")
    (tmp_path / "r" / "test.txt").write_text("n01/a.jpg 5")
    prepare("imagenet-r", tmp_path / "r", tmp_path / "listed", Size(1, 1, 1))
    assert written(tmp_path / "listed") == ["test/n01/a.jpg", "train/n01/b.jpg"]


def test_the_published_sizes_are_asked_for():
    assert {
        "cifar100": Size(100, 50_000, 10_000),
        "imagenet-r": Size(200, 24_000, 6_000),
        "domainnet": Size(200, 47_532, 20_450),
    } == SIZES
    assert READERS.keys() == SIZES.keys()


@pytest.mark.parametrize(
    ("train", "test", "reason"),
    [
        ("a/x/1.jpg 0", "a/x/1.jpg 0", "found 000_x/1.jpg twice"),
        ("a/x/1.jpg 0", "a/y/2.jpg 1", "every class on both sides, found 000_x, 001_y on one only"),
        ("a/x/1.jpg 0", "a/y/2.jpg 0", "test.txt, line 1: label 0 is x elsewhere, and y here"),
        ("a/x/1.jpg", "", "train.txt, line 1: expected a file below"),
        ("../x/1.jpg 0", "", "expected a file below"),
        ("/etc/passwd 0", "", "expected a file below"),
        ("a/x/9.jpg 0", "", "no such file"),
        ("a/x/1.jpg 0", "a/x/3.jpg 0", "expected 2 classes, 1 and 1 images as published, found 1 classes"),
    ],
)
def test_odd_lists_are_refused_and_nothing_is_written(tmp_path, train, test, reason):
    images(tmp_path / "src", ["a/x/1.jpg", "a/y/2.jpg", "a/x/3.jpg"])
    (tmp_path / "src" / "train.txt").write_text(train)
    (tmp_path / "src" / "test.txt").write_text(test)
    with pytest.raises(LearnerError) as refused:
        prepare("domainnet", tmp_path / "src", tmp_path / "out", Size(2, 1, 1))
    assert reason in str(refused.value)
    assert not (tmp_path / "out").exists()


def test_other_odd_sources_are_refused_with_their_reason(cifar, tmp_path):
    def refuse(name, source, reason, target="out"):
        with pytest.raises(LearnerError, match=reason):
            prepare(name, source, tmp_path / target, Size(2, 3, 2))

    (tmp_path / "empty").mkdir()
    refuse("domainnet", tmp_path / "empty", "train.txt: no such file; `mqmk-daemon bench prepare --help`")
    refuse("imagenet-r", tmp_path / "empty", "expected a folder of images for each class")
    images(tmp_path / "full", ["here.txt"])
    refuse("cifar100", cifar, "expected an empty folder or none", target="full")
    (cifar / "fine_label_names.txt").write_text("apple")
    refuse("cifar100", cifar, "expected labels below 1, found 1")
    (cifar / "test.bin").write_bytes(b"123")
    (cifar / "fine_label_names.txt").write_text("apple\nbear")
    refuse("cifar100", cifar, "expected records of 3074 bytes, found 3 bytes")
    (cifar / "meta").touch()
    refuse("cifar100", cifar, "expected the binary version")


def test_the_command_says_what_a_source_is_and_refuses_a_part_of_the_data(cifar, tmp_path):
    said = CliRunner().invoke(bench, ["prepare", "--help"]).output
    assert "as the published code draws them" in said and "repository of ESN publishes" in said
    found = CliRunner().invoke(bench, ["prepare", "cifar100", str(cifar), str(tmp_path / "out")])
    assert found.exit_code != 0
    assert "expected 100 classes, 50,000 and 10,000 images as published" in f"{found.output} {found.exception}"
