"""A pool store keeps the same promises in a folder and on a real S3 server; and what the one on S3 promises besides."""

import hashlib
import os
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest
from support.servers.s3 import S3, S3Proxy
from support.serving import bad_pools, fingerprints

from mqmk.deploy.serving.pools.live_pool import LivePool
from mqmk.deploy.serving.pools.s3_objects import ChangedError, ObjectStore
from mqmk.deploy.serving.pools.s3_store import RemotePools, default_cache, open_remote_pools
from mqmk.matcher.backbone import load_backbone
from mqmk.matcher.errors import PoolError
from mqmk.matcher.pointer import Pointer
from mqmk.matcher.pool import PromptPool
from mqmk.matcher.pool_cards import PAGE, CardTask
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
        remote.add(identity, local)
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


def test_cards_are_found_by_number_and_a_damaged_one_is_none(place, vit, tmp_path):
    first, tenth = place.publish(marked_pool(vit, 1), 1), place.publish(marked_pool(vit, 2), 10)
    whole = PoolStore(tmp_path / "whole").write(marked_pool(vit, 1), 1, None)
    ((one,), (ten,)) = place.source.cards(1), place.source.cards(10)
    assert ((one.identity, ten.identity)) == (first, tenth)
    assert ("kept0", "ab" * 32) in one.contents and len(one.tasks) == len(marked_pool(vit, 1).tasks)
    assert place.source.cards(2) == []
    place.overwrite(bad_pools.file_of(one, bad_pools.LAYER), b"damaged")
    (again,) = place.source.cards(1)
    assert (again.identity, again.contents) == (first, one.contents), "its tensors are not looked at"
    for damaged in (b'{"schema": 1}', PoolStore(tmp_path / "whole").card_bytes(whole).replace(b"kept0", b"other")):
        place.overwrite(bad_pools.file_of(one, bad_pools.CARD), damaged)
        assert place.source.cards(1) == []


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
    whole = PoolStore(tmp_path / "whole")
    path = bad_pools.file_of(whole.card(whole.write(marked_pool(vit, 1), 1, None)), file)
    place.overwrite(path, damage((whole.folder / path).read_bytes()))
    with pytest.raises(PoolError):
        place.source.read(identity)


def test_a_digest_that_only_begins_right_is_refused(place, vit):
    identity = place.add(marked_pool(vit, 1), 1)
    with pytest.raises(PoolError, match="wrong sha256"):
        place.source.read(Pointer(1, identity.digest[:12] + "0" * 52))


def test_a_pool_of_another_backbone_is_refused(place, vit):
    identity = place.add(marked_pool(vit, 1), 1)
    with pytest.raises(PoolError, match="trained on"):
        place.source.read(identity, replace(vit.info, weights_sha256="0" * 64))


def pool_of_pages(vit) -> PromptPool:
    pool = fingerprints.empty_pool(vit)
    tasks = [fingerprints.task(f"task{number}", (f"label{number}",), vit, seed=number) for number in range(PAGE + 2)]
    return replace(pool, tasks=tuple(tasks))


def test_a_pool_of_several_pages_is_what_was_published(place, vit):
    pool = pool_of_pages(vit)
    identity = place.publish(pool, 1)
    (card,) = place.source.cards(1)
    assert (len(card.pages), len(card.tasks), card.identity) == (1, PAGE + 2, identity)
    assert same(place.source.read(identity, vit.info), pool)


def test_a_version_with_a_damaged_page_is_refused_and_its_card_is_none(place, vit, tmp_path):
    identity, whole = place.publish(pool_of_pages(vit), 1), PoolStore(tmp_path / "whole")
    (page,) = whole.card(whole.write(pool_of_pages(vit), 1, None)).pages
    place.overwrite(f"layers/{page}.json", b"[]")
    assert place.source.cards(1) == []
    with pytest.raises(PoolError, match="wrong sha256"):
        place.source.read(identity)


# --- what the one on S3 promises as well


