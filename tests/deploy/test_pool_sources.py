"""A pool store keeps the same promises in a folder and on a real S3 server; and what the one on S3 promises besides."""

import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import bad_pools
import fingerprints
import pytest
from s3 import S3, Line

from mqmk.deploy.object_store import ChangedError, ObjectStore
from mqmk.deploy.pool_holder import PoolHolder
from mqmk.deploy.remote_pools import RemotePools, default_cache, open_remote_pools
from mqmk.matcher.backbone import load_backbone
from mqmk.matcher.errors import PoolError
from mqmk.matcher.pointer import Pointer
from mqmk.matcher.pool import PromptPool
from mqmk.matcher.pool_files import PoolVersion
from mqmk.matcher.pool_store import PoolSource, PoolStore
from mqmk.matcher.predictor import PredictSettings

marked_pool = cache(fingerprints.marked_pool)  # a pool is a value: one may serve many tests


def ours(_: Pointer) -> bool:
    return True


@dataclass(frozen=True)
class Place:
    """A store under test, and what an outsider can do to it."""

    source: PoolSource
    add: Callable[[PromptPool, int], PoolVersion]
    point_at: Callable[[PoolVersion | Pointer], None]
    overwrite: Callable[[str, bytes], None]
    remove: Callable[[str], None]

    def publish(self, pool: PromptPool, version: int) -> PoolVersion:
        identity = self.add(pool, version)
        self.point_at(identity)
        return identity


def folder_place(folder: Path) -> Place:
    store = PoolStore(folder / "pools")
    return Place(
        store,
        lambda pool, version: store.write(pool, version, None),
        store.point_at,
        lambda key, data: (store.folder / key).write_bytes(data) and None,
        lambda key: (store.folder / key).unlink(),
    )


def objects_of(server: S3, url: str) -> ObjectStore:
    """With a connection that is open: each new one costs a second."""
    return ObjectStore(server.files, url.removeprefix("s3://"), url, timeout_seconds=5.0)


def remote_place(server: S3, folder: Path, url: str | None = None) -> Place:
    url = url or f"{server.url()}/pools"
    remote, local = RemotePools(objects_of(server, url), folder / "cache"), PoolStore(folder / "local")
    root = url.removeprefix("s3://") + "/"

    def add(pool: PromptPool, version: int) -> PoolVersion:
        identity = local.write(pool, version, None)
        remote.add(identity, local.folder / identity.folder)
        return identity

    return Place(
        remote,
        add,
        lambda version: remote.point_at(version, ours),
        lambda key, data: server.files.pipe_file(root + key, data),
        lambda key: server.files.rm_file(root + key),
    )


