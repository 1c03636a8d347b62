"""Which pool is served: the one that CURRENT names, if it is good; else the one before."""

import time
from dataclasses import replace

import pytest
from support.serving import bad_pools
from support.serving.fingerprints import empty_pool, marked_pool, publish, task

from mqmk.deploy.serving.pools.live_pool import LivePool
from mqmk.matcher.backbone import load_backbone
from mqmk.matcher.pool_store import PoolStore
from mqmk.matcher.predictor import PredictSettings


@pytest.fixture(scope="module")
def vit():
    return load_backbone()


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "pools"


@pytest.fixture
def live_pool(vit, folder):
    return LivePool(PoolStore(folder), vit, PredictSettings())


def path_of(folder, version, file):
    """A version's card, or the layer of its last task."""
    (card,) = PoolStore(folder).cards(version)
    return folder / bad_pools.file_of(card, file)


def test_before_the_first_version_nothing_is_held_and_nothing_is_wrong(live_pool):
    assert not live_pool.poll()
    assert live_pool.loaded is None
    assert live_pool.is_current
    assert not live_pool.rejections


def test_the_pool_that_current_names_is_followed_forward_and_back(live_pool, vit, folder):
    for version in (1, 2, 3):
        publish(folder, marked_pool(vit, version), version)
        assert not live_pool.is_current
        assert live_pool.poll()
        assert live_pool.loaded.version == version
        assert live_pool.is_current
    publish(folder, marked_pool(vit, 1), 1)
    assert live_pool.poll()
    assert live_pool.loaded.version == 1
    assert not live_pool.rejections


def test_the_pool_before_stays_in_memory_and_is_taken_back_without_reading(live_pool, vit, folder):
    publish(folder, marked_pool(vit, 1), 1)
    live_pool.poll()
    first = live_pool.loaded
    publish(folder, marked_pool(vit, 2), 2)
    live_pool.poll()
    store = PoolStore(folder)
    for path in [store.versions / first.pointer.card, *store.layers.iterdir()]:
        path.unlink()  # it cannot be read again
    store.point_at(first.pointer)
    assert live_pool.poll()
    assert live_pool.loaded is first


@pytest.mark.parametrize("name", bad_pools.BREAKERS)
def test_a_bad_pool_is_refused_at_its_stage_and_the_old_one_stays(name, live_pool, vit, folder):
    stage, change = bad_pools.BREAKERS[name]
    pool = marked_pool(vit, 1)
    publish(folder, pool, 1)
    live_pool.poll()
    good = live_pool.loaded
    PoolStore(folder).point_at(bad_pools.broken(folder, pool, 2, change))
    assert not live_pool.poll()
    assert live_pool.loaded is good
    assert dict(live_pool.rejections) == {stage: 1}
    assert live_pool.last_rejection.stage == stage
    assert str(live_pool.last_rejection).startswith(f"version 2: {stage}: ")


@pytest.mark.parametrize("name", bad_pools.DAMAGES)
def test_a_damaged_file_is_refused(name, live_pool, vit, folder):
    file, damage = bad_pools.DAMAGES[name]
    pool = marked_pool(vit, 1)
    publish(folder, pool, 1)
    live_pool.poll()
    PoolStore(folder).point_at(bad_pools.damaged_file(folder, marked_pool(vit, 2), 2, file, damage))
    assert not live_pool.poll()
    assert (live_pool.loaded.version, live_pool.rejections["read"]) == (1, 1)


def test_bad_pools_are_refused_one_after_the_other_and_do_not_harm_the_good_one(vit, folder):
    store, pool = PoolStore(folder), marked_pool(vit, 1)
    publish(folder, pool, 1)
    good, live_pool = store.current(), LivePool(store, vit, PredictSettings())
    live_pool.poll()
    bad = bad_pools.bad_pointers(folder, pool, 1000)
    for number, (name, pointer) in enumerate(bad, start=1):
        store.point_at(pointer)
        assert not live_pool.poll(), name
        assert (live_pool.loaded.version, live_pool.rejections.total()) == (1, number), name
    store.point_at(good)
    live_pool.poll()
    assert live_pool.is_current and live_pool.last_rejection is None
    assert LivePool(store, vit, PredictSettings()).poll(), "a new replica loads it, too"


def test_a_digest_that_only_begins_right_is_refused(live_pool, vit, folder):
    publish(folder, marked_pool(vit, 1), 1)
    live_pool.poll()
    PoolStore(folder).point_at(bad_pools.wrong_digest(marked_pool(vit, 2), folder, 2))
    assert not live_pool.poll()
    assert "wrong sha256" in live_pool.last_rejection.reason


