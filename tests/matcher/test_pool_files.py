"""The files of a pool version: the contract, a faithful round trip, and every way of being refused."""

import dataclasses
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from support.builders import frozen, random_pool, random_task, random_timm_vit

from mqmk.matcher.errors import PoolError
from mqmk.matcher.pool_cards import encode_version, parse_card
from mqmk.matcher.pool_files import PoolFiles, decode, encode, read_pool, write_pool


@pytest.fixture
def pool():
    pool = random_pool((3, 1), vit=frozen(random_timm_vit())).with_task(random_task("grouped", 4, keys=2))
    return pool.with_matching({"matchers": {"mqmk": {"rate": 0.75, "cost": 3.0}}})


def test_a_version_is_two_files_with_the_names_and_fields_of_the_contract(pool, tmp_path):
    identity = write_pool(pool, tmp_path / "pools", version=4, parent=3)
    folder = tmp_path / "pools" / f"4-{identity.digest[:12]}"
    assert sorted(path.name for path in folder.iterdir()) == ["pool.json", "pool.safetensors"]
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    card = json.loads((folder / "pool.json").read_text())
    assert card["schema"] == 1
    assert (card["version"], card["parent"], card["digest"]) == (4, 3, identity.digest)
    assert card["backbone"].keys() >= {"name", "weights_sha256", "image_size", "mean", "std"}
    assert (card["g_layers"], card["e_layers"], card["head"]) == ([0, 1], [2, 3], {"scale": 16.0})
    assert card["tasks"][2]["classes"] == ["grouped-0", "grouped-1", "grouped-2", "grouped-3"]
    fields = {"name", "classes", "manifest_sha256", "samples", "trained_at", "metrics"}
    assert card["tasks"][0].keys() == fields | {"class_samples"}
    assert card["tasks"][0]["class_samples"] == [10, 40, 70]
    assert card["matching"] == {"matchers": {"mqmk": {"rate": 0.75, "cost": 3.0}}}
    with safe_open(folder / "pool.safetensors", "pt") as tensors:
        shapes = {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118
    assert shapes["g_prompt"] == [2, 2, 5, 32]
    assert shapes["tasks.2.e_prompt"] == [2, 2, 3, 32]
    assert shapes["tasks.2.keys"] == [2, 32]
    assert shapes["tasks.2.head"] == shapes["tasks.2.means"] == [4, 32]


def test_what_is_read_is_what_was_written(pool, tmp_path):
    identity = write_pool(pool, tmp_path, version=1, parent=None)
    again, copy = read_pool(tmp_path / identity.folder, pool.backbone)
    assert again == identity
    assert torch.equal(copy.g_prompt, pool.g_prompt)
    for mine, theirs in zip(pool.tasks, copy.tasks, strict=True):
        assert mine.tensors().keys() == theirs.tensors().keys()
        assert all(torch.equal(tensor, theirs.tensors()[name]) for name, tensor in mine.tensors().items())
        for name in ("name", "classes", "samples", "class_samples", "metrics"):
            assert getattr(mine, name) == getattr(theirs, name)
    assert encode(copy, 1, None) == encode(pool, 1, None)


def test_writing_the_same_version_twice_changes_nothing(pool, tmp_path):
    first = write_pool(pool, tmp_path, version=1, parent=None)
    before = (tmp_path / first.folder / "pool.json").stat()
    assert write_pool(pool, tmp_path, version=1, parent=None) == first
    assert (tmp_path / first.folder / "pool.json").stat() == before
    assert len(list(tmp_path.iterdir())) == 1


def test_an_empty_pool_can_be_written_and_read(pool, tmp_path):
    empty = dataclasses.replace(pool, tasks=(), matching={})
    identity = write_pool(empty, tmp_path, version=0, parent=None)
    assert read_pool(tmp_path / identity.folder)[1].tasks == ()


def damaged(pool, what):
    """The files of a pool with one thing wrong, digests made right again where the damage is in the content."""
    _, good = encode(pool, 1, None)
    card = json.loads(good.card)

    def resealed(**fields):
        import hashlib

        new = {key: value for key, value in (card | fields).items() if key != "digest"}
        digest = hashlib.sha256(json.dumps(new, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
        return PoolFiles(good.tensors, json.dumps({"digest": digest} | new).encode())

    first = card["tasks"][0]
    return {
        "truncated tensors": PoolFiles(good.tensors[:-10], good.card),
        "flipped bit": PoolFiles(good.tensors[:-1] + bytes([good.tensors[-1] ^ 1]), good.card),
        "renamed class": PoolFiles(good.tensors, good.card.replace(b"task0-0", b"task0-9")),
        "not json": PoolFiles(good.tensors, b"\x80\x04pickle"),
        "json of another kind": PoolFiles(good.tensors, b"[1, 2]"),
        "missing field": resealed(g_layers=None),
        "newer schema": resealed(schema=2),
        "missing class": resealed(tasks=[first | {"classes": first["classes"][:-1]}, *card["tasks"][1:]]),
        "task without tensors": resealed(tasks=[*card["tasks"], first | {"name": "ghost"}]),
        "tensors without task": resealed(tasks=card["tasks"][:-1]),
        "wrong dimension": PoolFiles(good.tensors, resealed(e_layers=[2]).card),
    }[what]


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("truncated tensors", "wrong sha256"),
        ("flipped bit", "wrong sha256"),
        ("renamed class", "its digest does not cover its content"),
        ("not json", "not a pool"),
        ("json of another kind", "not a pool"),
        ("missing field", "not a pool"),
        ("newer schema", "expected schema 1, got 2; upgrade"),
        ("missing class", "expected 1 to 2 keys, got 3"),
        ("task without tensors", "not a pool"),
        ("tensors without task", "tensors that pool.json does not name"),
        ("wrong dimension", "expected an e-prompt"),
    ],
)
def test_a_damaged_pool_is_refused_with_its_reason(pool, what, reason):
    with pytest.raises(PoolError, match=reason):
        decode(damaged(pool, what))


@given(data=st.data())
def test_no_bytes_make_reading_fail_in_any_other_way(data):
    _, good = encode(random_pool((2, 1), vit=frozen(random_timm_vit())), 1, None)
    card, tensors = bytearray(good.card), bytearray(good.tensors)
    for target in data.draw(st.lists(st.sampled_from([card, tensors]), min_size=1, max_size=5)):
        target[data.draw(st.integers(0, len(target) - 1))] = data.draw(st.integers(0, 255))
    broken = PoolFiles(bytes(tensors), bytes(card))
    if broken != good:
        try:
            decode(broken)
        except PoolError:
            return
        assert json.loads(broken.card) == json.loads(good.card)  # only white space of the card may differ


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_values_that_are_not_finite_are_refused_even_with_the_right_hash(pool, value):
    decode(encode(pool, 1, None)[1])
    pool.tasks[1].keys[0, 0] = value  # in place, behind the back of the checks
    with pytest.raises(PoolError, match="task 'task1': keys has values that are not finite"):
        decode(encode(pool, 1, None)[1])


def test_a_free_head_is_stored_and_read_as_such_and_any_other_kind_is_refused(pool):
    free = dataclasses.replace(pool, head_kind="free", logit_scale=1.0)
    _, files = encode(free, 1, None)
    assert json.loads(files.card)["head"] == {"scale": 1.0, "rows": "free"}
    _, again = decode(files)
    assert again.head_kind == "free"
    assert torch.equal(again.head, torch.cat([task.head for task in pool.tasks]))
    card = parse_card(encode_version(free, 1, None, lambda _: False).card, lambda _: b"")
    assert card.head == {"logit_scale": 1.0, "head_kind": "free"}
    assert json.loads(encode(pool, 1, None)[1].card)["head"] == {"scale": pool.logit_scale}  # as older releases read it
    with pytest.raises(PoolError, match="normalised or free, got 'loose'"):
        dataclasses.replace(pool, head_kind="loose")


def test_a_pool_of_an_older_release_has_no_class_sizes_and_reads_as_before(pool):
    old = dataclasses.replace(pool, tasks=tuple(dataclasses.replace(task, class_samples=()) for task in pool.tasks))
    _, files = encode(old, 1, None)
    assert b"class_samples" not in files.card
    assert [task.class_samples for task in decode(files)[1].tasks] == [(), (), ()]


def test_another_backbone_is_refused(pool, tmp_path):
    identity = write_pool(pool, tmp_path, version=1, parent=None)
    for change in ({"weights_sha256": "f" * 64}, {"image_size": 24}, {"name": "other"}):
        with pytest.raises(PoolError, match="the pool was trained on random"):
            read_pool(tmp_path / identity.folder, dataclasses.replace(pool.backbone, **change))


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(PoolError, match=r"7-abc.*No such file"):
        read_pool(tmp_path / "7-abc")
