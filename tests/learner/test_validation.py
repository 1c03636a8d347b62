"""Validating tasks: what they hold is counted, every picture opened, and what is odd reported or refused by policy."""

import dataclasses
import struct
import zlib

import pytest
import tars
from tars import GOOD, LABELS, PNG, validate, with_members

from mqmk.learner.errors import TaskRejected
from mqmk.learner.settings import ShardLimits, SimilaritySettings
from mqmk.learner.shards import held_out_samples
from mqmk.learner.validation import validate_task


def png_of(width, height):
    """A PNG of a few bytes that claims a size."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def test_a_good_task_is_counted_by_class():
    report = validate(GOOD)
    assert report.samples == {"heron": 6, "owl": 6}
    assert sum(report.held_out.values()) == len(
        list(held_out_samples(tars.manifest(GOOD, samples=12), tars.opener(GOOD)))
    )
    assert all(0 <= report.held_out[name] < 6 for name in report.held_out)


# ---- what is refused

REFUSED = {
    "no picture": (with_members(("x.png", b"hello"), ("x.cls", b"owl")), "unreadable-image", "x.png"),
    "empty picture": (with_members(("x.png", b""), ("x.cls", b"owl")), "unreadable-image", "x.png"),
    "half a picture": (with_members(("x.png", PNG[:-40]), ("x.cls", b"owl")), "unreadable-image", "x.png"),
    "another format": (
        with_members(("x.png", tars.picture(1, kind="BMP")), ("x.cls", b"owl")), "unreadable-image", "x.png"),
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


def test_a_class_whose_samples_are_all_held_out_is_refused():
    manifest = tars.manifest(GOOD, samples=12, holdout=0.999)
    with pytest.raises(TaskRejected, match=r"one of them to train on.*too-few-samples"):
        validate_task(manifest, tars.opener(GOOD))


def test_classes_of_another_task_are_refused_unless_they_extend_it():
    known = {"owl": "night", "crow": "day"}
    with pytest.raises(TaskRejected, match=r"owl \(task night\).*overlap: extend.*class-overlap"):
        validate(GOOD, known_classes=known)
    report = validate(GOOD, known_classes=known, overlap="extend")
    assert report.warnings[0] == "1 classes are known already, e.g. owl (task night): answers carry the one label"


# ---- what is odd, by policy


def test_the_same_picture_under_two_labels_is_reported_or_refused():
    data = with_members(("x.cls", b"owl"), ("x.png", tars.picture(0)))
    [warning] = [text for text in validate(data, samples=13).warnings if "picture" in text]
    assert "labelled owl, but the same picture is labelled heron as sample 0 of birds-000000.tar" in warning
    with pytest.raises(TaskRejected, match=r"birds-000000.tar, x.png, byte .*same-image-two-labels"):
        validate(data, samples=13, duplicates="reject")


def test_nearly_the_same_picture_under_two_labels_is_reported_or_refused():
    data = tars.tar([("x.cls", b"owl"), ("x.jpg", tars.picture(0, size=64, kind="JPEG"))])
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
    assert "more pictures with two labels" in " ".join(report.warnings)