def test_half_an_upload_is_no_version_and_the_next_try_completes_it(remote, vit):
    identity = remote.add(marked_pool(vit, 1), 1)
    remote.remove(f"versions/{identity.card}")  # the daemon was killed before the card
    with pytest.raises(PoolError):
        remote.source.read(identity)
    remote.add(marked_pool(vit, 1), 1)
    assert remote.source.read(identity, vit.info)


def requested(proxy: S3Proxy, method: str) -> list[str]:
    """The objects of the store that requests with this method named since this was last asked, in order."""
    found = [request.split(" ")[1] for request in proxy.requests if request.startswith(method)]
    proxy.requests.clear()
    return [path.split("?")[0].split("/pools/")[1] for path in found if "/pools/" in path]


def layers_of(*tasks: CardTask) -> list[str]:
    return sorted(f"layers/{task.layer}.safetensors" for task in tasks)


def test_layers_come_before_the_card_and_the_pointer_last_and_no_layer_is_uploaded_twice(
    s3_environment, s3_proxy, tmp_path, vit, monkeypatch
):
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_proxy.endpoint)
    url, local = s3_environment.url(), PoolStore(tmp_path / "local")
    cards = [local.card(local.write(marked_pool(vit, version), version, None)) for version in (1, 2, 3)]
    publisher, restarted = (open_remote_pools(url, tmp_path / "cache") for _ in range(2))
    wanted = [sorted(f"layers/{name}" for name in cards[0].files), *(layers_of(card.tasks[-1]) for card in cards[1:])]
    for card, layers, remote in zip(cards, wanted, (publisher, publisher, restarted), strict=True):
        remote.add(card.identity, local)
        remote.point_at(card.identity, ours)
        assert requested(s3_proxy, "PUT") == [*layers, f"versions/{card.identity.card}", "CURRENT"]
    for remote in (publisher, restarted):
        remote.add(cards[0].identity, local)
    assert requested(s3_proxy, "PUT") == []


def test_a_damaged_layer_does_not_leave_the_machine(s3_environment, s3_proxy, tmp_path, vit, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_proxy.endpoint)
    local, remote = PoolStore(tmp_path / "local"), open_remote_pools(s3_environment.url(), tmp_path / "cache")
    identity = local.write(marked_pool(vit, 1), 1, None)
    (damaged,) = layers_of(local.card(identity).tasks[-1])
    whole = (local.folder / damaged).read_bytes()
    (local.folder / damaged).write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(PoolError, match="wrong sha256"):
        remote.add(identity, local)
    puts = requested(s3_proxy, "PUT")
    assert damaged not in puts and not [name for name in puts if name.startswith("versions/")]
    (local.folder / damaged).write_bytes(whole)
    remote.add(identity, local)
    assert requested(s3_proxy, "PUT")[-1] == f"versions/{identity.card}" and remote.read(identity, vit.info)


@pytest.mark.parametrize("file", [bad_pools.LAYER, bad_pools.CARD])
@pytest.mark.parametrize("what", ["removed", "cut short"])
def test_a_version_that_is_added_again_is_whole_again(remote, vit, file, what):
    identity = remote.add(marked_pool(vit, 1), 1)
    path = bad_pools.file_of(remote.source.cards(1)[0], file)
    if what == "removed":
        remote.remove(path)
    else:
        remote.overwrite(path, b"cut short")
    with pytest.raises(PoolError):
        remote.source.read(identity)
    remote.add(marked_pool(vit, 1), 1)
    assert same(remote.source.read(identity, vit.info), marked_pool(vit, 1))


