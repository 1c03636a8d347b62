"""A folder of pictures becomes a task on a real S3 server: whole or not at all, and nothing is overwritten."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from daemon_parts import class_folders
from s3 import S3

from mqmk.daemon.bucket import Bucket
from mqmk.daemon.bucket_upload import Room, expect_free, upload
from mqmk.daemon.errors import BucketError
from mqmk.learner.errors import TaskRejected
from mqmk.learner.manifest import parse_manifest
from mqmk.learner.pack import pack
from mqmk.learner.settings import ShardLimits
from mqmk.learner.validation import validate_task

COMMAND = Path(sys.executable).with_name("mqmk-daemon")


def typed(url: str, task: str, server: S3, *more: str) -> subprocess.CompletedProcess[str]:
    words = [COMMAND, "pack", class_folders("sea", 6), url, "--task", task, *more]
    environment = os.environ | server.environment()
    return subprocess.run(words, env=environment, capture_output=True, text=True, check=False)


def test_the_command_puts_a_whole_task_on_the_server_and_never_over_another(s3_environment: S3) -> None:
    url = s3_environment.url()
    done = typed(f"{url}/tasks", "sea", s3_environment, "--shard-mb", "0.005")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{url}/tasks/sea: 30 pictures of 5 classes in ")
    bucket = Bucket(url, settle_seconds=30.0)
    (seen,) = bucket.look({})
    manifest = parse_manifest(bucket.manifest(seen) or b"")
    assert len(manifest.shards) > 1
    report = validate_task(manifest, lambda name: bucket.open("sea", name), ShardLimits(), known_classes={})
    assert sum(report.samples.values()) == 30
    again = typed(f"{url}/tasks", "sea", s3_environment)
    assert again.returncode == 1 and "tasks are never overwritten" in again.stderr


@pytest.mark.parametrize(
    ("place", "task", "said"),
    [("", "sea", "expected the folder `tasks` of a bucket"), ("/tasks", "../sea", "expected a task name of letters")],
)
def test_what_is_no_place_for_a_task_is_said_before_anything_is_packed(
    s3_environment: S3, place: str, task: str, said: str
) -> None:
    with pytest.raises(BucketError, match=said):
        expect_free(s3_environment.url() + place, task)


class Cut:
    """A store whose line is cut after so many calls."""

    def __init__(self, room: Room, calls: int) -> None:
        self._store, self._calls = room.store, calls

    def _count(self) -> None:
        self._calls -= 1
        if self._calls < 0:
            raise BucketError("cut off", passing=True)

    def write(self, *words: object) -> None:
        self._count()
        self._store.write(*words)

    def move(self, *words: object) -> None:
        self._count()
        self._store.move(*words)


def test_of_an_upload_that_was_cut_off_nothing_is_taken_for_a_task_and_it_can_be_done_again(
    s3_environment: S3, tmp_path: Path
) -> None:
    url = s3_environment.url()
    packed = tmp_path / "tasks" / "sea"
    manifest = pack(class_folders("sea", 6), packed.parent, "sea", shard_size=5000)
    files = len(manifest.shards) + 1
    now = [0.0]
    bucket = Bucket(url, settle_seconds=30.0, clock=lambda: now[0])
    for calls in range(files + 1):  # up to the last file that is sent
        room = expect_free(f"{url}/tasks", "sea")
        with pytest.raises(BucketError, match="cut off"):
            upload(Room(Cut(room, calls), "sea"), packed)
        for _ in range(2):
            assert bucket.look({}) == [] and bucket.problems == ()
            now[0] += 60
    with pytest.raises(BucketError, match="cut off"):
        upload(Room(Cut(expect_free(f"{url}/tasks", "sea"), files + 2), "sea"), packed)  # two files are in their place
    assert bucket.look({}) == []
    now[0] += 60
    (seen,) = bucket.look({})
    with pytest.raises(TaskRejected, match=r"sea-00000.\.tar"):
        validate_task(manifest, lambda name: bucket.open("sea", name), ShardLimits(), known_classes={})
    for each in s3_environment.files.find(f"{url}/tasks/sea"):
        s3_environment.files.rm_file(each)
    upload(expect_free(f"{url}/tasks", "sea"), packed)
    (seen,) = bucket.look({})
    assert seen.completeness == "manifest" and bucket.manifest(seen) == (packed / "TASK.json").read_bytes()
