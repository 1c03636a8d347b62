"""Contradictions between images: what counts as the same, what does not, and what looking for it costs."""

import hashlib
import io
import random
import tarfile
import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageEnhance

from mqmk.learner.data.similarity import HASH_BITS, Lookalike, Lookalikes, _split_bands, describe_imbalance, image_hash


def opened(seed):
    """Noise with the spectrum of a photograph: twice as fine, half as strong."""
    rng, pixels = np.random.default_rng(seed), np.full((64, 64, 3), 120.0)
    for octave in range(5):
        grid = rng.normal(0, 30 / 2**octave, (2 << octave, 2 << octave, 3))
        for channel in range(3):
            layer = Image.fromarray(grid[:, :, channel].astype(np.float32))
            pixels[:, :, channel] += np.asarray(layer.resize((64, 64), Image.Resampling.BICUBIC))
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def digest(text):
    return hashlib.sha256(str(text).encode()).digest()


def recompressed(image):
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=60)
    return Image.open(buffer).convert("RGB")


CHANGES = {
    "recompressed": recompressed,
    "smaller": lambda image: image.resize((40, 40)),
    "larger": lambda image: image.resize((150, 150)),
    "brighter": lambda image: ImageEnhance.Brightness(image).enhance(1.1),
    "grey": lambda image: image.convert("L").convert("RGB"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_copy_under_another_label_is_found(change):
    found = 0
    for seed in range(20):
        earlier = Lookalikes()
        assert earlier.add(digest(seed), opened(seed), 0) is None
        twin = earlier.add(digest("copy"), CHANGES[change](opened(seed)), 1)
        found += twin is not None and (twin.number, twin.label) == (0, 0)
    assert found >= 18


def test_different_images_are_not_taken_for_copies():
    earlier = Lookalikes()
    assert [earlier.add(digest(seed), opened(seed), seed % 7) for seed in range(300)] == [None] * 300


def test_the_very_same_bytes_are_found_even_without_near_duplicates():
    for near_bits in (None, 0, 5, 7):
        earlier = Lookalikes(near_bits)
        earlier.add(digest("other"), opened(2), 0)
        earlier.add(digest("same"), opened(1), 0)
        assert earlier.add(digest("same"), opened(1), 1) == Lookalike(number=1, label=0, distance=None)


def test_copies_with_the_same_label_are_no_contradiction():
    earlier = Lookalikes()
    earlier.add(digest("same"), opened(1), 0)
    assert earlier.add(digest("same"), opened(1), 0) is None
    assert earlier.add(digest("near"), recompressed(opened(1)), 0) is None


def test_blank_images_resemble_nothing():
    white, black = Image.new("RGB", (32, 32), "white"), Image.new("RGB", (32, 32), "black")
    assert image_hash(white) is None
    earlier = Lookalikes()
    assert earlier.add(digest(0), white, 0) is None
    assert earlier.add(digest(1), black, 1) is None
    assert earlier.add(digest(0), white, 1) == Lookalike(0, 0, None)


@given(st.integers(0, 2**HASH_BITS - 1), st.integers(0, 7), st.data())
def test_hashes_that_differ_in_few_bits_share_a_band(seen, near_bits, data):
    other = seen
    for bit in data.draw(st.sets(st.integers(0, HASH_BITS - 1), max_size=near_bits)):
        other ^= 1 << bit
    bands = _split_bands(near_bits + 1)
    assert any(seen >> shift & mask == other >> shift & mask for shift, mask in bands)
    assert sum(mask.bit_count() for _, mask in bands) == HASH_BITS


def test_settings_that_cannot_work_are_refused():
    with pytest.raises(ValueError, match="from 0 to 7 or None, got 8"):
        Lookalikes(8)


def test_many_images_that_all_look_alike_cost_bounded_time_and_memory():
    """The worst case: everything in one bucket, which is capped."""
    image, rng = opened(1), random.Random(0)
    digests = [rng.randbytes(32) for _ in range(1000)]
    earlier = Lookalikes()
    tracemalloc.start()
    for number in digests:
        earlier.add(number, image, 0)
    memory = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert memory / len(digests) < 300  # bytes for each image
    assert max(map(len, earlier._near._buckets.values())) == 256
    begin = time.process_time()
    for _ in range(50):
        earlier.add(rng.randbytes(32), image, 0)
    assert (time.process_time() - begin) / 50 < 0.05


def test_imbalance_is_a_ratio_of_the_largest_to_the_smallest_class():
    assert describe_imbalance({"heron": 50, "owl": 1}, 50.0) is None
    assert describe_imbalance({"heron": 10}, 50.0) is None
    assert describe_imbalance({"heron": 51, "owl": 1, "crow": 9}, 50.0) == (
        "expected at most 50 samples of the largest class for each of the smallest, got 51 of heron and 1 of owl"
    )


@pytest.mark.shared
def test_of_real_photographs_only_the_real_duplicate_is_found(assets):
    """One image is both a baby and a girl in this part of CIFAR-100; no other two only look alike."""
    earlier, found = Lookalikes(), []
    with tarfile.open(assets / "cifar100-200x50.tar") as archive:
        for member in archive:
            label = member.name.split("/")[-2]
            if label in ("baby", "boy", "girl", "man", "woman") and member.isreg() and "/train/" in member.name:
                data = archive.extractfile(member).read()
                image = Image.open(io.BytesIO(data)).convert("RGB")
                number = ("baby", "boy", "girl", "man", "woman").index(label)
                found.append((member.name, earlier.add(hashlib.sha256(data).digest(), image, number)))
    twins = [(name, twin.distance) for name, twin in found if twin is not None]
    assert twins == [("cifar100/train/girl/0004.png", None)]
