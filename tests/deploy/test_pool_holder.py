"""Which pool is served: the one that CURRENT names, if it is good; else the one before."""

import shutil
import threading
import time

import bad_pools
import pytest
from fingerprints import empty_pool, marked_pool, publish, task

from mqmk.deploy.pool_holder import PoolHolder, Watcher
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
def holder(vit, folder):
    return PoolHolder(PoolStore(folder), vit, PredictSettings())


def test_before_the_first_version_nothing_is_held_and_nothing_is_wrong(holder):
    assert not holder.look()
    assert holder.held is None
    assert holder.caught_up
    assert not holder.refusals


def test_the_pool_that_current_names_is_followed_forward_and_back(holder, vit, folder):
    for version in (1, 2, 3):
        publish(folder, marked_pool(vit, version), version)
        assert not holder.caught_up
        assert holder.look()
        assert holder.held.version == version
        assert holder.caught_up
    publish(folder, marked_pool(vit, 1), 1)
    assert holder.look()
    assert holder.held.version == 1
    assert not holder.refusals


def test_the_pool_before_stays_in_memory_and_is_taken_back_without_reading(holder, vit, folder):
    publish(folder, marked_pool(vit, 1), 1)
    holder.look()
    first = holder.held
    publish(folder, marked_pool(vit, 2), 2)
    holder.look()
    for path in folder.glob("1-*/*"):
        path.unlink()  # it cannot be read again
    store = PoolStore(folder)
    store.point_at(first.pointer)
    assert holder.look()
    assert holder.held is first


@pytest.mark.parametrize("name", bad_pools.BREAKERS)
def test_a_bad_pool_is_refused_at_its_stage_and_the_old_one_stays(name, holder, vit, folder):
    stage, change = bad_pools.BREAKERS[name]
    pool = marked_pool(vit, 1)
    publish(folder, pool, 1)
    holder.look()
    good = holder.held
    PoolStore(folder).point_at(bad_pools.broken(folder, pool, 2, change))
    assert not holder.look()
    assert holder.held is good
    assert dict(holder.refusals) == {stage: 1}
    assert holder.last_refusal.stage == stage
    assert str(holder.last_refusal).startswith(f"version 2: {stage}: ")


@pytest.mark.parametrize("name", bad_pools.DAMAGES)
def test_a_damaged_file_is_refused(name, holder, vit, folder):
    file, damage = bad_pools.DAMAGES[name]
    pool = marked_pool(vit, 1)
    publish(folder, pool, 1)
    holder.look()
    PoolStore(folder).point_at(bad_pools.damaged_file(folder, marked_pool(vit, 2), 2, file, damage))
    assert not holder.look()
    assert (holder.held.version, holder.refusals["read"]) == (1, 1)


def test_a_digest_that_only_begins_right_is_refused(holder, vit, folder):
    publish(folder, marked_pool(vit, 1), 1)
    holder.look()
    PoolStore(folder).point_at(bad_pools.wrong_digest(marked_pool(vit, 2), folder, 2))
    assert not holder.look()
    assert "expected digest" in holder.last_refusal.reason


@pytest.mark.parametrize("text", ["", "{", '{"version": 1}', "[]", '{"version": "x", "digest": ""}'])
def test_a_damaged_pointer_keeps_the_old_pool(text, holder, vit, folder):
    publish(folder, marked_pool(vit, 1), 1)
    holder.look()
    (folder / "CURRENT").write_text(text)
    assert not holder.look()
    assert (holder.held.version, dict(holder.refusals)) == (1, {"pointer": 1})
    assert not holder.caught_up


@pytest.mark.parametrize("text", ["", "{", '{"version": 1}'])
def test_whoever_starts_on_a_damaged_pointer_waits_says_why_and_follows_once_it_is_mended(text, holder, vit, folder):
    publish(folder, marked_pool(vit, 1), 1)
    whole = (folder / "CURRENT").read_text()
    (folder / "CURRENT").write_text(text)
    assert not holder.look()
    assert (holder.held, holder.caught_up) == (None, False)
    assert "CURRENT: expected a version and a digest" in str(holder.last_refusal)
    (folder / "CURRENT").write_text(whole)
    assert holder.look()
    assert (holder.held.version, holder.caught_up, holder.last_refusal) == (1, True, None)


