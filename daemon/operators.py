"""What operators ask for: retry, rollback, promote, forget. Rows of the ledger, acted on in order, safe to repeat."""

import logging

from mqmk.daemon import crash_points
from mqmk.daemon.errors import LedgerError
from mqmk.daemon.ledger import IN_POOL, Command, Ledger, State, TaskRow
from mqmk.daemon.logs import event
from mqmk.daemon.publication import Publication
from mqmk.daemon.state_files import StateFiles

log = logging.getLogger(__name__)


class Operators:
    """Acts on commands."""

    def __init__(self, ledger: Ledger, files: StateFiles, publication: Publication) -> None:
        self._ledger, self._files, self._publication = ledger, files, publication
        self._actions = {
            "retry": self._retry,
            "rollback": lambda subject: self._publication.move_to(_number(subject)),
            "promote": self._promote,
            "forget": self._forget,
        }

    def obey(self) -> None:
        """Act on everything that is pending; `forget` of a served task is answered when its version is published."""
        for command in self._ledger.pending():
            crash_points.reached("command.before")
            try:
                answer = self._actions[command.kind](command.subject)
            except LedgerError as error:
                self._answer(command, "REFUSED", str(error))
                continue
            crash_points.reached("command.acted")
            if answer is not None:
                self._answer(command, "DONE", answer)
            crash_points.reached("command.after")

    def _answer(self, command: Command, state: str, text: str) -> None:
        self._ledger.answer(command, state, text)  # type: ignore[arg-type]
        log.info(f"{command.kind} {command.subject}: {text}",
                 extra=event(f"command.{command.kind}", subject=command.subject, state=state))  # fmt: skip

    def to_forget(self) -> TaskRow | None:
        """A served task that is to be forgotten: it takes a new version."""
        for command in self._ledger.pending():
            if command.kind == "forget":
                task = self._one(command.subject)
                if task.state in IN_POOL:
                    return task
        return None

    def _one(self, name: str) -> TaskRow:
        """The task of that name; of several, the one that is in use."""
        found = self._ledger.named(name)
        if not found:
            raise LedgerError(f"there is no task {name}; `mqmk-daemon tasks` lists them")
        aside = (State.CONFLICT, State.FORGOTTEN)
        return next((task for task in found if task.state not in aside), found[-1])

    def _retry(self, name: str) -> str:
        task = self._one(name)
        conflicts = [each for each in self._ledger.named(name) if each.state is State.CONFLICT]
        if task.state not in (State.QUARANTINED, State.CONFLICT, State.FORGOTTEN) and conflicts:
            raise LedgerError(f"task {name} is {task.state}; forget it first, then retry the other one of that name")
        if task.state in (State.QUARANTINED, State.CONFLICT, State.FORGOTTEN):
            self._ledger.overlook(task)
            if task.code == "bad-manifest":  # which says what the task is: it is read first
                return f"TASK.json of {name} is read again"
            if task.identity:
                self._files.clear_work(task.identity)
            self._ledger.move(task, State.DISCOVERED, "task.retried", split=1, report=None)
            return f"{name} is read again"
        if task.attempts:
            self._ledger.mark(task, attempts=0, not_before=0.0)
            return f"{name} is tried again now"
        raise LedgerError(f"task {name} is {task.state}: there is nothing to retry")

    def _promote(self, subject: str) -> str:
        if not self._ledger.named(subject) and subject.isdigit():
            return self._publication.move_to(int(subject))
        task = self._one(subject)
        if task.approved:
            return f"{subject} is published next"
        if task.state is not State.HELD:
            raise LedgerError(f"task {subject} is {task.state}; only a HELD task can be promoted")
        self._ledger.move(task, State.TRAINED, "task.approved", approved=True)
        return f"{subject} is published next, whatever the gate says of its accuracy"

    def _forget(self, name: str) -> str | None:
        task = self._one(name)
        if task.state in IN_POOL:
            return None  # a version without it is built first
        if task.state is not State.FORGOTTEN:
            crash_points.reached("forget.before")
            if task.identity:
                self._files.purge(task.identity)
            self._ledger.move(task, State.FORGOTTEN, "task.forgotten")
        return f"{name} is forgotten; {self.exactness(task)}"

    def exactness(self, task: TaskRow) -> str:
        """Whether the pool is what it would be if the task had never been learned."""
        if self.is_exact(task):
            return "exactly: nothing that is left was made from its data"
        return (
            "not exactly: the g-prompt was trained on it and later prompts began as copies of its own; for an exact "
            "pool learn the other tasks again in a new state directory"
        )

    def is_exact(self, task: TaskRow) -> bool:
        """Only the first task leaves traces, while others that began with it are there."""
        others = [each for each in self._ledger.tasks(*IN_POOL, State.HELD, State.TRAINED) if each.id != task.id]
        return not (task.id in self._ledger.first_tasks() and others)


def _number(subject: str) -> int:
    if not subject.isdigit():
        raise LedgerError(f"expected the number of a version, got {subject!r}; `mqmk-daemon versions` lists them")
    return int(subject)
