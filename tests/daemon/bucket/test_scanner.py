"""Complete tasks are found once they are complete, on a local folder and on a real S3 server alike."""

import hashlib
import json
import os
import pickle
import random
import resource
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import pytest
from support.servers.s3 import S3, S3Proxy

from mqmk.daemon.bucket.listing import Contents
from mqmk.daemon.bucket.scanner import MOST, Bucket, FoundTask, StoredShard
from mqmk.daemon.bucket.store import Store, open_store
from mqmk.daemon.errors import BucketError
from mqmk.learner.data.manifest import Manifest, Shard
from mqmk.learner.errors import TaskRejected

SETTLE = 30.0
MODES = ("keep", "tag", "move", "delete")


class Clock:
    """Time that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True)
class Place:
    """A bucket under test, what puts files into it as a user would, and what lists them."""

    url: str
    put: Callable[[str, bytes], None]  # path below the bucket
    names: Callable[[], set[str]]
    clock: Clock

    def bucket(self) -> Bucket:
        return Bucket(self.url, settle_seconds=SETTLE, timeout_seconds=5.0, clock=self.clock)

    def store(self) -> Store:
        return open_store(self.url, timeout_seconds=5.0)

    def put_task(self, folder: str, shards: dict[str, bytes], *, manifest: bool = True) -> None:
        for name, data in shards.items():
            self.put(f"tasks/{folder}/{name}", data)
        if manifest:
            self.put(f"tasks/{folder}/TASK.json", manifest_of(folder, shards))


def manifest_of(task: str, content: dict[str, bytes]) -> bytes:
    hashes = {name: hashlib.sha256(name.encode() + data).hexdigest() for name, data in content.items()}
    listed = (Shard(name, len(data), hashes[name], 1) for name, data in sorted(content.items()))
    return Manifest(task, ("heron", "owl"), tuple(listed)).to_bytes()


def manifest_in(found: FoundTask) -> bytes:
    assert isinstance(found.manifest, Manifest)
    return found.manifest.to_bytes()


def shards(number: int, mark: str = "a") -> dict[str, bytes]:
    return {f"birds-{index:06d}.tar": mark.encode() * (100 + index) for index in range(number)}


def folder_place(folder: Path) -> Place:
    def put(path: str, data: bytes) -> None:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)

    def names() -> set[str]:
        return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}

    folder.mkdir()
    return Place(str(folder), put, names, Clock())


def s3_place(server: S3) -> Place:
    url, files = server.url(), server.files
    root = url.removeprefix("s3://") + "/"

    def put(path: str, data: bytes) -> None:
        files.pipe_file(root + path, data)

    def names() -> set[str]:
        return {path.removeprefix(root) for path in files.find(root) if path.startswith(root)}

    return Place(url, put, names, Clock())


@pytest.fixture(params=["folder", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "folder":
        return folder_place(tmp_path / "bucket")
    return s3_place(request.getfixturevalue("s3_environment"))


def known(*found: FoundTask) -> dict[str, str]:
    return {task.folder: task.fingerprint for task in found}


def test_an_empty_bucket_holds_no_task(place: Place):
    bucket = place.bucket()
    assert bucket.scan({}) == []
    assert bucket.scan({}, everything=True) == []
    assert bucket.problems == ()


def test_a_task_uploaded_in_random_order_is_seen_when_its_manifest_comes_last(place: Place):
    bucket, content = place.bucket(), shards(6)
    uploads = list(content.items())
    random.Random(1).shuffle(uploads)
    for name, data in uploads:
        place.put(f"tasks/birds/{name}", data)
        assert bucket.scan({}) == []
    place.put("tasks/birds/TASK.json", manifest_of("birds", content))
    (seen,) = bucket.scan({})
    assert seen.folder == "birds" and manifest_in(seen) == manifest_of("birds", content)
    assert bucket.shards("birds") == [StoredShard(name, len(data)) for name, data in sorted(content.items())]
    assert bucket.scan({}) == [seen]  # until it is acted on
    assert bucket.scan(known(seen)) == []
    assert bucket.scan(known(seen), everything=True) == []


def test_a_manifest_that_came_before_its_shards_waits_for_them(place: Place):
    bucket, content = place.bucket(), shards(3)
    place.put("tasks/birds/TASK.json", manifest_of("birds", content))
    for name, data in content.items():
        place.put(f"tasks/birds/{name}", data[:-1])  # still growing
        assert bucket.scan({}) == []
        place.put(f"tasks/birds/{name}", data)
        place.clock.now += SETTLE - 1
    assert [manifest_in(seen) for seen in bucket.scan({})] == [manifest_of("birds", content)]


@pytest.mark.parametrize("data", [b'{"schema": 1, "task', b"[]", b""], ids=["cut", "list", "empty"])
def test_a_manifest_that_stays_unreadable_or_unkept_is_handed_on_to_validation(place: Place, data: bytes):
    bucket = place.bucket()
    place.put("tasks/birds/TASK.json", data)
    place.put("tasks/owls/TASK.json", manifest_of("owls", shards(2)))
    assert bucket.scan({}) == []
    place.clock.now += SETTLE
    seen = bucket.scan({})
    assert [one.folder for one in seen] == ["birds", "owls"]
    assert isinstance(seen[0].manifest, TaskRejected) and seen[0].manifest.code == "bad-manifest"
    assert manifest_in(seen[1]) == manifest_of("owls", shards(2))


def test_a_manifest_that_is_removed_during_a_scan_hides_no_other_task(place: Place, monkeypatch: pytest.MonkeyPatch):
    bucket = place.bucket()
    place.put_task("birds", shards(1))
    place.put_task("owls", shards(1))
    opens = bucket._store.open_file

    def open_file(folder: str, name: str) -> BinaryIO:
        if folder == "tasks/birds":
            raise FileNotFoundError(name)
        return opens(folder, name)

    monkeypatch.setattr(bucket._store, "open_file", open_file)
    assert [seen.folder for seen in bucket.scan({})] == ["owls"]
    assert bucket.problems == ("tasks/birds: TASK.json was removed during the scan",)
    monkeypatch.undo()
    assert [seen.folder for seen in bucket.scan({})] == ["birds", "owls"]


def test_a_slow_upload_without_a_manifest_is_not_taken_early(place: Place):
    bucket = place.bucket()
    for number, (name, data) in enumerate(shards(5).items()):
        place.put(f"tasks/birds/{name}", data[: 50 + number])
        assert bucket.scan({}) == []
        place.clock.now += SETTLE - 1
        assert bucket.scan({}, everything=number % 2 == 0) == []
        place.put(f"tasks/birds/{name}", data)
        assert bucket.scan({}) == []
        place.clock.now += SETTLE - 1
    assert bucket.scan({}) == []
    place.clock.now += 1
    (seen,) = bucket.scan({})
    assert (seen.folder, seen.manifest) == ("birds", None)
    assert bucket.scan(known(seen)) == []
    assert bucket.scan(known(seen), everything=True) == []


def test_after_a_restart_the_waiting_begins_anew(place: Place):
    place.put_task("birds", shards(1), manifest=False)
    bucket = place.bucket()
    bucket.scan({})
    place.clock.now += SETTLE
    assert place.bucket().scan({}) == []
    assert len(bucket.scan({})) == 1


def test_shards_without_a_manifest_are_complete_once_success_is_written(place: Place):
    bucket = place.bucket()
    place.put_task("birds", shards(2), manifest=False)
    assert bucket.scan({}) == []
    place.put("tasks/birds/_SUCCESS", b"")
    assert [seen.manifest for seen in bucket.scan({})] == [None]


def test_a_success_that_was_there_before_a_shard_says_nothing(place: Place):
    bucket = place.bucket()
    place.put("tasks/birds/_SUCCESS", b"")
    time.sleep(1.1)  # S3 knows whole seconds only
    place.put_task("birds", shards(2), manifest=False)
    assert bucket.scan({}) == []
    place.clock.now += SETTLE
    assert len(bucket.scan({})) == 1


def test_an_overwritten_task_is_found_by_the_next_scan(place: Place):
    bucket = place.bucket()
    place.put_task("birds", shards(2))
    place.put_task("owls", shards(2), manifest=False)
    place.put("tasks/owls/_SUCCESS", b"")
    before = bucket.scan({})
    place.put_task("birds", shards(2, "b") | {"birds-000009.tar": b"more"})
    place.put("tasks/owls/birds-000001.tar", b"other")
    assert "birds" in {one.folder for one in bucket.scan(known(*before))}
    place.clock.now += SETTLE  # the owls must settle again, where _SUCCESS is older than the shard
    changed = bucket.scan(known(*before))
    assert {one.folder for one in changed} == {"birds", "owls"}
    assert not set(changed) & set(before)
    assert bucket.scan(known(*changed)) == []


def test_in_a_bucket_too_large_to_list_an_overwritten_task_is_found_by_a_scan_of_everything(
    place: Place, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("mqmk.daemon.bucket.scanner.MOST_LISTED", 2)
    bucket = place.bucket()
    place.put_task("birds", shards(2))
    before = bucket.scan({})
    place.put_task("birds", shards(2, "b") | {"birds-000009.tar": b"more"})
    assert bucket.scan(known(*before)) == []  # only names are listed
    (changed,) = bucket.scan(known(*before), everything=True)
    assert changed.folder == "birds" and changed not in before


def test_a_known_folder_that_changed_and_settles_is_followed_by_quick_scans(place: Place):
    bucket = place.bucket()
    place.put_task("birds", shards(1), manifest=False)
    bucket.scan({})
    place.clock.now += SETTLE
    before = bucket.scan({})
    bucket.scan(known(*before))
    place.put_task("birds", shards(2), manifest=False)
    assert bucket.scan(known(*before), everything=True) == []
    place.clock.now += SETTLE
    (after,) = bucket.scan(known(*before))
    assert after.fingerprint != before[0].fingerprint


def test_what_cannot_be_followed_is_a_problem_and_no_crash(place: Place):
    bucket = place.bucket()
    place.put_task("birds", shards(1))
    place.put("tasks/bir|ds;rm -rf/TASK.json", b"{}")
    place.put("tasks/.part-1/TASK.json", b"{}")
    place.put("tasks/README", b"not a folder")
    place.put("tasks/images/heron.jpg", b"no shards")
    place.put("tasks/owls/a|b.tar", b"odd shard")
    place.put("tasks/empty/deeper/a.tar", b"too deep")
    for everything in (False, True):
        bucket.scan({}, everything=everything)
        place.clock.now += SETTLE
        assert [seen.folder for seen in bucket.scan({}, everything=everything)] == ["birds"]
        assert [problem.split(":")[0] for problem in bucket.problems] == [
            "tasks/'bir|ds;rm -rf'", "tasks/images", "tasks/owls",
        ]  # fmt: skip


@pytest.mark.parametrize("name", ["../secret", "a/b.tar", "", ".hidden", "pipe:ls"])
def test_names_that_are_not_safe_are_never_opened(place: Place, name: str):
    with pytest.raises(BucketError) as caught:
        place.bucket().open_shard("birds", name)
    assert not caught.value.transient
    with pytest.raises(BucketError):
        place.bucket().open_shard(name, "birds.tar")
    with pytest.raises(BucketError):
        place.bucket().clean_up(name, "", "delete", None)


def test_a_shard_is_streamed_whole(place: Place):
    data = random.Random(0).randbytes(20 * 2**20)  # more than two blocks
    place.put("tasks/birds/birds.tar", data)
    with place.bucket().open_shard("birds", "birds.tar") as stream:
        parts = [stream.read(512), stream.read(3 * 2**20)]
        while part := stream.read(2**20):
            parts.append(part)
    assert b"".join(parts) == data


def test_a_shard_that_is_not_there_is_file_not_found(place: Place):
    place.put("tasks/birds/birds.tar", b"")
    with pytest.raises(FileNotFoundError):
        place.bucket().open_shard("birds", "owls.tar")
    with place.bucket().open_shard("birds", "birds.tar") as stream:
        assert stream.read() == b""


@pytest.mark.parametrize("manifest", [True, False], ids=["manifest", "settled"])
@pytest.mark.parametrize("how", MODES)
def test_a_learned_task_is_put_away_twice_and_never_seen_again(place: Place, how: str, manifest: bool):
    bucket, content = place.bucket(), shards(3)
    place.put_task("birds", content, manifest=manifest)
    seen = settled(place, bucket)
    for _ in range(2):
        bucket.clean_up("birds", seen.fingerprint, how, seen.manifest)
    files = {f"tasks/birds/{name}" for name in content} | ({"tasks/birds/TASK.json"} if manifest else set())
    moved = {name.replace("tasks/", "learned/") for name in files}
    expected = {"keep": files, "tag": files | {"tasks/birds/_LEARNED"}, "move": moved, "delete": set()}
    assert place.names() == expected[how]
    assert_silent(place, known(seen))
    if how != "keep":  # then not even a lost ledger learns it again
        assert_silent(place, {})


@pytest.mark.parametrize("manifest", [True, False], ids=["manifest", "settled"])
@pytest.mark.parametrize("how", ["tag", "move", "delete"])
def test_a_kill_at_any_point_of_putting_away_is_made_good_by_the_next_time(
    tmp_path: Path, how: str, manifest: bool, monkeypatch: pytest.MonkeyPatch
):
    """Every step that changes something is the last one once; nothing half-done is ever a new task."""
    for steps in range(20):
        place = folder_place(tmp_path / str(steps))
        if kill_after(steps, place, how, manifest, monkeypatch):
            break
    assert steps >= {"tag": 1, "move": 5, "delete": 5}[how]


def test_a_kill_while_putting_away_is_made_good_on_s3_too(s3_environment: S3, monkeypatch: pytest.MonkeyPatch):
    for how, steps in (("move", 1), ("move", 3), ("delete", 3)):
        assert not kill_after(steps, s3_place(s3_environment), how, False, monkeypatch)


def kill_after(steps: int, place: Place, how: str, manifest: bool, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Finish, killed after so many changes; then once more. Whether it was over before the kill."""

    class Killed(BaseException):
        pass

    def counted(change: Callable[..., None]) -> Callable[..., None]:
        def step(*arguments: object) -> None:
            nonlocal left
            if not left:
                raise Killed
            left -= 1
            change(*arguments)

        return step

    place.put_task("birds", shards(3), manifest=manifest)
    bucket, left = place.bucket(), steps
    seen = settled(place, bucket)
    store, over = bucket._store, True
    with monkeypatch.context() as patch:
        for name in ("write", "move", "delete"):
            patch.setattr(store, name, counted(getattr(store, name)))
        try:
            bucket.clean_up("birds", seen.fingerprint, how, seen.manifest)
        except Killed:
            over = False
    assert_silent(place, known(seen))
    if steps:
        assert_silent(place, {})
    place.bucket().clean_up("birds", seen.fingerprint, how, seen.manifest)
    assert_silent(place, {})
    ends = {"tag": "tasks/birds/birds-000002.tar", "move": "learned/birds/birds-000002.tar", "delete": None}
    assert (ends[how] in place.names()) is (how != "delete")
    assert any(name.startswith("tasks/") for name in place.names()) is (how == "tag")
    return over


