"""A folder of images becomes a task on a real S3 server: whole or not at all, and nothing is overwritten."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.daemons.daemon import class_folders
from support.servers.s3 import S3

from mqmk.daemon.bucket.scanner import Bucket
from mqmk.daemon.bucket.upload import UploadTarget, require_free, upload
from mqmk.daemon.errors import BucketError
from mqmk.learner.data.manifest import Manifest, parse_manifest
from mqmk.learner.data.pack import pack
from mqmk.learner.data.validation import validate_task
from mqmk.learner.errors import TaskRejected
from mqmk.learner.settings import ShardLimits

COMMAND = Path(sys.executable).with_name("mqmk-daemon")


def typed(url: str, task: str, server: S3, *more: str) -> subprocess.CompletedProcess[str]:
    words = [COMMAND, "pack", class_folders("sea", 6), url, "--task", task, *more]
    environment = os.environ | server.environment()
    return subprocess.run(words, env=environment, capture_output=True, text=True, check=False)


def test_the_command_puts_a_whole_task_on_the_server_and_never_over_another(s3_environment: S3) -> None:
    url = s3_environment.url()
    done = typed(f"{url}/tasks", "sea", s3_environment, "--shard-mb", "0.005")
    assert done.returncode == 0, done.stderr
    *table, last = done.stdout.splitlines()
    assert last.startswith(f"{url}/tasks/sea: 30 images of 5 classes in ") and len(table) == 5
    assert "       6  crab" in table
    bucket = Bucket(url, settle_seconds=30.0)
    (seen,) = bucket.scan({})
    manifest = seen.manifest
    assert isinstance(manifest, Manifest)
    assert len(manifest.shards) > 1
    report = validate_task(manifest, lambda name: bucket.open_shard("sea", name), ShardLimits(), known_classes={})
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
        require_free(s3_environment.url() + place, task)


class Cut:
    """A store whose line is cut after so many calls."""

    def __init__(self, room: UploadTarget, calls: int) -> None:
        self._store, self._calls = room.store, calls

    def _count(self) -> None:
        self._calls -= 1
        if self._calls < 0:
            raise BucketError("cut off", transient=True)

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
        room = require_free(f"{url}/tasks", "sea")
        with pytest.raises(BucketError, match="cut off"):
            upload(UploadTarget(Cut(room, calls), "sea"), packed)
        for _ in range(2):
            assert bucket.scan({}) == [] and bucket.problems == ()
            now[0] += 60
    with pytest.raises(BucketError, match="cut off"):
        upload(
            UploadTarget(Cut(require_free(f"{url}/tasks", "sea"), files + 2), "sea"), packed
        )  # two files are in their place
    assert bucket.scan({}) == []
    now[0] += 60
    (seen,) = bucket.scan({})
    with pytest.raises(TaskRejected, match=r"sea-00000.\.tar"):
        validate_task(manifest, lambda name: bucket.open_shard("sea", name), ShardLimits(), known_classes={})
    for each in s3_environment.files.find(f"{url}/tasks/sea"):
        s3_environment.files.rm_file(each)
    upload(require_free(f"{url}/tasks", "sea"), packed)
    (seen,) = bucket.scan({})
    assert seen.manifest == parse_manifest((packed / "TASK.json").read_bytes())