@pytest.fixture(params=["folder", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "folder":
        return folder_place(tmp_path)
    return remote_place(request.getfixturevalue("s3_environment"), tmp_path)


@pytest.fixture
def remote(s3_environment: S3, tmp_path: Path) -> Place:
    return remote_place(s3_environment, tmp_path)


@pytest.fixture(scope="module")
def vit():
    return load_backbone()


def same(one: PromptPool, other: PromptPool) -> bool:
    pairs = zip(one.tasks, other.tasks, strict=True)
    return all(a.name == b.name and a.keys.equal(b.keys) and a.e_prompt.equal(b.e_prompt) for a, b in pairs)


# --- what both promise


def test_before_the_first_version_there_is_no_current(place):
    assert place.source.current() is None


def test_what_was_published_is_what_is_read(place, vit):
    pools = {version: marked_pool(vit, version) for version in (1, 2)}
    for version, pool in pools.items():
        identity = place.publish(pool, version)
        assert place.source.current() == Pointer(version, identity.digest)
        assert same(place.source.read(identity, vit.info), pool)


def test_a_version_that_is_added_twice_and_pointed_at_twice_is_one_version(place, vit):
    first = place.publish(marked_pool(vit, 1), 1)
    assert place.publish(marked_pool(vit, 1), 1) == first
    assert place.source.current() == Pointer(1, first.digest)


def test_the_pointer_moves_back_as_well(place, vit):
    first = place.publish(marked_pool(vit, 1), 1)
    place.publish(marked_pool(vit, 2), 2)
    place.point_at(first)
    assert place.source.current() == Pointer(1, first.digest)


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"version": 1}', b'{"version": 1, "digest": "../../x"}'])
def test_a_damaged_pointer_is_an_error_and_not_an_empty_store(place, vit, data):
    place.publish(marked_pool(vit, 1), 1)
    place.overwrite("CURRENT", data)
    with pytest.raises(PoolError, match="expected a version and a digest"):
        place.source.current()


def test_a_version_that_is_not_there_cannot_be_read(place, vit):
    place.publish(marked_pool(vit, 1), 1)
    with pytest.raises(PoolError):
        place.source.read(Pointer(2, "0" * 64))


@pytest.mark.parametrize("name", bad_pools.DAMAGES)
def test_damaged_files_are_refused(place, vit, tmp_path, name):
    file, damage = bad_pools.DAMAGES[name]
    identity = place.add(marked_pool(vit, 1), 1)
    whole = PoolStore(tmp_path / "whole").write(marked_pool(vit, 1), 1, None)
    place.overwrite(f"{identity.folder}/{file}", damage((tmp_path / "whole" / whole.folder / file).read_bytes()))
    with pytest.raises(PoolError):
        place.source.read(identity)


def test_a_digest_that_only_begins_right_is_refused(place, vit):
    identity = place.add(marked_pool(vit, 1), 1)
    with pytest.raises(PoolError, match="expected digest"):
        place.source.read(Pointer(1, identity.digest[:12] + "0" * 52))


def test_a_pool_of_another_backbone_is_refused(place, vit):
    identity = place.add(marked_pool(vit, 1), 1)
    with pytest.raises(PoolError, match="trained on"):
        place.source.read(identity, replace(vit.info, weights_sha256="0" * 64))


# --- what the one on S3 promises as well


def test_half_an_upload_is_no_version_and_the_next_try_completes_it(remote, vit):
    identity = remote.add(marked_pool(vit, 1), 1)
    remote.remove(f"{identity.folder}/pool.json")  # the daemon was killed before the card
    with pytest.raises(PoolError):
        remote.source.read(identity)
    remote.add(marked_pool(vit, 1), 1)
    assert remote.source.read(identity, vit.info)


def test_a_card_comes_after_the_tensors(s3_environment, line, tmp_path, vit, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", line.endpoint)
    local, remote = PoolStore(tmp_path / "local"), open_remote_pools(s3_environment.url(), tmp_path / "cache")
    identity = local.write(marked_pool(vit, 1), 1, None)
    remote.add(identity, local.folder / identity.folder)
    remote.point_at(identity, ours)
    puts = [request.rsplit("/", 1)[1].split("?")[0] for request in line.requests if request.startswith("PUT")]
    assert puts == ["pool.safetensors", "pool.json", "CURRENT"]


def test_of_two_writers_that_point_at_the_same_time_one_wins_and_the_other_is_told(s3_environment):
    objects = objects_of(s3_environment, s3_environment.url())
    for round_ in range(10):
        known, told, barrier = objects.read("CURRENT"), [], threading.Barrier(4)

        def write(number: int, known=known, told=told, barrier=barrier) -> None:
            barrier.wait()
            try:
                objects.replace("CURRENT", f"{number}".encode(), known)
            except ChangedError:
                told.append(number)

        writers = [threading.Thread(target=write, args=(10 * round_ + number,)) for number in range(4)]
        for one in writers:
            one.start()
        for one in writers:
            one.join()
        now = objects.read("CURRENT")
        assert now is not None and len(told) == 3 and int(now.data) not in told


def test_a_pointer_of_another_daemon_is_not_moved(remote, vit):
    theirs = remote.publish(marked_pool(vit, 7), 7)
    mine = remote.add(marked_pool(vit, 1), 1)
    with pytest.raises(PoolError, match="not a version of this daemon") as refused:
        remote.source.point_at(mine, lambda _: False)
    assert "remove the object CURRENT" in str(refused.value)
    assert remote.source.current() == Pointer(7, theirs.digest)


def test_a_pointer_that_has_not_changed_costs_one_small_request(s3_environment, line, tmp_path, vit, monkeypatch):
    place = remote_place(s3_environment, tmp_path)
    place.publish(marked_pool(vit, 1), 1)
    monkeypatch.setenv("AWS_ENDPOINT_URL", line.endpoint)
    watching = open_remote_pools(place.source.name.removesuffix("/pools"), tmp_path / "another")
    before = watching.current()
    line.requests.clear()
    for _ in range(3):
        assert watching.current() == before
    assert len(line.requests) == 3 and all(request.startswith("GET") for request in line.requests)
    place.publish(marked_pool(vit, 2), 2)
    assert watching.current() != before


def test_replicas_of_a_machine_download_a_version_once(s3_environment, line, tmp_path, vit, monkeypatch):
    place = remote_place(s3_environment, tmp_path)
    identity = place.publish(marked_pool(vit, 1), 1)
    monkeypatch.setenv("AWS_ENDPOINT_URL", line.endpoint)
    url = place.source.name.removesuffix("/pools")
    replicas = [open_remote_pools(url, tmp_path / "machine") for _ in range(3)]
    readers = [threading.Thread(target=replica.read, args=(identity,)) for replica in replicas]
    for one in readers:
        one.start()
    for one in readers:
        one.join()
    assert sorted(request.rsplit("/", 1)[1] for request in line.requests) == ["pool.json", "pool.safetensors"]


def test_few_versions_are_kept_here_and_a_damaged_one_is_downloaded_again(s3_environment, tmp_path, vit):
    place = remote_place(s3_environment, tmp_path)
    cache = tmp_path / "cache"
    identities = []
    for version in range(1, 6):
        identities.append(place.add(marked_pool(vit, version), version))
        place.source.read(identities[-1])
        os.utime(cache / identities[-1].folder, (version, version))
    assert sorted(path.name[0] for path in cache.iterdir() if not path.name.startswith(".")) == ["3", "4", "5"]
    (cache / identities[-1].folder / "pool.safetensors").write_bytes(b"damaged")
    assert place.source.read(identities[-1], vit.info)


def test_what_a_killed_download_left_is_swept_away(s3_environment, tmp_path, vit):
    place = remote_place(s3_environment, tmp_path)
    (tmp_path / "cache" / ".part-killed").mkdir(parents=True)
    place.source.read(place.add(marked_pool(vit, 1), 1))
    assert not [*(tmp_path / "cache").glob(".part-*")]


def test_a_cache_that_belongs_to_somebody_else_is_not_used(s3_environment, tmp_path, vit):
    if os.getuid():
        pytest.skip("only root may give a folder away")
    place = remote_place(s3_environment, tmp_path)
    (tmp_path / "cache").mkdir()
    os.chown(tmp_path / "cache", 4711, 4711)
    identity = place.add(marked_pool(vit, 1), 1)
    os.seteuid(0)
    with pytest.raises(PoolError, match="belongs to somebody else"):
        place.source.read(identity)


def test_two_stores_have_two_caches():
    assert default_cache("s3://a/b") != default_cache("s3://a/c")


def test_a_store_that_ignores_conditions_is_refused(s3_environment, tmp_path):
    class Careless:
        name = "s3://careless"

        def replace(self, key: str, data: bytes, known: object) -> None:
            """Writes over whatever is there."""

    with pytest.raises(PoolError, match="ignores conditional puts"):
        RemotePools(Careless(), tmp_path).check_conditions()
    careful = RemotePools(objects_of(s3_environment, s3_environment.url()), tmp_path)
    for _ in range(2):
        careful.check_conditions()


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        ("AWS_SECRET_ACCESS_KEY", "wrong", "check AWS_ACCESS_KEY_ID"),
        ("AWS_ENDPOINT_URL", "http://127.0.0.1:9", "Could not connect"),
    ],
)
def test_what_is_wrong_with_the_store_is_said_with_what_to_do(
    s3_environment, tmp_path, monkeypatch, variable, value, says
):
    monkeypatch.setenv(variable, value)
    with pytest.raises(PoolError, match=says):
        open_remote_pools(s3_environment.url(), tmp_path).current()


