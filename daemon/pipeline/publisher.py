"""How a pool version becomes the current one, exactly once: announce, store, point at, record.

The ledger announces a version before its files are moved into the store, so a daemon that is killed anywhere in between
finds the announcement and finishes the same version; no number is skipped and none is used twice.
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from mqmk.daemon import failpoints
from mqmk.daemon.errors import LedgerError
from mqmk.daemon.jobs import Built
from mqmk.daemon.ledger.ledger import IN_POOL, Ledger, State, TaskRow, VersionRow
from mqmk.daemon.logs import event
from mqmk.daemon.state_dir import StateDir
from mqmk.daemon.words import command, plural
from mqmk.matcher.errors import PoolError
from mqmk.matcher.pointer import Pointer

log = logging.getLogger(__name__)


class Publisher:
    """The steps of publishing, rolling back and promoting; each is idempotent."""

    def __init__(self, ledger: Ledger, files: StateDir) -> None:
        self._ledger, self._files = ledger, files
        self.has_garbage = True
        """Whether some layer may be in no version: a killed daemon left it, or a version was removed."""
        self._current: Pointer | None = None
        self._contents: list[int] = []
        self._forgotten: frozenset[int] = frozenset()

    def publish(self, built: Built, kind: str, tasks: Sequence[TaskRow]) -> None:
        """Make a candidate, which adds these tasks or leaves one out, the current version."""
        assert built.candidate is not None
        version, digest = built.candidate.version, built.candidate.digest
        failpoints.hit("publish.before")
        plan = self._ledger.plan_version(version, digest, built.parent, kind, tasks, built.evaluation)
        failpoints.hit("publish.planned")
        self._finish(plan)

    def finish_announced(self) -> None:
        """After a kill: finish what was announced; cancel a version whose files are gone."""
        for plan in self._ledger.unfinished_versions():
            self._finish(plan)
        if (number := self._ledger.moving_to()) is not None:
            self._move(self._ledger.version(number))

    def reconcile(self) -> None:
        """At start-up: make rows agree with what CURRENT contains, whatever an older release or an operator did."""
        self._ledger.withdraw_forgotten()
        current = self._files.store.current()
        if current and self._ledger.has_version(current.version):
            self._ledger.finish_move(current.version, self._plan_moves(current.version))

    def _finish(self, plan: VersionRow) -> None:
        pointer = Pointer(plan.version, plan.digest)
        if not self._files.store.adopt(self._files.candidates / pointer.card):
            self._ledger.cancel_version(plan)
            return
        failpoints.hit("publish.stored")
        self._files.store.point_at(pointer)
        failpoints.hit("publish.pointed")
        if plan.kind == "forget":
            self._finish_forgetting(plan)
        else:
            self._ledger.finish_version(plan, self._metrics(plan))
        failpoints.hit("publish.after")
        log.info(f"published version {plan.version}", extra=event("version.published", version=plan.version))

    def _finish_forgetting(self, plan: VersionRow) -> None:
        (gone,) = plan.tasks
        task = self._ledger.task(gone.task)
        if task.identity:
            self._files.purge(task.identity)
            self.has_garbage = True
        failpoints.hit("forget.purged")
        exact = self._ledger.is_exact_without(task)
        self._ledger.finish_version(plan, self._metrics(plan), exact=exact, answer=forget_answer(task, exact))

    def forget(self, task: TaskRow) -> str:
        """Forget a task that the current version does not contain."""
        failpoints.hit("forget.before")
        if task.identity:
            self._files.purge(task.identity)
            self.has_garbage = True  # the layer of a candidate that was held
        exact = self._ledger.is_exact_without(task)
        answer = forget_answer(task, exact)
        detail = {"exact": exact, "answer": answer}
        self._ledger.transition(task.id, task.state, State.FORGOTTEN, task.attempt, "task.forgotten", detail,
                                version=None, approved=False, erased=[])  # fmt: skip
        return answer

    def _metrics(self, plan: VersionRow) -> dict[int, Mapping[str, float]]:
        """The figures of every task in this version."""
        measured = plan.evaluation.get("tasks", {})
        names = self._ledger.names(self.tasks_in(plan.version))
        return {number: measured[name] for number, name in names.items() if name in measured}

    def tasks_in(self, version: int | None) -> list[int]:
        """The tasks of a version, in order."""
        return [*self._ledger.tasks_in_version(version)]

    def current_tasks(self) -> list[int]:
        """The tasks of the version that CURRENT names."""
        self._follow_current()
        return self._contents

    def current_names(self) -> set[str]:
        """The names of these tasks."""
        return {*self._ledger.names(self.current_tasks()).values()}

    def forgotten_tasks(self) -> frozenset[int]:
        """Those of these tasks that were FORGOTTEN when CURRENT moved: release 0.1 could mark a served task so."""
        self._follow_current()
        return self._forgotten

    def _follow_current(self) -> None:
        """A version always contains the same tasks, so they are read once, and not in every pass."""
        current = self._files.store.current()
        if current != self._current:
            self._contents = self.tasks_in(current.version) if current else []
            self._forgotten = frozenset(task.id for task in self._ledger.tasks(State.FORGOTTEN)) & {*self._contents}
            self._current = current

    def _require_readable(self, row: VersionRow) -> None:
        """LedgerError if the version cannot be served because its files were removed or damaged."""
        try:
            self._files.store.check(Pointer(row.version, row.digest))
        except PoolError as error:
            raise LedgerError(
                f"version {row.version} cannot be read: {error}; `mqmk-daemon doctor --rebuild` fetches what MLflow "
                "has, but set pools.keep to none first"
            ) from error

    def drop_old(self, keep: int, recorded: bool) -> None:
        """Keep the newest `keep` versions, the current one and, with a registry, those that are not recorded yet."""
        current, cards = self._files.store.current(), self._files.store.paths()
        stay = {row.version for row in self._ledger.unrecorded_versions()} if recorded else set()
        stay |= {current.version} if current else set()
        old = [number for number in [*cards][:-keep] if number not in stay]
        if old:
            self._ledger.summarize_evaluations(old)
        self._drop(old, cards)

    def drop_evaluations(self) -> None:
        """Remove the artifacts of evaluations whose version is not in the store."""
        cards = [path for paths in self._files.store.paths().values() for path in paths]
        self._files.prune_evaluations({path.stem.split("-")[-1] for path in cards})

    def drop_withdrawn(self) -> None:
        """Remove versions that contain a forgotten task: they may never be served again."""
        withdrawn = self._ledger.withdrawn_versions()
        if withdrawn:
            current, cards = self._files.store.current(), self._files.store.paths()
            served = current.version if current else None
            self._drop([number for number in withdrawn if number in cards and number != served], cards)

    def _drop(self, numbers: list[int], cards: Mapping[int, list[Path]]) -> None:
        for number in numbers:
            for card in cards[number]:
                failpoints.hit("drop.before")
                self._files.store.remove(card)
                failpoints.hit("drop.after")
            log.info(f"removed version {number}", extra=event("version.removed", version=number))
        self.has_garbage |= bool(numbers)

    def collect_garbage(self) -> None:
        """Delete layers that no version needs any more. Not while a build is writing layers that no card names yet."""
        if self.has_garbage:
            failpoints.hit("collect.before")
            removed = self._files.store.collect(self._files.candidate_cards())
            failpoints.hit("collect.after")
            self.has_garbage = removed is None  # a card could not be read: try again
            if removed:
                log.info(f"removed {plural(len(removed), 'layer')}", extra=event("layers.removed", count=len(removed)))

    def move_to(self, number: int) -> str:
        """Move CURRENT to another version; tasks that it does not contain become HELD, the others PUBLISHED."""
        row = self._ledger.version(number)
        if row.step != "PUBLISHED":
            raise LedgerError(f"version {number} is not published yet")
        if row.withdrawn is not None:
            gone = self._ledger.task(row.withdrawn).name
            raise LedgerError(f"version {number} contains {gone}, which was forgotten; choose another version")
        self._require_readable(row)
        self._ledger.begin_move(number)
        self._move(row)
        return f"version {number} is current, with {plural(len(self.tasks_in(number)), 'task')}"

    def _move(self, row: VersionRow) -> None:
        """CURRENT first, then every affected task, whatever its state; repeated after a kill."""
        self._files.store.point_at(Pointer(row.version, row.digest))
        failpoints.hit("command.pointed")
        self._ledger.finish_move(row.version, self._plan_moves(row.version))
        log.info(f"version {row.version} is current", extra=event("version.activated", version=row.version))

    def _plan_moves(self, number: int) -> dict[int, tuple[State, str | None]]:
        contained = self._ledger.names(self.tasks_in(number))
        names = {*contained.values()}
        moves: dict[int, tuple[State, str | None]] = {}
        for task in self._ledger.tasks():
            if task.id in contained:
                stays = task.state in (*IN_POOL, State.FORGOTTEN)  # the latter leaves with the next version
                moves |= {} if stays else {task.id: (State.PUBLISHED, None)}
            elif task.state in IN_POOL:
                reason = f"not in version {number}, chosen by an operator; {command('promote', task.name)} serves it"
                moves[task.id] = (State.HELD, reason)
            elif task.name in names and task.state is State.DISCOVERED:
                moves[task.id] = (State.CONFLICT, f"version {number} contains another task {task.name}")
        return moves


def forget_answer(task: TaskRow, exact: bool) -> str:
    """The answer to `forget`."""
    if exact:
        return f"{task.name} is forgotten; exactly: nothing that is left was made from its data"
    return (
        f"{task.name} is forgotten; not exactly: the g-prompt or other tasks' prompts were initialised from prompts "
        "trained on it; for an exact pool learn the other tasks again in a new state directory"
    )