@pytest.mark.parametrize("how", ["tag", "move", "delete"])
def test_what_replaced_a_learned_task_is_not_put_away_with_it(place: Place, how: str):
    bucket = place.bucket()
    place.put_task("birds", shards(2))
    (seen,) = bucket.scan({})
    place.put_task("birds", shards(2, "b") | {"new.tar": b"new"})
    before = place.names()
    with pytest.raises(BucketError, match="changed since") as caught:
        bucket.clean_up("birds", seen.fingerprint, how, seen.manifest)
    assert not caught.value.transient
    assert place.names() == before


def test_a_task_put_where_one_was_learned_is_new(place: Place):
    bucket = place.bucket()
    place.put_task("birds", shards(2))
    (seen,) = bucket.scan({})
    for how in ("tag", "move"):
        bucket.clean_up("birds", seen.fingerprint, how, seen.manifest)
        place.put_task("birds", shards(3, how[0]))
        (after,) = bucket.scan(known(seen), everything=True)
        assert after.fingerprint != seen.fingerprint
        seen = after
    bucket.clean_up("birds", seen.fingerprint, "move", seen.manifest)  # and the first one keeps its place
    assert {name.split("/")[1] for name in place.names()} == {"birds", "birds.2"}


def test_only_the_files_of_the_task_are_deleted(place: Place):
    bucket = place.bucket()
    place.put_task("birds", shards(2))
    place.put("tasks/birds/README.md", b"mine")
    place.put("tasks/birds/not-in-the-manifest.tar", b"mine too")
    (seen,) = bucket.scan({})
    bucket.clean_up("birds", seen.fingerprint, "delete", seen.manifest)
    left = {"tasks/birds/README.md", "tasks/birds/not-in-the-manifest.tar", "tasks/birds/_LEARNED"}
    assert place.names() == left