def test_a_removed_version_is_no_version_and_layers_go_by_name(remote, s3_environment, tmp_path, vit):
    first, second = (remote.add(marked_pool(vit, version), version) for version in (1, 2))
    store, ((one,), (two,)) = remote.source, (remote.source.cards(1), remote.source.cards(2))
    assert store.versions() == sorted([first.card, second.card])
    store.remove_version(first.card)
    assert store.versions() == [second.card] and store.cards(1) == []
    assert store.remove_layers((one.files | two.files).__contains__) == [], "its layers are still there"
    (own,) = layers_of(one.tasks[-1])
    assert store.remove_layers(two.files.__contains__) == [own.removeprefix("layers/")]
    assert store.remove_layers(two.files.__contains__) == []
    elsewhere = RemotePools(objects_of(s3_environment, store.name), tmp_path / "elsewhere")
    assert same(elsewhere.read(second, vit.info), marked_pool(vit, 2))
    with pytest.raises(PoolError):
        elsewhere.read(first)
    store.remove_version(first.card)  # gone already
    remote.add(marked_pool(vit, 1), 1)
    assert same(elsewhere.read(first, vit.info), marked_pool(vit, 1)), "what was removed is uploaded again"


def test_only_layers_that_neither_memory_nor_this_machine_has_are_downloaded(watched, s3_proxy, tmp_path, vit):
    place, source = watched
    versions = [place.add(marked_pool(vit, version), version) for version in (1, 2, 3)]
    one, two, three = (card for version in (1, 2, 3) for card in place.source.cards(version))
    first = source.read(versions[0], vit.info)
    assert sorted(requested(s3_proxy, "GET")) == sorted(
        [f"versions/{versions[0].card}", *(f"layers/{name}" for name in one.files)]
    )
    second = source.read(versions[1], vit.info)
    assert sorted(requested(s3_proxy, "GET")) == sorted([*layers_of(two.tasks[-1]), f"versions/{versions[1].card}"])
    assert same(second, marked_pool(vit, 2))
    shutil.rmtree(tmp_path / "machine")  # temporary files may vanish
    third = source.read(versions[2], vit.info, [first])
    assert same(third, marked_pool(vit, 3)) and all(
        new is old for new, old in zip(third.tasks[:-1], first.tasks[:-1], strict=True)
    )
    assert sorted(requested(s3_proxy, "GET")) == sorted(
        [*layers_of(three.tasks[-1]), f"layers/{three.g}.safetensors", f"versions/{versions[2].card}"]
    )
    assert same(source.read(versions[2], vit.info), third), "and whoever has nothing in memory downloads the rest"
    assert sorted(requested(s3_proxy, "GET")) == layers_of(*three.tasks[:-1])
    source.read(versions[2], vit.info)
    assert requested(s3_proxy, "GET") == []


def test_of_two_writers_that_point_at_the_same_time_one_wins_and_the_other_gets_an_error(s3_environment):
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


def test_a_pointer_that_has_not_changed_costs_one_small_request(s3_environment, s3_proxy, tmp_path, vit, monkeypatch):
    place = remote_place(s3_environment, tmp_path)
    place.publish(marked_pool(vit, 1), 1)
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_proxy.endpoint)
    watching = open_remote_pools(place.source.name.removesuffix("/pools"), tmp_path / "another")
    before = watching.current()
    s3_proxy.requests.clear()
    for _ in range(3):
        assert watching.current() == before
    assert len(s3_proxy.requests) == 3 and all(request.startswith("GET") for request in s3_proxy.requests)
    place.publish(marked_pool(vit, 2), 2)
    assert watching.current() != before


def test_replicas_of_a_machine_download_a_version_once(s3_environment, s3_proxy, tmp_path, vit, monkeypatch):
    place = remote_place(s3_environment, tmp_path)
    identity = place.publish(marked_pool(vit, 1), 1)
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_proxy.endpoint)
    url = place.source.name.removesuffix("/pools")
    replicas = [open_remote_pools(url, tmp_path / "machine") for _ in range(3)]
    readers = [threading.Thread(target=replica.read, args=(identity,)) for replica in replicas]
    for one in readers:
        one.start()
    for one in readers:
        one.join()
    (card,) = place.source.cards(1)
    wanted = [f"versions/{identity.card}", *(f"layers/{name}" for name in card.files)]
    assert len(s3_proxy.requests) == len(wanted) and sorted(requested(s3_proxy, "GET")) == sorted(wanted)