@pytest.mark.parametrize("text", ["", "{", '{"version": 1}', "[]", '{"version": "x", "digest": ""}'])
def test_a_damaged_pointer_keeps_the_old_pool(text, live_pool, vit, folder):
    publish(folder, marked_pool(vit, 1), 1)
    live_pool.poll()
    (folder / "CURRENT").write_text(text)
    assert not live_pool.poll()
    assert (live_pool.loaded.version, dict(live_pool.rejections)) == (1, {"pointer": 1})
    assert not live_pool.is_current


@pytest.mark.parametrize("text", ["", "{", '{"version": 1}'])
def test_whoever_starts_on_a_damaged_pointer_waits_says_why_and_follows_once_it_is_fixed(text, live_pool, vit, folder):
    publish(folder, marked_pool(vit, 1), 1)
    whole = (folder / "CURRENT").read_text()
    (folder / "CURRENT").write_text(text)
    assert not live_pool.poll()
    assert (live_pool.loaded, live_pool.is_current) == (None, False)
    assert "CURRENT: expected a version and a digest" in str(live_pool.last_rejection)
    (folder / "CURRENT").write_text(whole)
    assert live_pool.poll()
    assert (live_pool.loaded.version, live_pool.is_current, live_pool.last_rejection) == (1, True, None)


@pytest.mark.parametrize("name", [*bad_pools.DAMAGES, "no layer", "no card"])
def test_whoever_starts_on_a_damaged_pool_waits_says_why_and_follows_once_it_is_fixed(name, vit, folder):
    live_pool = LivePool(PoolStore(folder), vit, PredictSettings(), retry_seconds=0)
    publish(folder, marked_pool(vit, 1), 1)
    file, damage = bad_pools.DAMAGES.get(name, (name.removeprefix("no "), None))
    path = path_of(folder, 1, file)
    whole = path.read_bytes()
    if damage:
        path.write_bytes(damage(whole))
    else:
        path.unlink()
    assert not live_pool.poll()
    assert (live_pool.loaded, live_pool.is_current) == (None, False)
    assert str(live_pool.last_rejection).startswith("version 1: read: ")
    path.write_bytes(whole)
    assert live_pool.poll()
    assert (live_pool.is_current, live_pool.last_rejection) == (True, None)


def test_a_pointer_that_is_gone_keeps_the_old_pool(live_pool, vit, folder):
    publish(folder, marked_pool(vit, 1), 1)
    live_pool.poll()
    (folder / "CURRENT").unlink()
    assert not live_pool.poll()
    assert live_pool.loaded.version == 1
    assert "CURRENT is missing" in live_pool.last_rejection.reason


def test_a_refused_pool_is_counted_once_and_tried_again_later(vit, folder):
    now = [0.0]
    live_pool = LivePool(PoolStore(folder), vit, PredictSettings(), retry_seconds=5, clock=lambda: now[0])
    publish(folder, marked_pool(vit, 1), 1)
    live_pool.poll()
    second = marked_pool(vit, 2)
    pointer = bad_pools.damaged_file(folder, second, 2, bad_pools.LAYER, lambda data: data[:100])
    PoolStore(folder).point_at(pointer)
    for _ in range(3):
        assert not live_pool.poll()
    assert live_pool.rejections.total() == 1
    again = folder.parent / "again"
    PoolStore(again).write(second, 2, None)
    path_of(again, 2, bad_pools.LAYER).replace(path_of(folder, 2, bad_pools.LAYER))
    assert not live_pool.poll()  # too soon
    now[0] = 6
    assert live_pool.poll()
    assert (live_pool.loaded.version, live_pool.last_rejection) == (2, None)


def test_a_task_that_went_or_was_learned_anew_is_no_reason_to_refuse(live_pool, vit, folder):
    base = empty_pool(vit).with_task(task("stays", ("a", "b"), vit, 1))
    publish(folder, base.with_task(task("goes", ("c", "d"), vit, 2, trained_at="monday")), 1)
    live_pool.poll()
    publish(folder, base.with_task(task("goes", ("c", "e"), vit, 3, trained_at="tuesday")), 2)
    assert live_pool.poll()
    publish(folder, base, 3)
    assert live_pool.poll()
    assert not live_pool.rejections


def test_an_old_task_that_changed_is_no_reason_to_refuse_if_the_g_prompt_did_too(live_pool, vit, folder):
    pool = marked_pool(vit, 1)
    publish(folder, pool, 1)
    live_pool.poll()

    def trained_on(parts):
        bad_pools.changed_old_task(parts)
        parts.tensors["g_prompt"] += 0.01

    PoolStore(folder).point_at(bad_pools.broken(folder, pool, 2, trained_on))
    assert live_pool.poll()


def test_a_pool_without_tasks_can_be_held(live_pool, vit, folder):
    publish(folder, empty_pool(vit), 1)
    assert live_pool.poll()
    assert live_pool.loaded.version == 1