@pytest.mark.parametrize("name", [*bad_pools.DAMAGES, "no folder"])
def test_whoever_starts_on_a_damaged_pool_waits_says_why_and_follows_once_it_is_mended(name, vit, folder):
    holder = PoolHolder(PoolStore(folder), vit, PredictSettings(), retry_seconds=0)
    publish(folder, marked_pool(vit, 1), 1)
    (home,) = folder.glob("1-*")
    shutil.copytree(home, folder / "whole")
    if name in bad_pools.DAMAGES:
        file, damage = bad_pools.DAMAGES[name]
        (home / file).write_bytes(damage((home / file).read_bytes()))
    else:
        shutil.rmtree(home)
    assert not holder.look()
    assert (holder.held, holder.caught_up) == (None, False)
    assert str(holder.last_refusal).startswith("version 1: read: ")
    shutil.rmtree(home, ignore_errors=True)
    (folder / "whole").rename(home)
    assert holder.look()
    assert (holder.caught_up, holder.last_refusal) == (True, None)


def test_a_pointer_that_is_gone_keeps_the_old_pool(holder, vit, folder):
    publish(folder, marked_pool(vit, 1), 1)
    holder.look()
    (folder / "CURRENT").unlink()
    assert not holder.look()
    assert holder.held.version == 1
    assert "CURRENT is gone" in holder.last_refusal.reason


def test_a_refused_pool_is_counted_once_and_tried_again_later(vit, folder):
    now = [0.0]
    holder = PoolHolder(PoolStore(folder), vit, PredictSettings(), retry_seconds=5, clock=lambda: now[0])
    publish(folder, marked_pool(vit, 1), 1)
    holder.look()
    second = marked_pool(vit, 2)
    pointer = bad_pools.damaged_file(folder, second, 2, "pool.safetensors", lambda data: data[:100])
    PoolStore(folder).point_at(pointer)
    for _ in range(3):
        assert not holder.look()
    assert holder.refusals.total() == 1
    whole = PoolStore(folder / "again").write(second, 2, None)
    (folder / "again" / whole.folder / "pool.safetensors").replace(folder / pointer.folder / "pool.safetensors")
    assert not holder.look()  # too soon
    now[0] = 6
    assert holder.look()
    assert (holder.held.version, holder.last_refusal) == (2, None)


def test_a_task_that_went_or_was_learned_anew_is_no_reason_to_refuse(holder, vit, folder):
    base = empty_pool(vit).with_task(task("stays", ("a", "b"), vit, 1))
    publish(folder, base.with_task(task("goes", ("c", "d"), vit, 2, trained_at="monday")), 1)
    holder.look()
    publish(folder, base.with_task(task("goes", ("c", "e"), vit, 3, trained_at="tuesday")), 2)
    assert holder.look()
    publish(folder, base, 3)
    assert holder.look()
    assert not holder.refusals


def test_an_old_task_that_changed_is_no_reason_to_refuse_if_the_g_prompt_did_too(holder, vit, folder):
    pool = marked_pool(vit, 1)
    publish(folder, pool, 1)
    holder.look()

    def trained_on(parts):
        bad_pools.changed_old_task(parts)
        parts.tensors["g_prompt"] += 0.01

    PoolStore(folder).point_at(bad_pools.broken(folder, pool, 2, trained_on))
    assert holder.look()


def test_a_pool_without_tasks_can_be_held(holder, vit, folder):
    publish(folder, empty_pool(vit), 1)
    assert holder.look()
    assert holder.held.version == 1


def test_the_watcher_follows_by_itself_and_at_once_on_a_hint(holder, vit, folder):
    looked = threading.Semaphore(0)
    watcher = Watcher(holder, 60, looked.release)
    watcher.start()
    try:
        assert looked.acquire(timeout=20)
        publish(folder, marked_pool(vit, 1), 1)
        watcher.hint()
        assert looked.acquire(timeout=20)
        assert holder.held.version == 1
        assert watcher.alive
    finally:
        watcher.stop()
    assert not watcher.alive


def test_a_swap_takes_a_moment(holder, vit, folder):
    publish(folder, marked_pool(vit, 1), 1)
    holder.look()
    publish(folder, marked_pool(vit, 2), 2)
    began = time.perf_counter()
    holder.look()
    assert time.perf_counter() - began < 1
