"""How a pool version becomes the current one, exactly once: announced, stored, pointed at, entered.

The ledger announces a version before its files move into the store, so a daemon that is killed anywhere in between
finds the announcement and finishes the same version; no number is skipped and none is used twice.
"""

import logging
from collections.abc import Mapping

from mqmk.daemon import crash_points
from mqmk.daemon.errors import LedgerError
from mqmk.daemon.jobs import Built
from mqmk.daemon.ledger import IN_POOL, Ledger, State, TaskRow, VersionRow
from mqmk.daemon.logs import event
from mqmk.daemon.state_files import StateFiles
from mqmk.matcher.errors import PoolError
from mqmk.matcher.pointer import Pointer

log = logging.getLogger(__name__)


class Publication:
    """The steps of publishing, rolling back and promoting; each may be run again."""

    def __init__(self, ledger: Ledger, files: StateFiles) -> None:
        self._ledger, self._files = ledger, files

    def publish(self, built: Built, kind: str, task: TaskRow) -> None:
        """Make a candidate the current version."""
        crash_points.reached("publish.before")
        plan = self._ledger.plan_version(built.version, built.digest, built.parent, kind, task.id, built.evaluation)
        crash_points.reached("publish.planned")
        self._finish(plan)

    def finish_what_was_planned(self) -> None:
        """After a kill: every announced version is finished, or taken back if its files are gone."""
        for plan in self._ledger.unfinished_versions():
            self._finish(plan)

    def _finish(self, plan: VersionRow) -> None:
        pointer = Pointer(plan.version, plan.digest)
        if not self._files.store.adopt(self._files.candidates / pointer.folder):
            self._ledger.cancel_version(plan)
            return
        crash_points.reached("publish.stored")
        self._files.store.point_at(pointer)
        crash_points.reached("publish.pointed")
        if plan.kind == "forget":
            self._purge(plan)
        state = State.PUBLISHED if plan.kind == "learn" else State.FORGOTTEN
        self._ledger.finish_version(plan, state, self._metrics(plan))
        crash_points.reached("publish.after")
        log.info(f"published version {plan.version}", extra=event("version.published", version=plan.version))

    def _purge(self, plan: VersionRow) -> None:
        assert plan.task is not None
        task = self._ledger.task(plan.task)
        if task.identity:
            self._files.purge(task.identity)
        crash_points.reached("forget.purged")

    def _metrics(self, plan: VersionRow) -> dict[int, Mapping[str, float]]:
        """What every task of the version reaches now."""
        measured = plan.evaluation.get("tasks", {})
        tasks = [self._ledger.task(number) for number in self.contents(plan.version)]
        return {task.id: measured[task.name] for task in tasks if task.name in measured}

    def contents(self, version: int | None) -> list[int]:
        """The tasks of a version, in order."""
        held: list[int] = []
        for kind, task in self._ledger.lineage(version):
            if task is not None:
                held = [*held, task] if kind == "learn" else [each for each in held if each != task]
        return held

    def _readable(self, row: VersionRow) -> Pointer:
        """A version that can be served: one whose folder was removed or damaged cannot."""
        pointer = Pointer(row.version, row.digest)
        try:
            self._files.store.read(pointer)
        except PoolError as error:
            raise LedgerError(
                f"version {row.version} cannot be read: {error}; `mqmk-daemon doctor --rebuild` fetches what MLflow "
                "has, but set pools.keep to none first"
            ) from error
        return pointer

    def drop_old(self, keep: int, recorded: bool) -> None:
        """Keep the newest so many versions, the current one and, where they are recorded, those that are not yet."""
        self._files.store.sweep()
        current, folders = self._files.store.current(), self._files.store.folders()
        stay = {row.version for row in self._ledger.unrecorded_versions()} if recorded else set()
        stay |= {current.version} if current else set()
        for number in [*folders][:-keep]:
            for folder in folders[number] if number not in stay else []:
                crash_points.reached("drop.before")
                self._files.store.remove(folder)
                crash_points.reached("drop.after")
                log.info(f"removed version {number}", extra=event("version.removed", version=number))

    def move_to(self, number: int) -> str:
        """Point at an earlier or later version; tasks that it does not hold are HELD, those that it holds PUBLISHED."""
        row = self._ledger.version(number)
        if row.step != "PUBLISHED":
            raise LedgerError(f"version {number} is not published yet")
        held = self.contents(number)
        gone = [task.name for task in map(self._ledger.task, held) if task.state is State.FORGOTTEN]
        if gone:
            raise LedgerError(f"version {number} holds {', '.join(gone)}, which was forgotten; choose another version")
        self._files.store.point_at(self._readable(row))
        crash_points.reached("command.pointed")
        for task in self._ledger.tasks(*IN_POOL, State.HELD):
            if task.id in held and task.state is not State.PUBLISHED:
                self._ledger.move(task, State.PUBLISHED, "task.published", {"version": number})
            elif task.id not in held and task.state in IN_POOL:
                reason = f"not in version {number}, chosen by an operator; `mqmk-daemon promote {task.name}` serves it"
                self._ledger.move(task, State.HELD, "task.held", reason=reason, code="rolled-back")
        log.info(f"version {number} is current", extra=event("version.current", version=number))
        return f"version {number} is current, with {len(held)} tasks"
