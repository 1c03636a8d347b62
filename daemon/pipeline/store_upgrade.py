"""The pool store of release 0.1 becomes one of layers, at the first start: every version keeps its number.

Release 0.1 stored each version as a whole, in `pools/<n>-<digest12>/`. Each step may be killed and repeated: the new
files are named by content, the ledger gets all new digests in one transaction, CURRENT follows, and only then the old
folders go.
"""

import logging
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from mqmk.daemon import failpoints
from mqmk.daemon.ledger.ledger import Ledger
from mqmk.daemon.logs import event
from mqmk.daemon.state_dir import StateDir
from mqmk.daemon.words import plural
from mqmk.matcher.errors import PoolError
from mqmk.matcher.pool import PromptPool
from mqmk.matcher.pool_files import PoolVersion, read_pool

log = logging.getLogger(__name__)
_FOLDER: Final = re.compile(r"(\d+)-[0-9a-f]{12}")
_REMOVED: Final = ".gone-"
_DONE: Final = "store_schema"


def upgrade_store(ledger: Ledger, files: StateDir) -> None:
    """Rewrite the versions of release 0.1, if there are some; one that cannot be read is lost, and logged."""
    folders = _old_folders(files.store.folder)
    if folders and ledger.get_value(_DONE) != "2":
        failpoints.hit("upgrade.before")
        digests = {old.digest: new for old, new in _rewrite(files, folders)}
        failpoints.hit("upgrade.written")
        ledger.replace_digests({old: new.digest for old, new in digests.items()})
        failpoints.hit("upgrade.recorded")
        current = files.store.current()
        if current and current.digest in digests:
            files.store.point_at(digests[current.digest])
        failpoints.hit("upgrade.pointed")
        ledger.set_value(_DONE, "2")
        log.info(f"upgraded the pool store: {plural(len(digests), 'version')}", extra=event("store.upgraded"))
    for folder in [*folders, *files.store.folder.glob(f"{_REMOVED}*")]:
        shutil.rmtree(folder, ignore_errors=True)
    failpoints.hit("upgrade.after")


def _old_folders(pools: Path) -> list[Path]:
    found = (
        [path for path in pools.iterdir() if path.is_dir() and _FOLDER.fullmatch(path.name)] if pools.is_dir() else []
    )
    return sorted(found, key=lambda path: int(path.name.partition("-")[0]))


def _rewrite(files: StateDir, folders: list[Path]) -> Iterator[tuple[PoolVersion, PoolVersion]]:
    metrics: dict[tuple[str, str], Any] = {}
    for folder in folders:
        try:
            old, pool = read_pool(folder)
        except PoolError as error:
            if isinstance(error.__cause__, OSError) and not isinstance(error.__cause__, FileNotFoundError):
                raise  # the disk failed, which says nothing about the version
            log.error(f"not upgraded: {error}", extra=event("store.version_lost", folder=folder.name))
            continue
        new = files.store.write(_with_first_metrics(pool, metrics), old.version, old.parent)
        if files.evaluation(old.digest).is_dir() and not files.evaluation(new.digest).exists():
            files.evaluation(old.digest).rename(files.evaluation(new.digest))
        yield old, new


def _with_first_metrics(pool: PromptPool, metrics: dict[tuple[str, str], Any]) -> PromptPool:
    """Each task with the figures of the version that added it, so that versions share the rows of their tasks."""
    tasks = [
        replace(task, metrics=metrics.setdefault((task.name, task.trained_at), task.metrics)) for task in pool.tasks
    ]
    return replace(pool, tasks=tuple(tasks))