def test_few_versions_and_only_their_layers_are_kept_here(s3_environment, tmp_path, vit):
    place, cache = remote_place(s3_environment, tmp_path), PoolStore(tmp_path / "cache")
    for version in range(1, 6):
        identity = place.add(marked_pool(vit, version), version)
        place.source.read(identity)
        os.utime(cache.versions / identity.card, (version, version))
    cards = [card for version in range(1, 6) for card in cache.cards(version)]
    assert sorted(cache.paths()) == [card.identity.version for card in cards] == [3, 4, 5]
    assert {path.name for path in cache.layers.iterdir()} == frozenset().union(*(card.files for card in cards))
    assert all(same(cache.read(card.identity), marked_pool(vit, card.identity.version)) for card in cards)


@pytest.mark.parametrize("file", [bad_pools.LAYER, bad_pools.CARD])
def test_what_is_damaged_here_is_downloaded_again_and_nothing_else(watched, s3_proxy, tmp_path, vit, file):
    place, source = watched
    identity = place.add(marked_pool(vit, 1), 1)
    source.read(identity)
    path = bad_pools.file_of(place.source.cards(1)[0], file)
    whole = (tmp_path / "machine" / path).read_bytes()
    for damaged in (b"damaged", whole[:-5] + bytes([whole[-5] ^ 1]) + whole[-4:]):
        (tmp_path / "machine" / path).write_bytes(damaged)
        s3_proxy.requests.clear()
        assert same(source.read(identity, vit.info), marked_pool(vit, 1))
        assert requested(s3_proxy, "GET") == [path] and (tmp_path / "machine" / path).read_bytes() == whole


def test_what_a_killed_download_left_is_swept_away(s3_environment, tmp_path, vit):
    place = remote_place(s3_environment, tmp_path)
    left = [tmp_path / "cache" / folder / f".{'0' * 64}.part" for folder in ("layers", "versions")]
    for path in left:
        path.parent.mkdir(parents=True)
        path.write_bytes(b"half")
    place.source.read(place.add(marked_pool(vit, 1), 1))
    assert not any(path.exists() for path in left) and not [*(tmp_path / "cache").rglob("*.part")]


def test_a_download_of_something_else_leaves_nothing_here(remote, tmp_path, vit):
    identity = remote.add(marked_pool(vit, 1), 1)
    (layer,) = layers_of(remote.source.cards(1)[0].tasks[-1])
    remote.overwrite(layer, b"something else")
    with pytest.raises(PoolError, match="wrong sha256"):
        remote.source.read(identity)
    assert not (tmp_path / "cache" / layer).exists() and not [*(tmp_path / "cache").rglob("*.part")]


def test_a_cache_that_belongs_to_somebody_else_is_not_used(s3_environment, tmp_path, vit):
    if os.getuid():
        pytest.skip("only root may give a folder away")
    place = remote_place(s3_environment, tmp_path)
    (tmp_path / "cache").mkdir()
    os.chown(tmp_path / "cache", 4711, 4711)
    identity = place.add(marked_pool(vit, 1), 1)
    os.seteuid(0)
    with pytest.raises(PoolError, match="belongs to another user"):
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
        ("AWS_SECRET_ACCESS_KEY", "wrong", "check the credentials"),
        ("AWS_ENDPOINT_URL", "http://127.0.0.1:9", "Could not connect"),
    ],
)
def test_what_is_wrong_with_the_store_is_said_with_what_to_do(
    s3_environment, tmp_path, monkeypatch, variable, value, says
):
    monkeypatch.setenv(variable, value)
    with pytest.raises(PoolError, match=says):
        open_remote_pools(s3_environment.url(), tmp_path).current()


