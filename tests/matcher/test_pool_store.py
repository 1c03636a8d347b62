"""A store made of layers: what is written, shared, read back, refused and collected."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.builders import frozen, random_task, random_timm_vit

from mqmk.matcher.errors import PoolError
from mqmk.matcher.pool import PromptPool, TaskPrompt
from mqmk.matcher.pool_cards import PAGE
from mqmk.matcher.pool_store import PoolStore


def small_task(number: int) -> TaskPrompt:
    task = random_task(f"task{number}", 2)
    return replace(task, factor=None, residual=None, feature_means=None, manifest_sha256=f"{number:064x}")


def pool_of(tasks: int) -> PromptPool:
    vit = frozen(random_timm_vit())
    pool = PromptPool(vit.info, (0, 1), (2, 3), torch.randn(2, 2, 5, 32), matching={"held_out": 3})
    for number in range(tasks):
        pool = replace(pool, tasks=(*pool.tasks, small_task(number)))
    return pool


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def same(one: PromptPool, two: PromptPool) -> bool:
    pairs = zip(one.tasks, two.tasks, strict=True)
    fields = ("name", "classes", "manifest_sha256", "samples", "class_samples", "trained_at", "metrics", "base")
    return (
        torch.equal(one.g_prompt, two.g_prompt)
        and (one.backbone, one.matching) == (two.backbone, two.matching)
        and all(getattr(a, name) == getattr(b, name) for a, b in pairs for name in fields)
        and all(
            a.tensors().keys() == b.tensors().keys()
            and all(torch.equal(a.tensors()[name], b.tensors()[name]) for name in a.tensors())
            for a, b in zip(one.tasks, two.tasks, strict=True)
        )
    )


def test_a_version_is_a_card_that_names_every_layer_and_its_digest_is_the_hash_of_the_card(tmp_path: Path) -> None:
    store, pool = PoolStore(tmp_path / "pools"), pool_of(2)
    at = store.write(pool, version=4, parent=3)
    (card,) = store.versions.iterdir()
    assert card.name == f"4-{at.digest[:12]}.json" and hashlib.sha256(card.read_bytes()).hexdigest() == at.digest
    fields = json.loads(card.read_bytes())
    assert {"schema": 2, "version": 4, "parent": 3, "pool_level": None}.items() <= fields.items()
    assert fields["head"] == {"scale": 16.0} and fields["g_layers"] == [0, 1] and fields["matching"] == {"held_out": 3}
    wanted = {"name", "classes", "layer", "statistics", "bytes", "manifest_sha256", "base", "samples", "trained_at"}
    assert wanted | {"metrics"} <= fields["tasks"][0].keys()
    for row in fields["tasks"]:
        layer = store.layers / f"{row['layer']}.safetensors"
        assert hashlib.sha256(layer.read_bytes()).hexdigest() == row["layer"] and layer.stat().st_size == row["bytes"]
    assert names_in(store.layers) == {
        f"{name}.safetensors" for name in (fields["g"], *(row["layer"] for row in fields["tasks"]))
    }
    assert same(store.read(at, pool.backbone), pool)


@pytest.mark.parametrize("tasks", [0, 1, PAGE, PAGE + 1, 2 * PAGE + 5])
def test_a_pool_of_any_size_comes_back_as_it_was(tmp_path: Path, tasks: int) -> None:
    store, pool = PoolStore(tmp_path), pool_of(tasks)
    at = store.write(pool, 1, None)
    assert same(store.read(at), pool)
    assert store.write(pool, 1, None) == at, "the same bytes again"
    assert [card.identity for card in store.cards(1)] == [at] and store.cards(2) == []


def test_one_more_task_adds_its_layer_and_less_than_a_page_whatever_was_there(tmp_path: Path) -> None:
    store, pool = PoolStore(tmp_path), pool_of(4 * PAGE)
    pool = store.read(store.write(pool, 1, None))
    before, cards = names_in(store.layers), names_in(store.versions)
    task = small_task(9_999)
    at = store.write(pool.with_task(task), 2, 1)
    new = names_in(store.layers) - before
    (card,) = names_in(store.versions) - cards
    assert len([name for name in new if name.endswith(".safetensors")]) == 1
    assert len(new) <= 2, "the layer, and the page that has become full"
    row = (store.versions / card).stat().st_size / len(store.card(at).pages)
    assert (store.versions / card).stat().st_size < 5_000 and row > 0


def test_known_tasks_are_shared_and_only_new_layers_are_read(tmp_path: Path) -> None:
    store, pool = PoolStore(tmp_path), pool_of(3)
    first = store.read(store.write(pool, 1, None))
    at = store.write(first.with_task(small_task(7)), 2, 1)
    for task in first.tasks:
        (store.layers / f"{task.layer}.safetensors").write_bytes(b"nobody reads this")
    second = store.read(at, known=(first,))
    assert all(new is old for new, old in zip(second.tasks, first.tasks, strict=False)) and len(second.tasks) == 4
    with pytest.raises(PoolError, match="wrong sha256"):
        store.read(at)


def test_a_changed_copy_of_a_stored_task_is_stored_as_what_it_is(tmp_path: Path) -> None:
    store = PoolStore(tmp_path)
    read = store.read(store.write(pool_of(2), 1, None))
    changed = replace(read.tasks[1], keys=read.tasks[1].keys + 1)
    again = store.read(store.write(replace(read, tasks=(read.tasks[0], changed)), 2, 1))
    assert again.tasks[1].keys.equal(changed.keys)
    assert again.tasks[0].layer == read.tasks[0].layer and again.tasks[1].layer != read.tasks[1].layer


def test_a_task_on_another_device_is_the_stored_one_and_a_pool_that_stays_is_itself(tmp_path: Path) -> None:
    store = PoolStore(tmp_path)
    read = store.read(store.write(pool_of(2), 1, None))
    assert read.to(torch.device("cpu")) is read
    task = read.tasks[0]
    moved = task.to(torch.device("meta"))
    assert (moved.layer, moved.layer_bytes, moved.keys.device.type) == (task.layer, task.layer_bytes, "meta")
    assert task.layer and task.keys.device.type == "cpu"


@pytest.mark.parametrize("field", ["classes", "manifest_sha256", "samples", "class_samples", "trained_at", "metrics"])
def test_of_a_known_task_the_tensors_are_shared_and_the_rest_is_what_the_card_says(tmp_path: Path, field: str) -> None:
    store, task = PoolStore(tmp_path), small_task(0)
    pool = replace(pool_of(0), tasks=(task,))
    first = store.read(store.write(pool, 1, None))
    values = {"classes": ("x", "y"), "samples": 77, "class_samples": (3, 4), "metrics": {"accuracy": 0.25}}
    changed = replace(task, **{field: values.get(field, "other")})
    (second,) = store.read(store.write(replace(pool, tasks=(changed,)), 2, 1), known=(first,)).tasks
    assert getattr(second, field) == getattr(changed, field) != getattr(first.tasks[0], field)
    assert second.layer == first.tasks[0].layer and second.e_prompt is first.tasks[0].e_prompt


@pytest.mark.parametrize("what", ["card", "layer", "g", "page", "no layer", "no card", "other backbone"])
def test_what_is_damaged_missing_or_made_for_another_backbone_is_refused(tmp_path: Path, what: str) -> None:
    store, pool = PoolStore(tmp_path), pool_of(PAGE + 2)
    at = store.write(pool, 1, None)
    card, backbone = store.card(at), pool.backbone
    match what:
        case "card":
            (store.versions / at.card).write_bytes((store.versions / at.card).read_bytes().replace(b"task", b"tusk"))
        case "layer":
            (store.layers / f"{card.tasks[0].layer}.safetensors").write_bytes(b"cut")
        case "g":
            (store.layers / f"{card.g}.safetensors").write_bytes(b"")
        case "page":
            (store.layers / f"{card.pages[0]}.json").write_bytes(b"[]")
        case "no layer":
            (store.layers / f"{card.tasks[-1].layer}.safetensors").unlink()
        case "no card":
            (store.versions / at.card).unlink()
        case _:
            backbone = replace(backbone, weights_sha256="1" * 64)
    with pytest.raises(PoolError):
        store.read(at, backbone)
    assert store.holds(at) == (what == "other backbone")


@pytest.mark.parametrize(
    "change",
    [
        {"schema": 3},
        {"tasks": [{"name": "x"}]},
        {"tasks": 5},
        {"pages": ["../../etc/passwd"]},
        {"g": "no hash"},
        {"backbone": {}},
        {"e_layers": [3, 2]},
    ],
)
def test_a_card_that_is_hashed_well_and_means_nothing_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    store, pool = PoolStore(tmp_path), pool_of(2)
    at = store.write(pool, 1, None)
    fields = json.loads(store.card_bytes(at)) | change
    data = json.dumps(fields).encode()
    forged = replace(at, digest=hashlib.sha256(data).hexdigest())
    (store.versions / forged.card).write_bytes(data)
    with pytest.raises(PoolError):
        store.read(forged)


def test_a_candidate_is_adopted_whole_or_not_at_all(tmp_path: Path) -> None:
    store, aside, pool = PoolStore(tmp_path / "pools"), tmp_path / "candidates", pool_of(2)
    at = store.write(pool, 1, None, cards=aside)
    assert store.paths() == {} and not store.adopt(aside / "2-0123456789ab.json")
    layer = store.layers / f"{store.parse((aside / at.card).read_bytes()).tasks[0].layer}.safetensors"
    data = layer.read_bytes()
    layer.unlink()
    assert not store.adopt(aside / at.card), "one of its layers is gone"
    layer.write_bytes(data)
    assert store.adopt(aside / at.card) and store.adopt(aside / at.card)
    assert same(store.read(at), pool) and names_in(aside) == set()


def test_layers_that_no_card_names_are_collected_and_all_others_stay(tmp_path: Path) -> None:
    store, aside = PoolStore(tmp_path / "pools"), tmp_path / "candidates"
    pool = store.read(store.write(pool_of(PAGE + 3), 1, None))
    second = store.write(pool.without_task("task0"), 2, 1)
    building = store.write(pool.with_task(small_task(500)), 3, 1, cards=aside)
    candidate = store.parse((aside / building.card).read_bytes())
    store.remove(store.versions / store.cards(1)[0].identity.card)
    gone = store.collect(also=[candidate]) or []
    assert len([name for name in gone if name.endswith(".safetensors")]) == 0, "the candidate still names task0"
    assert store.holds(second) and store.adopt(aside / building.card) and store.holds(building)
    store.remove(store.versions / building.card)
    gone = store.collect() or []
    assert {f"{pool.tasks[0].layer}.safetensors"} <= set(gone) and store.holds(second)
    assert names_in(store.layers) == store.card(second).files and store.collect() == []


def test_nothing_is_collected_while_a_card_cannot_be_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = PoolStore(tmp_path)
    first, second = store.write(pool_of(1), 1, None), store.write(pool_of(2), 2, 1)
    card = store.versions / first.card
    whole = card.read_bytes()
    store.remove(store.versions / second.card)
    before = names_in(store.layers)
    assert store.unreadable_cards() == {}
    empty = json.dumps(json.loads(whole) | {"tasks": []}).encode()
    for damaged in (b"{}", b"", empty):
        card.write_bytes(damaged)
        assert store.collect() is None and names_in(store.layers) == before
        assert "wrong sha256" in store.unreadable_cards()[card]
    warnings = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert len(warnings) == 1 and str(card) in warnings[0], "said once"
    card.write_bytes(whole)
    assert store.collect() and names_in(store.layers) == store.card(first).files


def test_a_quick_check_sees_missing_and_short_layers(tmp_path: Path) -> None:
    store, pool = PoolStore(tmp_path), pool_of(2)
    at = store.write(pool, 1, None)
    store.check(at)
    layer = store.layers / f"{store.card(at).tasks[1].layer}.safetensors"
    data = layer.read_bytes()
    layer.write_bytes(data[:-1])
    with pytest.raises(PoolError, match="cut short"):
        store.check(at)
    store.add_layer(layer.name, data)
    store.check(at)
