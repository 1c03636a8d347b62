"""How is a learned task put away, so that it never looks like a new one?

First `_LEARNED` is written into its folder: the record of which files were learned. Only then are they moved or
deleted, one by one, TASK.json after the shards and the record last. Whatever is left after a kill at any point is in
the record; a file that is not was put there since, is a new task's, and is never touched.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import count
from typing import Final, Literal, get_args

from mqmk.daemon.bucket_contents import MARKER, SUCCESS, Contents, contents
from mqmk.daemon.bucket_store import LEARNED, TASKS, Store, StoredFile
from mqmk.daemon.errors import BucketError
from mqmk.learner.errors import TaskRejected
from mqmk.learner.manifest import FILE_NAME, MAX_FILE_BYTES, Manifest, parse_manifest

SCHEMA: Final = 1
Finish = Literal["keep", "tag", "move", "delete"]


@dataclass(frozen=True)
class Record:
    """What `_LEARNED` says: the learned files with their prints, and where they go if they are moved."""

    fingerprint: str
    files: dict[str, str]
    to: str | None = None

    def covers(self, found: Contents) -> bool:
        """Whether the folder holds nothing of a task but what was learned."""
        return all(self.files.get(file.name) == file.print for file in _of_a_task(found))


def finish(store: Store, folder: str, fingerprint: str, how: Finish) -> None:
    """Keep, tag, move or delete a folder that was learned as `fingerprint`; may be killed and done again."""
    if how not in get_args(Finish):
        raise ValueError(f"expected one of {', '.join(get_args(Finish))}, got {how!r}")
    found = _look(store, folder)
    if how == "keep" or (found.fingerprint is None and found.named(MARKER) is None):
        return  # nothing is to be done, or nothing is left to do
    record = _begun(store, folder, found, fingerprint, how)
    if how == "tag":
        return
    for file in _in_order(found):
        if record.files.get(file.name) == file.print:
            if record.to is not None:
                store.move(f"{TASKS}/{folder}", file.name, record.to)
            else:
                store.delete(f"{TASKS}/{folder}", file.name)
    if not [file for file in _look(store, folder).files if file.name != MARKER]:
        store.delete(f"{TASKS}/{folder}", MARKER)
        store.delete_folder(f"{TASKS}/{folder}")


def is_leftover(store: Store, folder: str, found: Contents) -> bool:
    """Whether a folder holds only what `_LEARNED` says was learned."""
    if found.named(MARKER) is None:
        return False
    record = _record(store, folder)
    return record is None or record.covers(found)  # a marker that somebody put there by hand covers everything


def read_manifest(store: Store, folder: str) -> bytes:
    """TASK.json, as far as one may be long; one byte more lets the parser see that it is too long."""
    with store.open(f"{TASKS}/{folder}", FILE_NAME) as file:
        return file.read(MAX_FILE_BYTES + 1)


def promised(store: Store, folder: str) -> Manifest | None:
    """The manifest of a folder; None if it is not there or not (yet) readable."""
    try:
        return parse_manifest(read_manifest(store, folder))
    except (TaskRejected, FileNotFoundError):
        return None


def _begun(store: Store, folder: str, found: Contents, fingerprint: str, how: Finish) -> Record:
    """The record, in the folder when this returns; that of an earlier try if there is one."""
    before = _record(store, folder) if found.named(MARKER) is not None else None
    if before is not None and before.fingerprint == fingerprint:
        files, to = before.files, before.to
    elif found.fingerprint == fingerprint:
        files, to = {file.name: file.print for file in _learned(store, folder, found)}, None
    else:
        reason = f"{TASKS}/{folder}: expected what was learned, it was changed since; nothing was moved or deleted"
        raise BucketError(reason, passing=False)
    record = Record(fingerprint, files, (to or _free(store, folder)) if how == "move" else None)
    if record != before:
        text = json.dumps({"schema": SCHEMA} | asdict(record), indent=2)
        store.write(f"{TASKS}/{folder}", MARKER, text.encode())
    return record


def _learned(store: Store, folder: str, found: Contents) -> Iterator[StoredFile]:
    """The files that made the task: with a manifest only those it names, of the size it says."""
    manifest = promised(store, folder) if found.manifest is not None else None
    sizes = {shard.name: shard.bytes for shard in manifest.shards} if manifest is not None else None
    for file in _in_order(found):
        if sizes is None or not file.name.endswith(".tar") or sizes.get(file.name) == file.bytes:
            yield file


def _in_order(found: Contents) -> list[StoredFile]:
    """As they are moved and deleted."""
    last = [file for name in (FILE_NAME, SUCCESS) if (file := found.named(name)) is not None]
    return [*found.shards, *last]


def _of_a_task(found: Contents) -> list[StoredFile]:
    return [file for file in (*found.shards, found.manifest) if file is not None]


def _record(store: Store, folder: str) -> Record | None:
    """What `_LEARNED` says; None if it is not ours."""
    try:
        with store.open(f"{TASKS}/{folder}", MARKER) as file:
            fields = json.loads(file.read(MAX_FILE_BYTES))
        if fields.pop("schema") != SCHEMA or not isinstance(fields["files"], dict):
            return None
        record = Record(**fields)
        return record if record.to is None or _is_place_of(folder, record.to) else None
    except (ValueError, KeyError, TypeError, AttributeError, FileNotFoundError):
        return None


def _is_place_of(folder: str, to: str) -> bool:
    """Whether `_free` could have said so: whoever fills the folder can write a record, too, with `..` in it."""
    return re.fullmatch(rf"{LEARNED}/{re.escape(folder)}(\.[0-9]+)?", to) is not None


def _free(store: Store, folder: str) -> str:
    """Where the files go; an earlier task of the same name keeps its place."""
    names = (f"{LEARNED}/{folder}" if number == 1 else f"{LEARNED}/{folder}.{number}" for number in count(1))
    return next(place for place in names if not store.files(place))


def _look(store: Store, folder: str) -> Contents:
    return contents(store.files(f"{TASKS}/{folder}"))