def test_a_bucket_that_is_not_there_is_said(s3_environment, tmp_path, vit):
    nowhere = remote_place(s3_environment, tmp_path, "s3://no-such-bucket/pools")
    for try_ in (nowhere.source.current, lambda: nowhere.add(marked_pool(vit, 1), 1)):
        with pytest.raises(PoolError, match="no such bucket"):
            try_()


# --- a replica that watches it


@pytest.fixture
def watched(
    s3_environment: S3, line: Line, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Place, RemotePools]:
    place = remote_place(s3_environment, tmp_path)
    monkeypatch.setenv("AWS_ENDPOINT_URL", line.endpoint)
    return place, open_remote_pools(place.source.name.removesuffix("/pools"), tmp_path / "machine")


def test_while_the_store_is_away_the_held_pool_stays_and_the_reason_is_told(watched, line, vit):
    place, source = watched
    holder = PoolHolder(source, vit, PredictSettings(), retry_seconds=0)
    place.publish(marked_pool(vit, 1), 1)
    assert holder.look()
    line.cut()
    assert not holder.look()
    assert holder.held.version == 1 and not holder.caught_up
    assert holder.last_refusal.stage == "pointer" and "127.0.0.1" in holder.last_refusal.reason
    place.publish(marked_pool(vit, 2), 2)
    line.restore()
    assert holder.look()
    assert (holder.held.version, holder.last_refusal, holder.caught_up) == (2, None, True)