@pytest.mark.parametrize("to", ["learned/birds/../../../outside", "learned/birdsong", "/outside", "learned/birds.2/.."])
def test_a_record_written_by_a_stranger_does_not_say_where_files_go(place: Place, tmp_path: Path, to: str):
    place.put_task("birds", shards(2))
    (seen,) = place.bucket().scan({})
    place.bucket().clean_up("birds", seen.fingerprint, "tag", seen.manifest)
    with place.store().open_file("tasks/birds", "_LEARNED") as file:
        record = json.loads(file.read())
    place.put("tasks/birds/_LEARNED", json.dumps(record | {"to": to}).encode())
    place.bucket().clean_up("birds", seen.fingerprint, "move", seen.manifest)
    assert place.names() == {f"learned/birds/{name}" for name in (*shards(2), "TASK.json")}
    assert not (tmp_path / "outside").exists() and not Path("/outside").exists()


def test_a_marker_written_by_hand_closes_a_folder(place: Place):
    place.put_task("birds", shards(2))
    place.put("tasks/birds/_LEARNED", b"")
    assert_silent(place, {})


def settled(place: Place, bucket: Bucket) -> FoundTask:
    """The one task of the bucket, at the latest when it has settled."""
    bucket.scan({})
    place.clock.now += SETTLE
    (seen,) = bucket.scan({})
    return seen


