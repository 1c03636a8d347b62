"""How does a packed task get into a bucket that is no folder of this machine?

    upload(expect_free("s3://bucket/tasks", "birds"), Path("packed/birds"))

Everything goes to a hidden folder first, because a large shard takes longer to send than a folder may take to settle.
From there it goes to its place by copies within the store, TASK.json first: a task is not taken until every shard that
its TASK.json names is there. Killed while it sends, it can be done again; killed while it copies, it leaves a task that
is quarantined for its missing shards, and is to be removed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mqmk.daemon.bucket_store import TASKS, Store, open_store
from mqmk.daemon.errors import BucketError
from mqmk.daemon.passwords import hidden
from mqmk.learner.manifest import FILE_NAME, is_safe_name

TIMEOUT_SECONDS = 60.0


@dataclass(frozen=True)
class Room:
    """A place in a bucket where a task can go."""

    store: Store
    task: str


def expect_free(url: str, task: str) -> Room:
    """The place of a task below a URL of `tasks`; BucketError if something is there, before anything is packed."""
    bucket, slash, last = url.rstrip("/").rpartition("/")
    if not slash or last != TASKS:
        reason = f"expected the folder `{TASKS}` of a bucket, such as s3://bucket/{TASKS}, got {hidden(url)}"
        raise BucketError(reason, passing=False)
    if not is_safe_name(task):
        reason = f"expected a task name of letters, digits and - _ . or space, got {task!a:.100}; choose another --task"
        raise BucketError(reason, passing=False)
    store = open_store(bucket, timeout_seconds=TIMEOUT_SECONDS)
    if store.files(f"{TASKS}/{task}"):
        reason = f"{hidden(url)}/{task} exists, and tasks are never overwritten; choose another --task or remove it"
        raise BucketError(reason, passing=False)
    return Room(store, task)


def upload(room: Room, packed: Path, progress: Callable[[int, int], None] = lambda _done, _all: None) -> None:
    """Put the files of a packed task there; `progress` hears of bytes."""
    aside, final = f"{TASKS}/.part-{room.task}", f"{TASKS}/{room.task}"
    files = sorted(packed.iterdir(), key=lambda path: (path.name != FILE_NAME, path.name))
    sizes, done = [path.stat().st_size for path in files], 0
    for path, size in zip(files, sizes, strict=True):
        room.store.write(aside, path.name, path.read_bytes())
        done += size
        progress(done, sum(sizes))
    for path in files:
        room.store.move(aside, path.name, final)
