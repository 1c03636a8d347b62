"""Held-out images: drawn per class, by content, with copies on one side."""

import dataclasses
import hashlib
import io
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from support import shards as tars

from mqmk.learner.data.shards import held_out_samples, is_held_out, training_samples
from mqmk.learner.data.similarity import group_copies
from mqmk.learner.data.split import HashedImage, Split, count_held_out, draw_split, short_hash
from mqmk.learner.data.validation import TaskReport, validate_task


@pytest.mark.parametrize(
    ("images", "holdout", "wanted"),
    [(0, 0.2, 0), (1, 0.2, 0), (2, 0.2, 1), (5, 0.2, 1), (30, 0.2, 6), (30, 0.0, 0), (4, 0.999, 3), (1000, 0.001, 1)],
)
def test_a_share_of_every_class_is_held_out_and_some_of_it_is_not(images, holdout, wanted):
    assert count_held_out(images, holdout) == wanted
    split, _ = draw_split([HashedImage(n * 7 % 1009, 0, 0) for n in range(1, images + 1)], 1, holdout, 5)
    held_out = [n * 7 % 1009 for n in range(1, images + 1) if split.is_held_out(0, n * 7 % 1009)]
    assert sorted(held_out) == sorted(n * 7 % 1009 for n in range(1, images + 1))[:wanted]  # the smallest hashes
    assert not split.held_out and not split.trained


images = st.builds(HashedImage, st.integers(0, 300), st.integers(0, 2), st.sampled_from([0, *range(1, 200, 9)]))


@given(st.lists(images, max_size=60, unique_by=lambda each: each.image), st.floats(0, 0.99), st.randoms())
def test_every_class_keeps_the_rules_in_any_order(seen, holdout, rng):
    split, sides = draw_split(seen, 3, holdout, 1)
    mixed = rng.sample(seen, len(seen))
    assert draw_split(mixed, 3, holdout, 1) == (split, sides)
    assert Split.from_json(json.loads(json.dumps(split.to_json()))) == split
    for label, side in enumerate(sides):
        members = [each for each in sorted(seen, key=lambda each: each.image) if each.label == label]
        held_out = {each.image for each in members if split.is_held_out(label, each.image)}
        assert held_out == side.held_out
        assert bool(held_out) is (holdout > 0 and len(members) > 1)
        assert not members or len(held_out) < len(members)
        for group in group_copies([each.perceptual_hash for each in members], 1):
            inside = {members[place].image for place in group}
            assert inside <= held_out or not inside & held_out or side.most_alike == len(inside)


def test_images_with_two_labels_are_never_held_out():
    seen = [
        HashedImage(1, 0, 0),
        HashedImage(2, 0, 0),
        HashedImage(3, 0, 0),
        HashedImage(1, 1, 0),
        HashedImage(4, 1, 0),
        HashedImage(5, 1, 0),
    ]
    split, _ = draw_split(seen, 2, 0.4, 5)
    assert [split.is_held_out(each.label, each.image) for each in seen] == [False, True, False, False, True, False]


def copies_of(seed: int) -> list[bytes]:
    """An image, and what becomes of it when it is saved again and again."""
    coarse = np.random.default_rng(seed).integers(0, 256, (12, 12, 3), dtype=np.uint8)
    image = Image.fromarray(coarse).resize((96, 96), Image.Resampling.BICUBIC)
    found = []
    for quality in (95, 75, 50, 35):
        buffer = io.BytesIO()
        image.resize((96 - quality // 4, 96 - quality // 4)).save(buffer, "JPEG", quality=quality)
        found.append(buffer.getvalue())
    return found


def task_of_copies(originals: int) -> tuple[bytes, dict[str, int]]:
    """A shard of two classes, and which original each key is a copy of."""
    members, original_of = [], {}
    for number in range(originals):
        for place, data in enumerate(copies_of(number)):
            key = f"{number:03d}-{place}"
            original_of[key] = number
            members += [(f"{key}.cls", [b"heron", b"owl"][number % 2]), (f"{key}.jpg", data)]
    return tars.tar(members), original_of


def test_recompressed_copies_never_stand_on_both_sides():
    data, original_of = task_of_copies(24)
    manifest = tars.manifest(data, samples=96)
    report = validate_task(manifest, tars.opener(data))
    opened = tars.opener(data)
    held_out = [sample.key for sample in held_out_samples(manifest, opened, split=report.split)]
    trained = [s.key for s in training_samples(manifest, opened, seed=0, shuffle_buffer=9, split=report.split)]
    assert len(held_out) + len(trained) == 96
    assert {original_of[key] for key in held_out}.isdisjoint(original_of[key] for key in trained)
    assert report.held_out == {"heron": 8, "owl": 8}  # two whole groups of a fifth of 48


def test_a_class_of_copies_of_one_image_is_split_and_reported():
    copies = [(f"c{place}.{kind}", data) for place, image in enumerate(copies_of(50)) for kind, data in
              (("cls", b"heron"), ("jpg", image))]  # fmt: skip
    data = tars.tar([*tars.files(["owl"] * 6), *copies])
    report = validate_task(tars.manifest(data, samples=10), tars.opener(data))
    assert report.held_out == {"heron": 1, "owl": 1}
    assert any(
        "1 class with mostly near copies of one image, e.g. 4 images of heron" in text for text in report.warnings
    )


def test_the_split_does_not_depend_on_the_order_of_shards():
    first, second = (tars.tar(tars.files(["heron", "owl"] * 10, start=start)) for start in (0, 100))
    manifest = tars.manifest(first, second, samples=20)
    turned = dataclasses.replace(manifest, shards=manifest.shards[::-1])
    opened = tars.opener(first, second)
    assert validate_task(manifest, opened).split == validate_task(turned, opened).split
    assert validate_task(manifest, opened).held_out == {"heron": 4, "owl": 4}


def test_a_report_of_an_earlier_version_gives_the_split_of_that_version():
    data = tars.tar(tars.files(["heron", "owl"] * 20))
    manifest, opened = tars.manifest(data, samples=40), tars.opener(data)
    old = TaskReport.from_json(
        {"samples": {"heron": 20, "owl": 20}, "held_out": {"heron": 4, "owl": 3}, "warnings": []}
    )
    assert old.split is None
    held_out = [sample.image for sample in held_out_samples(manifest, opened, split=old.split)]
    assert held_out and all(is_held_out(hashlib.sha256(image).digest(), 0.2) for image in held_out)
    new = validate_task(manifest, opened)
    assert [s.image for s in held_out_samples(manifest, opened, split=new.split)] != held_out
    assert all(new.split.is_held_out(s.label, short_hash(hashlib.sha256(s.image).digest())) for s in
               held_out_samples(manifest, opened, split=new.split))  # fmt: skip