def assert_silent(place: Place, acted_on: dict[str, str]) -> None:
    """No scan finds a new task or a problem, however long one waits."""
    bucket = place.bucket()
    for everything in (False, True, False):
        assert bucket.scan(acted_on, everything=everything) == []
        assert bucket.problems == ()
        place.clock.now += SETTLE


def test_more_new_tasks_than_one_scan_reports_come_with_the_next(tmp_path: Path):
    place = folder_place(tmp_path / "bucket")
    for number in range(MOST + 20):
        place.put_task(f"task{number}", {"a.tar": b"a"})
    bucket = place.bucket()
    first = bucket.scan({})
    assert len(first) == MOST
    assert bucket._wake_up.is_set()
    assert len(bucket.scan(known(*first))) == 20


def test_unchanged_folders_are_not_opened_and_do_not_hide_a_new_one(place: Place, monkeypatch: pytest.MonkeyPatch):
    """As many as a scan may report, all known, such as quarantined ones."""
    monkeypatch.setattr("mqmk.daemon.bucket.scanner.MOST", 5)
    for number in range(8):
        place.put(f"tasks/bad{number}/TASK.json", b"{}")
    place.put_task("closed", shards(1))
    place.put("tasks/closed/_LEARNED", b"")
    bucket = place.bucket()
    bucket.scan({})
    place.clock.now += SETTLE
    first = bucket.scan({})
    second = bucket.scan(known(*first))
    acted_on = known(*first, *second)
    assert len(acted_on) == 8 and bucket.has_changed() is False
    opened: list[str] = []
    opens = bucket._store.open_file
    monkeypatch.setattr(bucket._store, "open_file", lambda where, name: (opened.append(where), opens(where, name))[1])
    place.put_task("zzz", shards(1))
    assert [one.folder for one in bucket.scan(acted_on)] == ["zzz"]
    assert opened == ["tasks/zzz"]
    assert not bucket.has_changed()