def test_a_swap_takes_a_moment(live_pool, vit, folder):
    publish(folder, marked_pool(vit, 1), 1)
    live_pool.poll()
    publish(folder, marked_pool(vit, 2), 2)
    began = time.perf_counter()
    live_pool.poll()
    assert time.perf_counter() - began < 1


# --- a swap reads what is new


class CountingStore(PoolStore):
    """Remembers which layers were read."""

    def __init__(self, folder):
        super().__init__(folder)
        self.read_layers = []

    def read_layer(self, name):
        self.read_layers.append(name)
        return super().read_layer(name)


def layer_names(tasks):
    return [f"{task.layer}.safetensors" for task in tasks]


def test_a_swap_reads_only_new_layers_and_shares_the_tasks_it_has(vit, folder):
    store = CountingStore(folder)
    live_pool = LivePool(store, vit, PredictSettings(), retry_seconds=0)
    publish(folder, marked_pool(vit, 1), 1)
    assert live_pool.poll()
    first, second = live_pool.loaded.pool, store.write(marked_pool(vit, 2), 2, 1)
    for name in layer_names(first.tasks):
        (store.layers / name).unlink()
    store.point_at(second)
    store.read_layers.clear()
    assert live_pool.poll() and not live_pool.rejections
    pool = live_pool.loaded.pool
    assert [task.name for task in pool.tasks] == ["kept0", "kept1", "kept2", "task-v2"]
    assert all(new is old for new, old in zip(pool.tasks[:3], first.tasks[:3], strict=True))
    assert sorted(store.read_layers) == sorted([f"{store.card(second).g}.safetensors", *layer_names(pool.tasks[3:])])
    newcomer = LivePool(PoolStore(folder), vit, PredictSettings())
    assert not newcomer.poll(), "who has nothing in memory misses the files"


def test_tasks_of_the_previous_pool_are_shared_as_well(vit, folder):
    store = CountingStore(folder)
    live_pool = LivePool(store, vit, PredictSettings())
    lineage(folder, vit, ["a", "b"])
    live_pool.poll()
    b = live_pool.loaded.pool.tasks[1]
    lineage(folder, vit, ["a", "b"], ["a"])
    live_pool.poll()
    lineage(folder, vit, ["a", "b"], ["a"], ["a", "b", "c"])
    store.read_layers.clear()
    assert live_pool.poll()
    tasks = live_pool.loaded.pool.tasks
    assert tasks[1] is b and len(store.read_layers) == 2 and set(layer_names(tasks[2:])) <= set(store.read_layers)


def test_who_trained_a_task_anew_from_the_same_bytes_shows_what_its_card_says(vit, folder):
    """The tensors of a known layer are shared, and what the card says of the task is not taken from memory."""
    live_pool = LivePool(PoolStore(folder), vit, PredictSettings())
    one = task("a", ("x", "y"), vit, 1, trained_at="monday")
    publish(folder, empty_pool(vit).with_task(one), 1)
    live_pool.poll()
    (before,) = live_pool.loaded.pool.tasks
    again = replace(one, classes=("y", "x"), trained_at="tuesday", manifest_sha256="cd" * 32, samples=11)
    publish(folder, empty_pool(vit).with_task(again), 2)
    assert live_pool.poll()
    (after,) = live_pool.loaded.pool.tasks
    assert (after.classes, after.trained_at, after.manifest_sha256) == (("y", "x"), "tuesday", "cd" * 32)
    assert after.samples == 11 and after.layer == before.layer and after.keys is before.keys


# --- what may be served in place of a damaged version


def lineage(folder, vit, *contents):
    """Versions 1, 2, 3 ... with these tasks, each made from the one before; the last one is CURRENT."""
    store, tasks = (
        PoolStore(folder),
        {name: task(name, (f"{name}-a", f"{name}-b"), vit, i) for i, name in enumerate("abcd")},
    )
    for number, names in enumerate(contents, 1):
        pool = empty_pool(vit)
        for name in names:
            pool = pool.with_task(replace(tasks[name[0]], manifest_sha256=("cd" if "'" in name else "ab") * 32))
        store.point_at(store.write(pool, number, number - 1 or None))


def damage(folder, version, file=bad_pools.LAYER):
    path = path_of(folder, version, file)
    path.write_bytes(path.read_bytes()[:100])


def fallen(vit, folder, **options):
    live_pool = LivePool(PoolStore(folder), vit, PredictSettings(), retry_seconds=0, **({"fallback": True} | options))
    live_pool.poll()
    return live_pool


