"""Uploads a packed task to a bucket in an object store.

    upload(require_free("s3://bucket/tasks", "birds"), Path("packed/birds"))

Everything goes to a hidden folder first, because sending a large shard may take longer than a folder takes to settle.
From there it is copied within the store, TASK.json first: a task is not taken until every shard that its TASK.json
names is there. If killed while sending, repeat it; if killed while copying, it leaves a task that is quarantined for
its missing shards and must be removed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mqmk.daemon.bucket.store import TASKS, Store, open_store
from mqmk.daemon.errors import BucketError
from mqmk.daemon.redaction import redact
from mqmk.learner.data.manifest import FILE_NAME, is_safe_name

TIMEOUT_SECONDS = 60.0


@dataclass(frozen=True)
class UploadTarget:
    """A free folder of a bucket for a task."""

    store: Store
    task: str


def require_free(url: str, task: str) -> UploadTarget:
    """The folder of a task below a URL of `tasks`; BucketError if it is not empty, before anything is packed."""
    bucket, slash, last = url.rstrip("/").rpartition("/")
    if not slash or last != TASKS:
        reason = f"expected the folder `{TASKS}` of a bucket, such as s3://bucket/{TASKS}, got {redact(url)}"
        raise BucketError(reason, transient=False)
    if not is_safe_name(task):
        reason = f"expected a task name of letters, digits and - _ . or space, got {task!a:.100}; choose another --task"
        raise BucketError(reason, transient=False)
    store = open_store(bucket, timeout_seconds=TIMEOUT_SECONDS)
    if store.files(f"{TASKS}/{task}"):
        reason = f"{redact(url)}/{task} exists, and tasks are never overwritten; choose another --task or remove it"
        raise BucketError(reason, transient=False)
    return UploadTarget(store, task)


def upload(target: UploadTarget, packed: Path, progress: Callable[[int, int], None] = lambda _done, _all: None) -> None:
    """Upload the files of a packed task; `progress` is called with bytes sent and bytes in total."""
    aside, final = f"{TASKS}/.part-{target.task}", f"{TASKS}/{target.task}"
    files = sorted(packed.iterdir(), key=lambda path: (path.name != FILE_NAME, path.name))
    sizes, done = [path.stat().st_size for path in files], 0
    for path, size in zip(files, sizes, strict=True):
        target.store.write(aside, path.name, path.read_bytes())
        done += size
        progress(done, sum(sizes))
    for path in files:
        target.store.move(aside, path.name, final)