def test_ten_thousand_finished_tasks_cost_a_local_look_little(tmp_path: Path):
    place = folder_place(tmp_path / "bucket")
    for number in range(10_000):
        (tmp_path / "bucket" / "tasks" / f"task{number}").mkdir(parents=True)
        (tmp_path / "bucket" / "tasks" / f"task{number}" / "TASK.json").write_bytes(b"{}")
    bucket = place.bucket()
    acted_on = {folder: Contents.of(files).fingerprint for folder, files in place.store().list_all()}
    assert len(acted_on) == 10_000
    assert bucket.scan(acted_on, everything=True) == []
    place.put_task("birds", shards(1))
    before = resource.getrusage(resource.RUSAGE_SELF)
    assert [one.folder for one in bucket.scan(acted_on)] == ["birds"]
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.3  # seconds; about 0.03 here


def test_ten_thousand_finished_tasks_cost_ten_requests_on_s3(s3_environment: S3, s3_proxy: S3Proxy, monkeypatch):
    place = s3_place(s3_environment)
    s3_environment.put_many({f"{place.url}/tasks/task{number}/TASK.json": b"{}" for number in range(10_000)})
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_proxy.endpoint)
    bucket = place.bucket()
    fingerprint = Contents.of(place.store().files("tasks/task0")).fingerprint  # of the same bytes everywhere
    acted_on = {f"task{number}": fingerprint for number in range(10_000)}
    s3_proxy.requests.clear()
    assert bucket.scan(acted_on, everything=True) == []
    assert 10 <= len(s3_proxy.requests) <= 12
    s3_proxy.requests.clear()
    assert bucket.scan(acted_on) == []
    assert 10 <= len(s3_proxy.requests) <= 12
    place.put_task("birds", shards(1))
    s3_proxy.requests.clear()
    assert [seen.folder for seen in bucket.scan(acted_on)] == ["birds"]
    assert len(s3_proxy.requests) <= 16  # the new folder's files and its manifest