@pytest.mark.parametrize(
    ("contents", "damaged", "served"),
    [
        ([["a"], ["a", "b"], ["a", "b", "c"]], [3], 2),
        ([["a"], ["a", "b"], ["a", "b", "c"]], [3, 2], 1),
        ([["a"], ["a", "b"], ["a", "d"], ["a", "d", "c"]], [4, 3], 1),  # b was forgotten: 2 must not be served
        ([["b"], ["a", "b"], ["a"]], [3], None),
        ([["a'"], ["a'", "b"], ["a", "b"]], [3], None),  # a was learned anew from other images
        ([["a"]], [1], None),
        ([[], ["a"]], [2], None),  # before the first task there was nothing to answer with
    ],
)
def test_a_new_replica_may_serve_the_newest_sound_ancestor_that_knows_no_other_task(
    vit, folder, contents, damaged, served
):
    lineage(folder, vit, *contents)
    for version in damaged:
        damage(folder, version)
    live_pool = fallen(vit, folder)
    assert (live_pool.loaded.version if live_pool.loaded else None) == served
    assert live_pool.can_serve == (served is not None)
    assert not live_pool.is_current
    assert str(live_pool.last_rejection).startswith(f"version {len(contents)}: read: ")
    assert ("is served instead" in str(live_pool.last_rejection)) == (served is not None)


def test_a_damaged_layer_damages_every_version_that_names_it(vit, folder):
    lineage(folder, vit, ["a"], ["a", "b"], ["a", "b", "c"])
    damage(folder, 1)
    live_pool = fallen(vit, folder)
    assert live_pool.loaded is None and not live_pool.can_serve
    assert "wrong sha256" in str(live_pool.last_rejection)


def test_without_being_asked_for_it_no_ancestor_is_served(vit, folder):
    lineage(folder, vit, ["a"], ["a", "b"])
    damage(folder, 2)
    live_pool = fallen(vit, folder, fallback=False)
    assert (live_pool.loaded, live_pool.can_serve) == (None, False)


@pytest.mark.parametrize("version", [3, 2])
def test_where_a_card_on_the_way_cannot_be_read_no_ancestor_is_served(vit, folder, version):
    lineage(folder, vit, ["a"], ["a", "b"], ["a", "b", "c"])
    for number in (3, 2):
        damage(folder, number)
    damage(folder, version, bad_pools.CARD)
    assert fallen(vit, folder).loaded is None


def test_a_version_from_another_branch_is_no_ancestor(vit, folder):
    lineage(folder, vit, ["a"], ["a", "b"])
    store = PoolStore(folder)  # 2 was rolled back, and 3 made from 1
    pool = store.read(store.current()).with_task(task("c", ("c-a", "c-b"), vit, 8))
    store.point_at(store.write(pool, 3, 1))
    damage(folder, 3)
    assert fallen(vit, folder).loaded.version == 1


def test_of_two_versions_with_the_parents_number_neither_is_served(vit, folder):
    lineage(folder, vit, ["a"], ["a", "b"])
    PoolStore(folder).write(empty_pool(vit).with_task(task("a", ("x", "y"), vit, 9)), 1, None)
    damage(folder, 2)
    assert fallen(vit, folder).loaded is None


def test_whoever_serves_an_ancestor_follows_current_as_soon_as_it_is_fixed_or_moved(vit, folder):
    lineage(folder, vit, ["a"], ["a", "b"], ["a", "b", "c"])
    path = path_of(folder, 3, bad_pools.LAYER)
    whole = path.read_bytes()
    damage(folder, 3)
    live_pool = fallen(vit, folder)
    assert live_pool.loaded.version == 2
    for _ in range(3):
        assert not live_pool.poll()
    assert (live_pool.rejections.total(), live_pool.swaps) == (1, 0), "one damage is told once"
    path.write_bytes(whole)
    assert live_pool.poll()
    assert (live_pool.loaded.version, live_pool.last_rejection, live_pool.is_current) == (3, None, True)


def test_a_roll_back_to_the_version_that_stands_in_ends_the_warning(vit, folder):
    lineage(folder, vit, ["a"], ["a", "b"])
    damage(folder, 2)
    live_pool = fallen(vit, folder)
    PoolStore(folder).point_at(live_pool.loaded.pointer)
    live_pool.poll()
    assert (live_pool.loaded.version, live_pool.last_rejection, live_pool.is_current) == (1, None, True)


def test_a_replica_that_holds_a_pool_keeps_it_and_takes_no_ancestor(vit, folder):
    lineage(folder, vit, ["a"])
    live_pool = fallen(vit, folder)
    first = live_pool.loaded
    lineage(folder, vit, ["a"], ["a", "b"], ["a", "b", "c"])
    damage(folder, 3)
    assert not live_pool.poll()
    assert live_pool.loaded is first
    assert "instead" not in str(live_pool.last_rejection)
