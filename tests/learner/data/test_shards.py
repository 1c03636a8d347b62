"""Reading shards: what is no sample is refused with its place, the rest is streamed, split and mixed."""

import dataclasses
import io
import os
import pickle
import random
import tarfile
import tracemalloc
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import shards as tars
from support.shards import GOOD, LABELS, PNG, validate, with_members
from webdataset.writer import TarWriter

from mqmk.learner.data.shards import (
    Sample,
    ShardLimits,
    held_out_samples,
    is_held_out,
    survey_shard,
    training_samples,
)
from mqmk.learner.data.validation import validate_task
from mqmk.learner.errors import TaskRejected

# ---- what is accepted


@pytest.mark.parametrize("kind", ["jpg", "jpeg", "png", "webp", "JPG"])
def test_every_allowed_kind_of_image_is_read(kind):
    data = tars.image_bytes(1, kind={"jpg": "JPEG", "jpeg": "JPEG"}.get(kind.lower(), kind.upper()))
    assert validate(with_members((f"x.{kind}", data), ("x.cls", b"owl\n"), ("x.txt", b"a caption")), samples=13)


@pytest.mark.parametrize(
    ("member", "label"),
    [
        (("x.cls", b"owl"), "owl"),
        (("x.cls", b" owl\n"), "owl"),
        (("x.cls", b"1"), "owl"),
        (("x.json", b'{"label": "owl", "camera": 3}'), "owl"),
        (("x.json", b'{"label": 0}'), "heron"),
    ],
)
def test_a_label_is_a_name_or_an_index_in_cls_or_json(member, label):
    data = with_members(("x.png", PNG), member)
    assert validate(data, samples=13).samples[label] == 7


def test_where_cls_and_json_stand_side_by_side_cls_is_the_label():
    data = with_members(("x.cls", b"owl"), ("x.json", b"{no json at all"), ("x.png", PNG))
    assert validate(data, samples=13).samples["owl"] == 7


def test_what_webdatasets_own_writer_makes_is_read():
    buffer = io.BytesIO()
    with TarWriter(buffer, encoder=False) as writer:  # with times as pax headers, one for each member
        for number, label in enumerate(LABELS):
            writer.write({"__key__": f"{number:04d}", "png": tars.image_bytes(number), "cls": label.encode()})
    assert validate(buffer.getvalue()).samples == {"heron": 6, "owl": 6}


# ---- what is refused, each with its code, shard and member