def test_a_server_that_is_gone_for_a_while_is_an_error_that_passes(s3_environment: S3, s3_proxy: S3Proxy, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_proxy.endpoint)
    place = s3_place(s3_environment)
    bucket = place.bucket()
    place.put_task("birds", {"birds.tar": b"x" * 20 * 2**20})
    (seen,) = bucket.scan({})
    stream = bucket.open_shard("birds", "birds.tar")
    assert stream.read(10) == b"x" * 10
    s3_proxy.disconnect()
    for attempt in (
        lambda: bucket.scan({}),
        lambda: bucket.open_shard("birds", "birds.tar"),
        lambda: stream.read(),
        lambda: bucket.clean_up("birds", seen.fingerprint, "delete", seen.manifest),
    ):
        with pytest.raises(BucketError) as caught:
            attempt()
        assert caught.value.transient
    stream.close()
    s3_proxy.reconnect()
    assert bucket.scan({}) == [seen]
    with bucket.open_shard("birds", "birds.tar") as again:
        assert len(again.read()) == 20 * 2**20
    bucket.clean_up("birds", seen.fingerprint, "delete", seen.manifest)
    assert place.names() == set()


def test_a_server_that_does_not_answer_is_given_up(s3_environment: S3, s3_proxy: S3Proxy, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_proxy.endpoint)
    url = s3_environment.url()
    bucket = Bucket(url, settle_seconds=1, timeout_seconds=0.5)
    assert bucket.scan({}) == []
    s3_proxy.is_silent = True
    begun = time.monotonic()
    with pytest.raises(BucketError) as caught:
        bucket.scan({})
    assert caught.value.transient
    assert time.monotonic() - begun < 10
    s3_proxy.is_silent = False


@pytest.mark.parametrize("wrong", [{"AWS_SECRET_ACCESS_KEY": "wrong"}, {"AWS_ACCESS_KEY_ID": "nobody"}])
def test_wrong_credentials_do_not_pass_and_say_what_to_check(s3_environment: S3, monkeypatch, wrong):
    url = s3_environment.url()
    for name, value in wrong.items():
        monkeypatch.setenv(name, value)
    bucket = Bucket(url, settle_seconds=1)
    for attempt in (bucket.check, lambda: bucket.scan({}), lambda: bucket.open_shard("birds", "birds.tar")):
        with pytest.raises(BucketError, match="AWS_SECRET_ACCESS_KEY") as caught:
            attempt()
        assert not caught.value.transient


