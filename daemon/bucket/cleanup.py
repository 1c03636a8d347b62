"""How a learned task is cleaned up so that it is never taken for a new one.

First `_LEARNED` is written into its folder: the record of which files were learned. Only then are they moved or
deleted, one by one, TASK.json after the shards and the record last. Whatever is left after a kill is in the record; a
file that is not was added later, belongs to a new task, and is never touched.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import count
from typing import Final, Literal, get_args

from mqmk.daemon.bucket.listing import MARKER, SUCCESS, Contents
from mqmk.daemon.bucket.store import LEARNED, TASKS, Store, StoredFile
from mqmk.daemon.errors import BucketError
from mqmk.learner.data.manifest import FILE_NAME, MAX_FILE_BYTES, Manifest

SCHEMA: Final = 1
AfterLearning = Literal["keep", "tag", "move", "delete"]


@dataclass(frozen=True)
class Record:
    """The content of `_LEARNED`: the learned files with their etags, and the folder they are moved to, if any."""

    fingerprint: str
    files: dict[str, str]
    to: str | None = None

    def covers(self, found: Contents) -> bool:
        """Whether the folder contains nothing of a task except what was learned."""
        return all(self.files.get(file.name) == file.etag for file in _task_files(found))


def clean_up(store: Store, folder: str, fingerprint: str, how: AfterLearning, manifest: Manifest | None) -> None:
    """Keep, tag, move or delete a folder that was learned as `fingerprint`; idempotent, also after a kill."""
    if how not in get_args(AfterLearning):
        raise ValueError(f"expected one of {', '.join(get_args(AfterLearning))}, got {how!r}")
    found = _list(store, folder)
    if how == "keep" or (found.fingerprint is None and found.find(MARKER) is None):
        return  # nothing to do, or nothing left to do
    record = _write_record(store, folder, found, fingerprint, how, manifest)
    if how == "tag":
        return
    for file in _in_order(found):
        if record.files.get(file.name) == file.etag:
            if record.to is not None:
                store.move(f"{TASKS}/{folder}", file.name, record.to)
            else:
                store.delete(f"{TASKS}/{folder}", file.name)
    if not [file for file in _list(store, folder).files if file.name != MARKER]:
        store.delete(f"{TASKS}/{folder}", MARKER)
        store.delete_folder(f"{TASKS}/{folder}")


def is_already_learned(store: Store, folder: str, found: Contents) -> bool:
    """Whether a folder contains only what `_LEARNED` lists."""
    if found.find(MARKER) is None:
        return False
    record = _read_record(store, folder)
    return record is None or record.covers(found)  # a marker written by hand covers everything


def _write_record(
    store: Store, folder: str, found: Contents, fingerprint: str, how: AfterLearning, manifest: Manifest | None
) -> Record:
    """The record, stored when this returns; that of an earlier attempt if there is one."""
    before = _read_record(store, folder) if found.find(MARKER) is not None else None
    if before is not None and before.fingerprint == fingerprint:
        files, to = before.files, before.to
    elif found.fingerprint == fingerprint:
        files, to = {file.name: file.etag for file in _learned_files(found, manifest)}, None
    else:
        reason = f"{TASKS}/{folder}: changed since it was learned; nothing was moved or deleted"
        raise BucketError(reason, transient=False)
    record = Record(fingerprint, files, (to or _choose_target(store, folder)) if how == "move" else None)
    if record != before:
        text = json.dumps({"schema": SCHEMA} | asdict(record), indent=2)
        store.write(f"{TASKS}/{folder}", MARKER, text.encode())
    return record


def _learned_files(found: Contents, manifest: Manifest | None) -> Iterator[StoredFile]:
    """The files of the task: where there is a TASK.json, only the shards it names, with the size it gives."""
    named = {(shard.name, shard.bytes) for shard in manifest.shards} if manifest is not None else set()
    for file in _in_order(found):
        if found.manifest is None or not file.name.endswith(".tar") or (file.name, file.bytes) in named:
            yield file


def _in_order(found: Contents) -> list[StoredFile]:
    """As they are moved and deleted."""
    last = [file for name in (FILE_NAME, SUCCESS) if (file := found.find(name)) is not None]
    return [*found.shards, *last]


def _task_files(found: Contents) -> list[StoredFile]:
    return [file for file in (*found.shards, found.manifest) if file is not None]


def _read_record(store: Store, folder: str) -> Record | None:
    """The content of `_LEARNED`; None if we did not write it."""
    try:
        with store.open_file(f"{TASKS}/{folder}", MARKER) as file:
            fields = json.loads(file.read(MAX_FILE_BYTES))
        if fields.pop("schema") != SCHEMA or not isinstance(fields["files"], dict):
            return None
        record = Record(**fields)
        return record if record.to is None or _is_target_of(folder, record.to) else None
    except (ValueError, KeyError, TypeError, AttributeError, FileNotFoundError):
        return None


def _is_target_of(folder: str, to: str) -> bool:
    """Whether `_choose_target` could return this: whoever fills the folder can also write a record with `..` in it."""
    return re.fullmatch(rf"{LEARNED}/{re.escape(folder)}(\.[0-9]+)?", to) is not None


def _choose_target(store: Store, folder: str) -> str:
    """The folder to move files to; not that of an earlier task of the same name."""
    names = (f"{LEARNED}/{folder}" if number == 1 else f"{LEARNED}/{folder}.{number}" for number in count(1))
    return next(place for place in names if not store.files(place))


def _list(store: Store, folder: str) -> Contents:
    return Contents.of(store.files(f"{TASKS}/{folder}"))