def test_a_store_that_was_opened_without_credentials_works_with_those_that_come_later(
    s3_environment, tmp_path, vit, monkeypatch
):
    url = s3_environment.url()
    published = remote_place(s3_environment, tmp_path, f"{url}/pools").publish(marked_pool(vit, 1), 1)
    missing = {name: os.environ[name] for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")}
    for name in missing:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    pools = open_remote_pools(url, tmp_path / "later")
    with pytest.raises(PoolError):
        pools.current()
    for name, value in missing.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(PoolError):
        pools.current()
    pools.reconnect()
    assert pools.current() == Pointer(1, published.digest)


def test_a_bucket_that_is_not_there_is_said(s3_environment, tmp_path, vit):
    nowhere = remote_place(s3_environment, tmp_path, "s3://no-such-bucket/pools")
    for try_ in (nowhere.source.current, lambda: nowhere.add(marked_pool(vit, 1), 1)):
        with pytest.raises(PoolError, match="no such bucket"):
            try_()


# --- a replica that watches it


@pytest.fixture
def watched(
    s3_environment: S3, s3_proxy: S3Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Place, RemotePools]:
    place = remote_place(s3_environment, tmp_path)
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_proxy.endpoint)
    return place, open_remote_pools(place.source.name.removesuffix("/pools"), tmp_path / "machine")


def test_only_cards_of_the_version_that_is_asked_for_are_listed(watched, s3_proxy, vit):
    place, source = watched
    for version in (1, 11):
        place.publish(marked_pool(vit, version), version)
    s3_proxy.requests.clear()
    assert [card.identity.version for card in source.cards(1)] == [1]
    assert "versions%2F1-&" in s3_proxy.requests[0] and source.cards(2) == []


def test_while_the_store_is_away_the_held_pool_stays_and_the_reason_is_reported(watched, s3_proxy, vit):
    place, source = watched
    live_pool = LivePool(source, vit, PredictSettings(), retry_seconds=0)
    place.publish(marked_pool(vit, 1), 1)
    assert live_pool.poll()
    s3_proxy.disconnect()
    assert not live_pool.poll()
    assert live_pool.loaded.version == 1 and not live_pool.is_current
    assert live_pool.last_rejection.stage == "pointer" and "127.0.0.1" in live_pool.last_rejection.reason
    place.publish(marked_pool(vit, 2), 2)
    s3_proxy.reconnect()
    assert live_pool.poll()
    assert (live_pool.loaded.version, live_pool.last_rejection, live_pool.is_current) == (2, None, True)


def test_a_new_replica_waits_with_the_reason_until_the_store_is_back(watched, s3_proxy, vit):
    place, source = watched
    place.publish(marked_pool(vit, 1), 1)
    s3_proxy.disconnect()
    live_pool = LivePool(source, vit, PredictSettings())
    assert not live_pool.poll() and live_pool.loaded is None and not live_pool.is_current
    assert live_pool.last_rejection.stage == "pointer"
    s3_proxy.reconnect()
    assert live_pool.poll() and live_pool.is_current


def test_a_store_that_does_not_answer_costs_a_look_a_few_seconds(watched, s3_proxy, vit):
    place, source = watched
    place.publish(marked_pool(vit, 1), 1)
    s3_proxy.is_silent = True
    live_pool, began = LivePool(source, vit, PredictSettings()), time.monotonic()
    assert not live_pool.poll()
    assert time.monotonic() - began < 8
    assert "no answer in time" in live_pool.last_rejection.reason


def test_a_download_that_fails_keeps_the_held_pool_and_is_tried_again(watched, tmp_path, vit):
    place, source = watched
    live_pool = LivePool(source, vit, PredictSettings(), retry_seconds=0)
    place.publish(marked_pool(vit, 1), 1)
    live_pool.poll()
    place.publish(marked_pool(vit, 2), 2)
    place.remove(bad_pools.file_of(place.source.cards(2)[0], bad_pools.LAYER))
    assert not live_pool.poll()
    assert live_pool.loaded.version == 1 and live_pool.last_rejection.stage == "read"
    place.add(marked_pool(vit, 2), 2)
    assert live_pool.poll() and live_pool.loaded.version == 2
    shutil.rmtree(tmp_path / "machine")  # temporary files may vanish
    third = place.publish(marked_pool(vit, 3), 3)
    assert live_pool.poll() and live_pool.loaded.version == 3
    assert hashlib.sha256((tmp_path / "machine" / "versions" / third.card).read_bytes()).hexdigest() == third.digest