def test_no_credentials_at_all_do_not_pass(s3_environment: S3, monkeypatch, tmp_path):
    url = s3_environment.url()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    with pytest.raises(BucketError, match="no credentials found") as caught:
        Bucket(url, settle_seconds=1).scan({})
    assert not caught.value.transient


@pytest.mark.usefixtures("s3_environment")
@pytest.mark.parametrize(
    ("url", "hint"), [("s3://there-is-none/prefix", "no such bucket"), ("/there/is/none", "mkdir -p")]
)
def test_a_bucket_that_does_not_exist_does_not_pass(url: str, hint: str):
    bucket = Bucket(url, settle_seconds=1)
    for attempt in (
        bucket.check,
        lambda: bucket.scan({}),
        lambda: bucket.scan({}, everything=True),
        lambda: bucket.open_shard("birds", "birds.tar"),  # or a task would be blamed for a missing shard
    ):
        with pytest.raises(BucketError, match=hint) as caught:
            attempt()
        assert not caught.value.transient


@pytest.mark.parametrize("url", ["gs://bucket/prefix", "nonsense://bucket"])
def test_a_url_that_nothing_understands_does_not_pass(url: str):
    with pytest.raises(BucketError, match=url.split(":")[0]) as caught:
        Bucket(url, settle_seconds=1).check()
    assert not caught.value.transient


def test_another_fsspec_store_works_by_its_url():
    import fsspec

    files, root = fsspec.filesystem("memory"), f"/bucket-{time.time_ns()}"
    content = shards(2)
    for name, data in (content | {"TASK.json": manifest_of("birds", content)}).items():
        files.pipe_file(f"{root}/tasks/birds/{name}", data)
    bucket = Bucket(f"memory:/{root}", settle_seconds=SETTLE)
    (seen,) = bucket.scan({})
    assert bucket.scan({}, everything=True) == [seen]
    bucket.clean_up("birds", seen.fingerprint, "move", seen.manifest)
    assert sorted(files.find(f"{root}/learned")) == [f"{root}/learned/birds/{name}" for name in ("TASK.json", *content)]
    assert bucket.scan({}, everything=True) == []


def test_an_error_is_whole_after_its_way_from_a_worker():
    error = pickle.loads(pickle.dumps(BucketError("the bucket is gone", transient=True)))
    assert (str(error), error.transient) == ("the bucket is gone", True)


def test_a_password_in_the_url_is_not_shown():
    with pytest.raises(BucketError) as caught:
        Bucket("nonsense://me:secret@host/path", settle_seconds=1).check()
    assert "secret" not in str(caught.value)


def test_a_pipe_in_a_local_folder_does_not_block(tmp_path: Path):
    place = folder_place(tmp_path / "bucket")
    place.put_task("birds", shards(1))
    os.mkfifo(tmp_path / "bucket" / "tasks" / "birds" / "pipe.tar")
    bucket = place.bucket()
    assert [shard.name for shard in bucket.shards("birds")] == ["birds-000000.tar"]
    with pytest.raises(FileNotFoundError):
        bucket.open_shard("birds", "pipe.tar")


@pytest.fixture
def waiting(tmp_path: Path) -> Iterator[tuple[Bucket, Path]]:
    bucket = Bucket(str(tmp_path / "bucket"), settle_seconds=SETTLE)
    bucket.prepare()
    bucket.wait(5)  # the watch has begun
    while bucket.wait(2.5):
        pass
    yield bucket, tmp_path / "bucket" / "tasks"
    bucket.close()


def seconds_waited(bucket: Bucket, limit: float) -> float:
    begun = time.monotonic()
    assert bucket.wait(limit)
    return time.monotonic() - begun


