"""Rebuilds a state directory: pools from the registry, the ledger from pools and registry.

Tasks that were never published, reasons and events are lost. Nothing that exists is changed; a ledger is written only
if there is none.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mqmk.daemon.errors import LedgerError, RegistryError
from mqmk.daemon.ledger.ledger import Ledger, State, TaskRow
from mqmk.daemon.registry.interface import Registry
from mqmk.daemon.registry.records import RegisteredVersion
from mqmk.daemon.state_dir import StateDir
from mqmk.matcher.errors import PoolError
from mqmk.matcher.pointer import Pointer
from mqmk.matcher.pool_cards import CardTask
from mqmk.matcher.pool_files import encode


@dataclass(frozen=True)
class Rebuilt:
    """The result."""

    fetched: tuple[int, ...]
    """Versions whose files came from the registry."""
    lost: tuple[int, ...]
    """Versions that neither the store nor the registry has."""
    ledger: bool
    current: int


def rebuild(files: StateDir, ledger_file: Path, registry: Registry) -> Rebuilt:
    """Fetch every version that is missing or damaged, then restore CURRENT and the ledger if they are missing."""
    versions = registry.versions()
    if not versions:
        raise LedgerError("the registry has no version to rebuild from; check mlflow.tracking_uri and mlflow.model")
    versions, fetched, lost = _fetch_versions(files, registry, versions)
    current = _restore_pointer(files, registry, versions, lost)
    is_new = not ledger_file.exists()
    contents = {row.version: _tasks_of(files, registry, row) for row in versions} if is_new else {}
    lost_tasks = tuple(number for number in lost if is_new and contents[number] is None)
    if lost_tasks:
        raise LedgerError(
            "the ledger cannot be rebuilt: neither the pool store nor the registry has the files of "
            f"{_list_versions(lost_tasks)}; restore a backup of the state directory"
        )
    if is_new:
        known = {number: tasks for number, tasks in contents.items() if tasks is not None}
        _write_ledger(files, ledger_file, registry, versions, known)
    return Rebuilt(fetched, lost, is_new, current)


def _fetch_versions(
    files: StateDir, registry: Registry, versions: list[RegisteredVersion]
) -> tuple[list[RegisteredVersion], tuple[int, ...], tuple[int, ...]]:
    """The versions as the store has them now, which ones were fetched, and which ones nobody has."""
    found, fetched, lost = [], [], []
    for row in versions:
        had = bool(files.store.cards(row.version))
        try:
            digest = registry.fetch_pool(row.version, files.store).digest
            fetched += [] if had else [row.version]
        except (RegistryError, PoolError) as error:
            if isinstance(error, RegistryError) and error.transient:
                raise
            here = [card.identity for card in files.store.cards(row.version) if files.store.holds(card.identity)]
            digest = here[0].digest if here else row.digest
            lost += [] if here else [row.version]
        found.append(replace(row, digest=digest))
    return found, tuple(fetched), tuple(lost)


def _tasks_of(files: StateDir, registry: Registry, row: RegisteredVersion) -> tuple[CardTask, ...] | None:
    """What a version contains, also if its layers were erased because a task was forgotten; None if nobody knows."""
    try:
        return files.store.card(Pointer(row.version, row.digest)).tasks
    except PoolError:
        with suppress(PoolError):
            try:
                return registry.fetch_tasks(row.version, files.store)
            except RegistryError as error:
                if error.transient:
                    raise
        return None


def _restore_pointer(
    files: StateDir, registry: Registry, versions: list[RegisteredVersion], lost: tuple[int, ...]
) -> int:
    current = files.store.current()
    number = current.version if current else registry.serving() or versions[-1].version
    if number in lost:
        raise LedgerError(f"version {number} is the current one, and its files are lost; restore a backup")
    if current is None:
        row = next(row for row in versions if row.version == number)
        files.store.point_at(Pointer(row.version, row.digest))
    return number


def _list_versions(versions: tuple[int, ...]) -> str:
    return f"version{'s' if len(versions) > 1 else ''} {', '.join(map(str, versions))}"


def _write_ledger(
    files: StateDir,
    path: Path,
    registry: Registry,
    versions: list[RegisteredVersion],
    contents: Mapping[int, tuple[CardTask, ...]],
) -> None:
    part = path.with_suffix(".rebuilding")
    part.unlink(missing_ok=True)
    ledger = Ledger(part)
    exact = {each.version: each.exact for each in registry.deletions()}
    for row in versions:
        own, before = contents[row.version], contents[row.parent] if row.parent else ()
        if row.kind == "learn":
            tasks = [_add_task(ledger, row, each) for each in _tasks_not_in(own, before)]
            for each in _tasks_not_in(own, before):
                _save_prompt(files, row, each)
        else:
            tasks = [_find_task(ledger, each) for each in _tasks_not_in(before, own)]
        plan = ledger.plan_version(row.version, row.digest, row.parent, row.kind, tasks, {})
        ledger.finish_version(plan, {}, exact=exact.get(row.version))
        ledger.mark_recorded(ledger.version(row.version))
    _hold_tasks_not_in_current(files, ledger)
    _forget_erased_tasks(ledger, registry.erased_data())
    for forgotten in ledger.tasks(State.FORGOTTEN):
        files.purge(forgotten.identity or "")
    current = files.store.current()
    detail = {"versions": len(versions), "current": current.version if current else None}
    ledger.append_event("ledger.rebuilt", None, detail)
    ledger.close()
    part.rename(path)


def _tasks_not_in(tasks: Sequence[CardTask], others: Sequence[CardTask]) -> list[CardTask]:
    """The tasks of one version that another does not contain."""
    known = {task.manifest_sha256 for task in others}
    return [task for task in tasks if task.manifest_sha256 not in known]


def _find_task(ledger: Ledger, task: CardTask) -> TaskRow:
    found = ledger.task_with_identity(task.manifest_sha256)
    assert found is not None, f"{task.name} was forgotten and never learned"
    return found


def _add_task(ledger: Ledger, row: RegisteredVersion, learned: CardTask) -> TaskRow:
    """The row of a task that a version adds, so that it can be published."""
    task = ledger.task_with_identity(learned.manifest_sha256)
    if task is None:
        values: dict[str, Any] = {
            "identity": learned.manifest_sha256,
            "version": row.version,
            "report": _report(learned.classes),
            "metrics": dict(learned.metrics),
        }
        return ledger.add_task(learned.name, learned.name, "rebuilt", State.HELD, **values)
    for state in (State.DISCOVERED, State.VALIDATED, State.HELD) if task.state is State.FORGOTTEN else ():
        task = ledger.transition(task.id, task.state, state, task.attempt, "task.learned_again")
    return task


def _save_prompt(files: StateDir, row: RegisteredVersion, learned: CardTask) -> None:
    """The trained prompt, from this version or another one with the task; without it, `promote` trains again."""
    for number in (row.version, *files.store.paths()):
        for card in files.store.cards(number):
            own = [task for task in card.tasks if task.manifest_sha256 == learned.manifest_sha256]
            with suppress(PoolError):
                alone = files.store.assemble(replace(card, tasks=(*own,), matching={}))
                if own:
                    files.save_trained(learned.manifest_sha256, encode(alone, 0, None)[1])
                    return


def _hold_tasks_not_in_current(files: StateDir, ledger: Ledger) -> None:
    current = files.store.current()
    names = {task.name for task in files.store.card(current).tasks} if current else set()
    for task in ledger.tasks(State.PUBLISHED):
        if task.name not in names:
            ledger.transition(task.id, task.state, State.HELD, task.attempt, "task.held",
                              reason="not in the current version", code="rolled-back")  # fmt: skip


def _forget_erased_tasks(ledger: Ledger, erased: set[str]) -> None:
    """Tasks that were forgotten while they were in no current version: no version says so."""
    for task in ledger.tasks(State.HELD):
        if task.identity in erased:
            ledger.transition(task.id, task.state, State.FORGOTTEN, task.attempt, "task.forgotten",
                              version=None, approved=False, erased=[])  # fmt: skip


def _report(classes: tuple[str, ...]) -> dict[str, Any]:
    return {"samples": dict.fromkeys(classes, 0), "held_out": dict.fromkeys(classes, 0), "warnings": []}