REFUSED = {
    "image without label": (with_members(("x.png", PNG)), "half-sample", "x.png"),
    "label without image": (with_members(("x.cls", b"owl")), "half-sample", "x.cls"),
    "only a caption": (with_members(("x.txt", b"owl")), "half-sample", "x.txt"),
    "parts not side by side": (
        with_members(("x.png", PNG), ("y.png", PNG), ("x.cls", b"owl"), ("y.cls", b"owl")), "half-sample", "x.png"),
    "two images": (with_members(("x.jpg", PNG), ("x.png", PNG), ("x.cls", b"owl")), "two-images", "x.jpg"),
    "unknown kind": (with_members(("x.png", PNG), ("x.cls", b"owl"), ("x.npy", b"")), "unknown-member", "x.npy"),
    "pickle": (with_members(("x.pyd", b"")), "unknown-member", "x.pyd"),
    "two dots": (with_members(("x.seg.png", PNG)), "unknown-member", "x.seg.png"),
    "no dot": (with_members(("README", b"")), "unknown-member", "README"),
    "meta member": (with_members(("__index__.json", b"{}")), "unknown-member", "__index__.json"),
    "meta folder": (with_members(("__a__/x.png", PNG)), "unknown-member", "__a__/x.png"),
    "member twice": (with_members(("x.png", PNG), ("x.png", PNG)), "duplicate-member", "x.png"),
    "member twice in two cases": (with_members(("x.png", PNG), ("x.PNG", PNG)), "duplicate-member", "x.PNG"),
    "key twice": (with_members(("0003.png", PNG), ("0003.cls", b"owl")), "duplicate-member", "0003.png"),
    "huge label": (with_members(("x.cls", b"o" * 2**21), ("x.png", PNG)), "member-too-big", "x.cls"),
    "class of nobody": (with_members(("x.png", PNG), ("x.cls", b"crow")), "unknown-class", "x.cls"),
    "index of nobody": (with_members(("x.png", PNG), ("x.cls", b"2")), "unknown-class", "x.cls"),
    "label that is no text": (with_members(("x.png", PNG), ("x.cls", b"\xff\xfe")), "bad-label", "x.cls"),
    "json without label": (with_members(("x.png", PNG), ("x.json", b"{}")), "bad-label", "x.json"),
    "json of another kind": (with_members(("x.png", PNG), ("x.json", b"[1]")), "bad-label", "x.json"),
    "json too deep": (with_members(("x.png", PNG), ("x.json", b"[" * 10**5)), "bad-label", "x.json"),
    "json label that is a list": (with_members(("x.png", PNG), ("x.json", b'{"label": [1]}')), "bad-label", "x.json"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_bad_data_is_refused_with_a_code_and_its_place(what):
    data, code, member = REFUSED[what]
    tars.assert_refused(data, code, member)


def test_the_offset_is_that_of_the_members_header():
    data = with_members(("x.npy", b"1"))
    with pytest.raises(TaskRejected) as refused:
        validate(data)
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        assert refused.value.offset == archive.getmember("x.npy").offset


def test_a_changed_byte_is_a_wrong_hash():
    padding = GOOD.index(b"heron") + 100  # where nothing else would notice
    changed = GOOD[:padding] + b"!" + GOOD[padding + 1 :]
    with pytest.raises(TaskRejected, match=r"expected sha256 .* got .*wrong-hash"):
        validate_task(tars.manifest(GOOD, samples=12), tars.opener(changed))


@pytest.mark.parametrize("change", [-512, 512])
def test_another_number_of_bytes_is_a_wrong_size(change):
    changed = GOOD[:change] if change < 0 else GOOD + b"\0" * change
    with pytest.raises(TaskRejected, match="wrong-size"):
        validate_task(tars.manifest(GOOD, samples=12), tars.opener(changed))


@pytest.mark.parametrize("samples", [11, 13])
def test_another_number_of_samples_is_a_wrong_count(samples):
    with pytest.raises(TaskRejected, match=f"expected {samples} samples, got 12.*wrong-count"):
        validate(GOOD, samples=samples)


def test_a_shard_that_is_not_there_is_named():
    with pytest.raises(TaskRejected, match=r"birds-000001.tar: .*missing-shard"):
        validate_task(tars.manifest(GOOD, tars.tar(tars.files(["owl"], start=50)), samples=12), tars.opener(GOOD))


def test_the_same_key_in_two_shards_is_refused():
    other = tars.tar(tars.files(["owl"] * 12, start=11))
    with pytest.raises(TaskRejected, match=r"birds-000001.tar, 0011.cls, .*duplicate-member"):
        validate(GOOD, other)


def test_a_survey_keeps_the_limits_too():
    with pytest.raises(TaskRejected, match="shard-too-big"):
        survey_shard("birds-000000.tar", tars.opener(GOOD), ShardLimits(shard_bytes=2048))


# ---- nothing from outside is opened or run


def test_no_name_in_the_data_is_opened_and_no_pickle_is_loaded(tmp_path):
    proof = tmp_path / "proof"

    class Exploit:
        def __reduce__(self):
            return os.system, (f"touch {proof}",)

    attack = pickle.dumps(Exploit())
    pickle.loads(attack)
    assert proof.exists()  # the attack works,
    proof.unlink()
    for member in ("x.pyd", "x.pickle", "x.pth", "x.png", "x.cls", "x.json"):
        data = tars.tar([(member, attack), *tars.files(LABELS)])
        manifest = tars.manifest(data, samples=12)
        for read in (
            validate_task,
            held_out_samples,
            lambda *a: training_samples(*a, seed=0, shuffle_buffer=9),
        ):
            with pytest.raises(TaskRejected):
                list(read(manifest, tars.opener(data)))
    shard = dataclasses.replace(tars.shard(GOOD, 12))
    object.__setattr__(shard, "name", f"pipe:touch {proof}")  # behind the back of the manifest's checks
    manifest = tars.manifest(GOOD, samples=12)
    object.__setattr__(manifest, "shards", (shard,))
    opened = []
    validate_task(manifest, lambda name: opened.append(name) or io.BytesIO(GOOD))
    list(training_samples(manifest, lambda name: opened.append(name) or io.BytesIO(GOOD), seed=0, shuffle_buffer=4))
    assert opened == [shard.name] * 2  # only our own opener ever saw the name
    assert not proof.exists()  # and it never ran here


SMALL = tars.tar([
    *tars.files(["heron", "owl", "owl"]),
    ("j.jpg", tars.image_bytes(7, kind="JPEG")), ("j.json", b'{"label": 0}'),
    ("w" * 120 + ".webp", tars.image_bytes(8, kind="WEBP")), ("w" * 120 + ".cls", b"0"),
])  # fmt: skip


@settings(max_examples=150)
@given(data=st.data())
def test_damaged_bytes_are_accepted_or_rejected_and_nothing_else(data):
    broken = bytearray(SMALL)
    for _ in range(data.draw(st.integers(1, 4))):
        broken[data.draw(st.integers(0, len(broken) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(broken[: data.draw(st.one_of(st.just(len(broken)), st.integers(0, len(broken))))])
    if cut != SMALL:
        with pytest.raises(TaskRejected):  # its hash is another one, if nothing else
            validate_task(tars.manifest(SMALL, samples=5), tars.opener(cut))
        try:
            survey_shard("birds-000000.tar", tars.opener(cut))
            validate(cut, samples=5, limits=ShardLimits(min_samples=1))  # even under a manifest that believes it
        except TaskRejected as error:
            assert error.code  # noqa: PT017 - it may also be accepted


# ---- training and evaluation read the two sides of one split


def both_sides(manifest, *datas):
    """Everything, as training and evaluation see it."""
    training = training_samples(manifest, tars.opener(*datas), seed=0, shuffle_buffer=4)
    return [*training, *held_out_samples(manifest, tars.opener(*datas))]


def many(count, start=0):
    return tars.tar(tars.files([("heron", "owl")[n % 2] for n in range(count)], start=start))


def test_every_sample_is_on_exactly_one_side():
    datas = many(40), many(40, 100), many(40, 200)
    manifest = tars.manifest(*datas, samples=40)
    samples = both_sides(manifest, *datas)
    assert len({sample.key for sample in samples}) == len(samples) == 120
    held_out = [sample for sample in samples if sample.held_out]
    assert 12 <= len(held_out) <= 36  # a fifth of 120, give or take
    assert not {s.image for s in held_out} & {s.image for s in samples if not s.held_out}
    assert samples[0] == Sample(samples[0].key, samples[0].image, int(samples[0].key) % 2, held_out=False)
    assert Counter(sample.label for sample in samples) == {0: 60, 1: 60}


def test_an_image_stays_on_its_side_whatever_its_name_shard_or_order():
    names = random.Random(0)
    members = [(f"{names.random()}".replace(".", ""), label, n) for n, label in enumerate(["heron", "owl"] * 20)]
    names.shuffle(members)
    other = tars.tar(
        [m for key, label, n in members for m in ((f"{key}.png", tars.image_bytes(n)), (f"{key}.cls", label.encode()))]
    )
    first, second = many(40), other

    def held(data):
        return {sample.image for sample in held_out_samples(tars.manifest(data, samples=40), tars.opener(data))}

    assert held(first) == held(second)
    assert held(first)


def test_the_split_follows_the_fraction():
    assert not is_held_out(b"\0" * 32, 0.0)
    assert is_held_out(b"\0" * 32, 0.01)
    assert not is_held_out(b"\xff" * 32, 0.999)
    assert is_held_out(b"\x7f" + b"\xff" * 31, 0.5)
    assert not is_held_out(b"\x80" + b"\0" * 31, 0.5)


def order(manifest, datas, **options):
    chosen = {"seed": 0, "shuffle_buffer": 16} | options
    return [sample.key for sample in training_samples(manifest, tars.opener(*datas), **chosen)]


def test_the_order_of_training_depends_on_content_and_seed_only():
    datas = many(40), many(40, 100), many(40, 200)
    manifest = tars.manifest(*datas, samples=40)
    first = order(manifest, datas)
    random.seed(17)  # the global generator has no say
    assert order(manifest, datas) == first
    assert sorted(order(manifest, datas, seed=1)) == sorted(first)
    assert order(manifest, datas, seed=1) != first
    shuffled = dataclasses.replace(manifest, shards=manifest.shards[::-1], created="later")
    assert order(shuffled, datas) == first


def test_training_mixes_within_and_between_shards():
    datas = many(40), many(40, 100)
    keys = order(tars.manifest(*datas, samples=40), datas, shuffle_buffer=30)
    assert keys != sorted(keys)
    assert [key for key in keys if key < "0100"] != sorted(key for key in keys if key < "0100")
    shards = [key >= "0100" for key in keys]
    assert shards != sorted(shards)
    assert shards != sorted(shards, reverse=True)


def test_the_first_sample_comes_from_the_whole_buffer():
    data = many(40)
    firsts = {order(tars.manifest(data, samples=40), [data], seed=seed, shuffle_buffer=40)[0] for seed in range(8)}
    assert len(firsts) > 4


def test_held_out_samples_come_in_a_fixed_order():
    datas = many(40), many(40, 100)
    manifest = tars.manifest(*datas, samples=40)
    first = list(held_out_samples(manifest, tars.opener(*datas)))
    swapped = dataclasses.replace(manifest, shards=manifest.shards[::-1])
    assert list(held_out_samples(swapped, tars.opener(*datas))) == first


def test_a_shard_that_changed_after_validation_stops_training():
    changed = GOOD.replace(b"heron", b"hexon")
    with pytest.raises(TaskRejected):
        order(tars.manifest(GOOD, samples=12), [changed])


def test_training_holds_the_shuffle_buffer_and_no_more(tmp_path):
    """1,000 samples of 20 kB are 20 MB; with a buffer of 20 they cost less than two."""
    noise = random.Random(0)
    path = tmp_path / "birds-000000.tar"
    with path.open("wb") as file, tarfile.open(fileobj=file, mode="w|") as writer:
        for number in range(1000):
            for name, data in ((f"{number}.cls", b"owl"), (f"{number}.png", noise.randbytes(20_000))):
                writer.addfile(tars.info(name, len(data)), io.BytesIO(data))
    survey = survey_shard("birds-000000.tar", lambda _: path.open("rb"))
    manifest = dataclasses.replace(tars.manifest(GOOD, samples=1), shards=(survey.shard,))
    tracemalloc.start()
    count = sum(1 for _ in training_samples(manifest, lambda _: path.open("rb"), seed=0, shuffle_buffer=20))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count > 700
    assert peak < 2e6


def test_streams_are_closed_even_when_reading_stops_early():
    streams = []

    def opened(_name):
        streams.append(io.BytesIO(GOOD))
        return streams[-1]

    manifest = tars.manifest(GOOD, samples=12)
    samples = held_out_samples(manifest, opened)
    next(samples)
    samples.close()
    with pytest.raises(TaskRejected):
        validate_task(manifest, opened, ShardLimits(pixels=1))
    validate_task(manifest, opened)
    assert [stream.closed for stream in streams] == [True] * 3