def test_a_wait_ends_at_once_when_a_local_folder_changes(waiting: tuple[Bucket, Path], tmp_path: Path):
    bucket, tasks = waiting
    (tmp_path / "packed").mkdir()
    (tmp_path / "packed" / "TASK.json").write_bytes(manifest_of("birds", {"a.tar": b"a"}))
    (tmp_path / "packed" / "a.tar").write_bytes(b"a")
    threading.Timer(0.2, lambda: (tmp_path / "packed").rename(tasks / "birds")).start()
    assert seconds_waited(bucket, 30) < 5
    assert [seen.folder for seen in bucket.scan({})] == ["birds"]
    while bucket.wait(1):
        pass
    threading.Timer(0.2, lambda: (tasks / "birds" / "TASK.json").write_bytes(b"{}")).start()
    assert seconds_waited(bucket, 30) < 5


def test_a_folder_that_is_replaced_is_watched_again(waiting: tuple[Bucket, Path]):
    bucket, tasks = waiting
    shutil.rmtree(tasks)
    while bucket.wait(2.5):
        pass
    tasks.mkdir()
    while bucket.wait(2.5):
        pass
    threading.Timer(0.2, lambda: (tasks / "birds").mkdir()).start()
    assert seconds_waited(bucket, 30) < 5


def test_hidden_files_end_no_wait(waiting: tuple[Bucket, Path]):
    bucket, tasks = waiting
    (tasks / ".part-1").mkdir()
    (tasks / ".part-1" / "a.tar").write_bytes(b"a")
    assert not bucket.wait(1)


def test_another_thread_ends_a_wait():
    bucket = Bucket("s3://somewhere", settle_seconds=SETTLE)
    assert not bucket.has_changed()
    threading.Timer(0.2, bucket.wake).start()
    assert seconds_waited(bucket, 30) < 5
    assert bucket.has_changed()  # until somebody looked
    assert not bucket.wait(0.01)


def test_a_wait_ends_when_a_folder_may_have_settled():
    bucket = Bucket("s3://somewhere", settle_seconds=0.3)
    bucket._settling.has_settled("birds", "state")
    assert 0.1 < seconds_waited(bucket, 30) < 5
    assert bucket._settling.has_settled("birds", "state")
    assert not bucket.wait(0.05)  # said once: a folder that stays does not keep the daemon awake


@pytest.mark.parametrize("trouble", ["of the bucket", "of the folder"])
def test_a_folder_that_may_have_settled_keeps_nobody_awake_while_it_cannot_be_read(tmp_path, trouble, monkeypatch):
    place = folder_place(tmp_path / "bucket")
    bucket = Bucket("s3://somewhere", settle_seconds=SETTLE, clock=place.clock)  # not watched: nothing else wakes it
    bucket._store = store = place.store()
    place.put_task("birds", shards(1), manifest=False)
    bucket.scan({})
    place.clock.now += SETTLE + 1

    def fail(*_: object) -> None:
        raise BucketError("not now", transient=trouble == "of the bucket")

    monkeypatch.setattr(store, "list_all", fail if trouble == "of the bucket" else lambda: {"birds": None})
    monkeypatch.setattr(store, "files", fail)
    with pytest.raises(BucketError) if trouble == "of the bucket" else nullcontext():
        bucket.scan({})
    assert not bucket.has_changed() and not bucket.wait(0.05)
    monkeypatch.undo()
    place.clock.now += SETTLE + 1
    bucket.scan({})
    place.clock.now += SETTLE + 1
    assert [seen.folder for seen in bucket.scan({})] == ["birds"]


def test_a_record_of_what_was_learned_can_be_read_by_people(tmp_path: Path):
    place = folder_place(tmp_path / "bucket")
    place.put_task("birds", shards(2))
    (seen,) = place.bucket().scan({})
    place.bucket().clean_up("birds", seen.fingerprint, "tag", seen.manifest)
    record = json.loads((tmp_path / "bucket/tasks/birds/_LEARNED").read_bytes())
    assert record["schema"] == 1
    assert record["fingerprint"] == seen.fingerprint
    assert set(record["files"]) == {"birds-000000.tar", "birds-000001.tar", "TASK.json"}