def test_a_new_replica_waits_with_the_reason_until_the_store_is_back(watched, line, vit):
    place, source = watched
    place.publish(marked_pool(vit, 1), 1)
    line.cut()
    holder = PoolHolder(source, vit, PredictSettings())
    assert not holder.look() and holder.held is None and not holder.caught_up
    assert holder.last_refusal.stage == "pointer"
    line.restore()
    assert holder.look() and holder.caught_up


def test_a_store_that_does_not_answer_costs_a_look_a_few_seconds(watched, line, vit):
    place, source = watched
    place.publish(marked_pool(vit, 1), 1)
    line.swallows = True
    holder, began = PoolHolder(source, vit, PredictSettings()), time.monotonic()
    assert not holder.look()
    assert time.monotonic() - began < 8
    assert "no answer in time" in holder.last_refusal.reason


def test_a_download_that_fails_keeps_the_held_pool_and_is_tried_again(watched, tmp_path, vit):
    place, source = watched
    holder = PoolHolder(source, vit, PredictSettings(), retry_seconds=0)
    place.publish(marked_pool(vit, 1), 1)
    holder.look()
    identity = place.publish(marked_pool(vit, 2), 2)
    place.remove(f"{identity.folder}/pool.safetensors")
    assert not holder.look()
    assert holder.held.version == 1 and holder.last_refusal.stage == "read"
    place.add(marked_pool(vit, 2), 2)
    assert holder.look() and holder.held.version == 2
    shutil.rmtree(tmp_path / "machine")  # temporary files may vanish
    third = place.publish(marked_pool(vit, 3), 3)
    assert holder.look() and holder.held.version == 3
    card = json.loads((tmp_path / "machine" / third.folder / "pool.json").read_text())
    assert card["digest"] == third.digest
