"""Validating tasks: what they hold is counted, every image opened, and what is odd reported or refused by policy."""

import dataclasses
import hashlib
import json
import struct
import zlib

import pytest
from support import shards as tars
from support.shards import GOOD, LABELS, PNG, validate, with_members

from mqmk.learner.data.shards import held_out_samples, training_samples
from mqmk.learner.data.split import short_hash
from mqmk.learner.data.validation import TaskReport, validate_task
from mqmk.learner.errors import TaskRejected
from mqmk.learner.settings import ShardLimits, SimilaritySettings


def png_of(width, height):
    """A PNG of a few bytes that claims a size."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def test_a_good_task_is_counted_by_class():
    report = validate(GOOD)
    assert report.samples == {"heron": 6, "owl": 6}
    manifest = tars.manifest(GOOD, samples=12)
    assert len(list(held_out_samples(manifest, tars.opener(GOOD), split=report.split))) == 2
    assert report.held_out == {"heron": 1, "owl": 1}  # a fifth of six each


# ---- what is refused

REFUSED = {
    "no image": (with_members(("x.png", b"hello"), ("x.cls", b"owl")), "unreadable-image", "x.png"),
    "empty image": (with_members(("x.png", b""), ("x.cls", b"owl")), "unreadable-image", "x.png"),
    "half an image": (with_members(("x.png", PNG[:-40]), ("x.cls", b"owl")), "unreadable-image", "x.png"),
    "another format": (
        with_members(("x.png", tars.image_bytes(1, kind="BMP")), ("x.cls", b"owl")), "unreadable-image", "x.png"),
    "pixel bomb": (with_members(("x.png", png_of(9000, 9000)), ("x.cls", b"owl")), "too-many-pixels", "x.png"),
    "larger pixel bomb": (with_members(("x.png", png_of(11000, 11000)), ("x.cls", b"owl")), "too-many-pixels", "x.png"),
    "vast pixel bomb": (with_members(("x.png", png_of(10**5, 10**5)), ("x.cls", b"owl")), "too-many-pixels", "x.png"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_bad_data_is_refused_with_a_code_and_its_place(what):
    data, code, member = REFUSED[what]
    tars.assert_refused(data, code, member)


@pytest.mark.parametrize(
    ("limits", "code"),
    [
        (ShardLimits(members=23), "too-many-members"),
        (ShardLimits(member_bytes=100), "member-too-big"),
        (ShardLimits(shard_bytes=len(GOOD) - 1), "shard-too-big"),
        (ShardLimits(pixels=255), "too-many-pixels"),
        (ShardLimits(min_samples=7), "too-few-samples"),
    ],
)
def test_limits_are_settings(limits, code):
    with pytest.raises(TaskRejected, match=code):
        validate(GOOD, limits=limits)


def test_a_class_of_the_manifest_without_any_sample_is_refused():
    manifest = tars.manifest(GOOD, samples=12, classes=("heron", "owl", "crow"))
    with pytest.raises(TaskRejected, match=r"at least 2 samples of class crow.*got 0.*too-few-samples"):
        validate_task(manifest, tars.opener(GOOD))


def test_of_every_class_one_image_is_left_to_train_on():
    manifest = tars.manifest(GOOD, samples=12, holdout=0.999)
    assert validate_task(manifest, tars.opener(GOOD)).held_out == {"heron": 5, "owl": 5}


def test_classes_of_another_task_are_refused_unless_they_extend_it():
    known = {"owl": "night", "crow": "day"}
    with pytest.raises(
        TaskRejected, match=r"owl \(task night\); rename them, or set bucket\.overlap: extend.*class-overlap"
    ):
        validate(GOOD, known_classes=known)
    report = validate(GOOD, known_classes=known, overlap="extend")
    assert report.warnings[0] == "1 class that other tasks have, too, e.g. owl (task night): both answer with it"


# ---- images that cannot be read, by policy

HEIC = b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(50)
BAD = with_members(("x.png", PNG[:-40]), ("x.cls", b"owl"), ("y.jpg", HEIC), ("y.cls", b"heron"))


def test_bad_images_are_left_out_up_to_a_limit_and_named():
    report = validate(BAD, samples=14, bad_samples="skip", max_bad_samples=0.2)
    assert report.samples == {"heron": 6, "owl": 6}
    first, second = report.warnings
    assert first.startswith("left out birds-000000.tar, x.png, byte ") and "unreadable image" in first
    assert second.startswith("left out birds-000000.tar, y.jpg, byte ") and "got HEIC: not supported" in second
    assert validate(BAD, samples=14, bad_samples="skip", max_bad_samples=2.0) == report
    for limit in (1.0, 0.1, 0.0):
        with pytest.raises(TaskRejected, match=r"bucket\.max_bad_samples\), got more: .*x\.png.*too-many-bad-samples"):
            validate(BAD, samples=14, bad_samples="skip", max_bad_samples=limit)
    with pytest.raises(TaskRejected, match=r"x\.png, byte .*unreadable-image"):
        validate(BAD, samples=14)


def test_training_and_evaluation_leave_out_the_same_images_even_where_they_could_be_read():
    report = validate(BAD, samples=14, bad_samples="skip", max_bad_samples=2.0)
    manifest = tars.manifest(BAD, samples=14)
    report = TaskReport.from_json(json.loads(json.dumps(report.to_json())))
    assert {"x", "y"}.isdisjoint(keys_of(manifest, report.split, BAD)[0] + keys_of(manifest, report.split, BAD)[1])
    left_out = dataclasses.replace(report.split, left_out=frozenset({short_hash(hashlib.sha256(PNG).digest())}))
    data = with_members(("x.png", PNG), ("x.cls", b"owl"))
    trained, held_out = keys_of(tars.manifest(data, samples=13), left_out, data)
    assert "x" not in trained + held_out and len(trained) + len(held_out) == 12


def keys_of(manifest, split, *datas):
    """What is trained on and what is held out."""
    training = training_samples(manifest, tars.opener(*datas), seed=0, shuffle_buffer=4, split=split)
    held_out = held_out_samples(manifest, tars.opener(*datas), split=split)
    return [sample.key for sample in training], [sample.key for sample in held_out]


def test_contradictions_are_counted_past_images_that_were_left_out():
    data = tars.tar([("a.png", b"bad"), ("a.cls", b"owl"), *tars.files(LABELS), ("x.cls", b"owl"),
                     ("x.png", tars.image_bytes(0))])  # fmt: skip
    report = validate(data, samples=14, bad_samples="skip", max_bad_samples=1.0)
    assert "is labelled heron as sample 1 of birds-000000.tar" in report.warnings[1]


def test_other_formats_are_accepted_where_the_limits_say_so():
    data = with_members(("x.gif", tars.image_bytes(99, kind="GIF")), ("x.cls", b"owl"))
    with pytest.raises(TaskRejected, match=r"x\.gif.*got GIF: not supported; .*limits\.formats.*unknown-member"):
        validate(data, samples=13)
    assert validate(data, samples=13, limits=ShardLimits(formats=("gif",))).samples["owl"] == 7


# ---- what is odd, by policy


def test_the_same_image_under_two_labels_is_reported_or_refused():
    data = with_members(("x.cls", b"owl"), ("x.png", tars.image_bytes(0)))
    [warning] = [text for text in validate(data, samples=13).warnings if "image" in text]
    assert "labelled owl, but the same image is labelled heron as sample 0 of birds-000000.tar" in warning
    with pytest.raises(TaskRejected, match=r"birds-000000.tar, x.png, byte .*same-image-two-labels"):
        validate(data, samples=13, duplicates="reject")


def test_nearly_the_same_image_under_two_labels_is_reported_or_refused():
    data = tars.tar([("x.cls", b"owl"), ("x.jpg", tars.image_bytes(0, size=64, kind="JPEG"))])
    [warning] = [text for text in two_shards(data).warnings if "bits" in text]
    assert "birds-000001.tar, x.jpg" in warning
    assert "is labelled heron as sample 0 of birds-000000.tar" in warning
    with pytest.raises(TaskRejected, match="similar-image-two-labels"):
        two_shards(data, duplicates="reject")
    assert not [t for t in two_shards(data, similarity=SimilaritySettings(near_bits=None)).warnings if "bits" in t]


def two_shards(data, **options):
    manifest = tars.manifest(GOOD, data, samples=12)
    manifest = dataclasses.replace(manifest, shards=(manifest.shards[0], tars.shard(data, 1, "birds-000001.tar")))
    return validate_task(manifest, tars.opener(GOOD, data), **options)


def test_extreme_imbalance_is_reported_or_refused():
    data = tars.tar(tars.files(["heron"] * 10 + ["owl"] * 4))
    uneven = SimilaritySettings(imbalance=2.0)
    assert "got 10 of heron and 4 of owl" in validate(data, samples=14, similarity=uneven).warnings[-1]
    with pytest.raises(TaskRejected, match="class-imbalance"):
        validate(data, samples=14, similarity=uneven, imbalanced="reject")


def test_a_task_full_of_contradictions_gives_a_short_report():
    labels = ["heron", "owl"] * 20
    members = [(f"{n:04d}.{k}", v) for n, lb in enumerate(labels) for k, v in (("cls", lb.encode()), ("png", PNG))]
    manifest = tars.manifest(tars.tar([*members, *tars.files(LABELS, start=500)]), samples=52)
    report = validate_task(manifest, tars.opener(tars.tar([*members, *tars.files(LABELS, start=500)])))
    assert len(report.warnings) <= 22
    assert "more images with two labels" in " ".join(report.warnings)
