"""How a state directory is put together again: pools from the registry, the ledger from pools and registry.

What cannot be known again is said: tasks that were never published, reasons, events. Nothing that is there is changed;
a ledger is only written where there is none.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mqmk.daemon.errors import LedgerError, RegistryError
from mqmk.daemon.ledger import Ledger, State
from mqmk.daemon.registry_records import RegisteredVersion, Registry
from mqmk.daemon.state_files import StateFiles
from mqmk.matcher.pointer import Pointer
from mqmk.matcher.pool_files import encode, read_pool


@dataclass(frozen=True)
class Rebuilt:
    """What was done."""

    fetched: tuple[int, ...]
    """Versions whose files came from the registry."""
    lost: tuple[int, ...]
    """Versions that neither the store nor the registry has."""
    ledger: bool
    current: int


def rebuild(files: StateFiles, ledger_file: Path, registry: Registry) -> Rebuilt:
    """Fetch every version that the store lacks or that is damaged, then point and write the ledger if they are gone."""
    versions = registry.versions()
    if not versions:
        raise LedgerError("the registry has no version to rebuild from; check mlflow.tracking_uri and mlflow.model")
    fetched, lost = _fetched(files, registry, versions)
    current = _pointed(files, registry, versions, lost)
    is_new = not ledger_file.exists()
    if is_new and lost:
        raise LedgerError(
            f"the ledger cannot be written again: {_listed(lost)} would be missing in it, neither the pool store nor "
            "the registry has the files; restore a backup of the state directory"
        )
    if is_new:
        _write_ledger(files, ledger_file, registry, versions, current)
    return Rebuilt(fetched, lost, is_new, current)


def _fetched(
    files: StateFiles, registry: Registry, versions: list[RegisteredVersion]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Versions that were fetched, and those that nobody has."""
    fetched, lost = [], []
    for row in versions:
        own = Pointer(row.version, row.digest)
        before = (files.store.folder / own.folder).exists()
        try:
            registry.fetch_pool(row.version, files.store.folder)
        except RegistryError as error:
            if error.passing:
                raise
            lost += [] if files.store.holds(own) else [row.version]
        else:
            fetched += [] if before else [row.version]
    return tuple(fetched), tuple(lost)


def _pointed(files: StateFiles, registry: Registry, versions: list[RegisteredVersion], lost: tuple[int, ...]) -> int:
    current = files.store.current()
    number = current.version if current else registry.serving() or versions[-1].version
    if number in lost:
        raise LedgerError(f"version {number} is the current one, and nobody has its files; restore a backup")
    if current is None:
        row = next(row for row in versions if row.version == number)
        files.store.point_at(Pointer(row.version, row.digest))
    return number


def _listed(versions: tuple[int, ...]) -> str:
    return f"version{'s' if len(versions) > 1 else ''} {', '.join(map(str, versions))}"


def _write_ledger(
    files: StateFiles, path: Path, registry: Registry, versions: list[RegisteredVersion], current: int
) -> None:
    part = path.with_suffix(".rebuilding")
    part.unlink(missing_ok=True)
    ledger = Ledger(part)
    forgotten = {(each.version, each.task) for each in registry.deletions()}
    numbers: dict[str, int] = {}
    for row in versions:
        _, pool = read_pool(files.store.folder / Pointer(row.version, row.digest).folder)
        task = None
        if row.kind == "learn":
            learned = next(each for each in pool.tasks if each.name == row.task)
            task = ledger.with_identity(learned.manifest_sha256)
            if task is None:
                values: dict[str, Any] = {
                    "identity": learned.manifest_sha256,
                    "version": row.version,
                    "recorded": True,
                    "report": _report(learned.classes),
                    "metrics": dict(learned.metrics),
                }
                task = ledger.add_task(learned.name, learned.name, "rebuilt", State.HELD, **values)
            numbers[learned.name] = task.id
            alone = replace(pool, tasks=(learned,), matching={})
            files.save_trained(learned.manifest_sha256, encode(alone, 0, None)[1])
        plan = ledger.plan_version(row.version, row.digest, row.parent, row.kind, numbers.get(row.task or ""), {})
        is_gone = row.kind == "forget" and (row.version, row.task) in forgotten
        ledger.finish_version(plan, State.FORGOTTEN if is_gone else State.PUBLISHED, {})
        ledger.mark_recorded(ledger.version(row.version))
    _hold_what_is_not_current(files, ledger)
    ledger.note("ledger.rebuilt", None, {"versions": len(versions), "current": current})
    ledger.close()
    part.rename(path)


def _hold_what_is_not_current(files: StateFiles, ledger: Ledger) -> None:
    current = files.store.current()
    names = {task.name for task in files.store.read(current).tasks} if current else set()
    for task in ledger.tasks(State.PUBLISHED):
        if task.name not in names:
            ledger.move(task, State.HELD, "task.held", reason="not in the current version", code="rolled-back")


def _report(classes: tuple[str, ...]) -> dict[str, Any]:
    return {"samples": dict.fromkeys(classes, 0), "held_out": dict.fromkeys(classes, 0), "warnings": []}
