"""Operator commands: retry, rollback, promote, forget. Rows of the ledger, applied in order, safe to repeat."""

import logging
import sqlite3
from collections.abc import Callable
from typing import Final

from mqmk.daemon import failpoints
from mqmk.daemon.errors import LedgerError
from mqmk.daemon.ledger.ledger import Command, Ledger, State, TaskRow
from mqmk.daemon.logs import event
from mqmk.daemon.pipeline.publisher import Publisher
from mqmk.daemon.pipeline.retry import is_infrastructure_error
from mqmk.daemon.state_dir import StateDir

log = logging.getLogger(__name__)
ASIDE: Final = (State.QUARANTINED, State.CONFLICT, State.FORGOTTEN)
"""A task in one of these states does not own its name, its classes and its content."""
MAX_VERSION: Final = 2**63 - 1  # SQLite's largest integer


class OperatorCommands:
    """Applies commands."""

    def __init__(self, ledger: Ledger, files: StateDir, publisher: Publisher) -> None:
        self._ledger, self._files, self._publisher = ledger, files, publisher
        self._actions: dict[str, Callable[[Command], str | None]] = {
            "retry": self._retry,
            "rollback": lambda command: self._publisher.move_to(parse_version(command.subject)),
            "promote": self._promote,
            "forget": self._forget,
        }

    def apply_pending(self) -> None:
        """Apply every pending command; `forget` of a served task is resolved by the version without it."""
        for command in self._ledger.pending_commands():
            failpoints.hit("command.before")
            if self._must_wait(command) or not self._ledger.claim_command(command):
                continue
            try:
                answer = self._run_action(command)
            except Exception as error:  # one command must not end the daemon, now and at every start
                self._handle_failure(command, error)
                continue
            failpoints.hit("command.acted")
            if answer is None:
                self._ledger.release_command()
            else:
                self._resolve(command, "DONE", answer)
            failpoints.hit("command.after")

    def _handle_failure(self, command: Command, error: Exception) -> None:
        """Refuse the command, unless the machine is at fault: then it stays queued and is retried."""
        if isinstance(error, sqlite3.OperationalError) or self._ledger.moving_to() is not None:
            raise error  # the ledger cannot be written, or the next pass finishes what was announced
        if is_infrastructure_error(error):
            self._ledger.release_command()
            log.warning(f"{command.kind} {command.subject} waits: {error}", extra=event("command.delayed"))
            return
        reason = str(error)
        if not isinstance(error, LedgerError):
            log.error(f"{command.kind} {command.subject} failed", exc_info=error, extra=event("command.failed"))
            reason = f"it failed: {type(error).__name__}: {error}"
        self._resolve(command, "REFUSED", reason)

    def _must_wait(self, command: Command) -> bool:
        """Whether a version without the task has to be built and published first."""
        return command.kind == "forget" and command.task in self._publisher.current_tasks()

    def claim_forget(self, task: TaskRow) -> bool:
        """Claim the commands to forget a task, before the version without it is published; False if there is none."""
        if task.state is State.FORGOTTEN:
            return True
        wanted = [each for each in self._ledger.pending_commands() if each.kind == "forget" and each.task == task.id]
        return any(self._ledger.claim_command(command) for command in wanted)

    def _run_action(self, command: Command) -> str | None:
        if command.kind not in self._actions:
            raise LedgerError(f"there is no command {command.kind!r}; this daemon supports {', '.join(self._actions)}")
        return self._actions[command.kind](command)

    def _resolve(self, command: Command, state: str, text: str) -> None:
        self._ledger.resolve_command(self._ledger.command(command.id), state, text)  # type: ignore[arg-type]
        log.info(f"{command.kind} {command.subject}: {text}",
                 extra=event(f"command.{command.kind}", subject=command.subject, state=state))  # fmt: skip

    def tasks_to_forget(self) -> list[TaskRow]:
        """Tasks of the current version that are to be forgotten: each takes a new version."""
        wanted = {command.task for command in self._ledger.pending_commands() if command.kind == "forget"}
        left = [number for number in self._publisher.forgotten_tasks()
                if self._ledger.task(number).state is State.FORGOTTEN]  # fmt: skip
        wanted |= {*left}
        if not wanted:
            return []
        return [self._ledger.task(number) for number in self._publisher.current_tasks() if number in wanted]

    def _find(self, command: Command) -> TaskRow:
        """The task a command applies to, decided once; of several with that name, the one that owns it."""
        if command.task is not None:
            return self._ledger.task(command.task)
        found = self._ledger.tasks_named(command.subject)
        if not found:
            raise LedgerError(f"there is no task {command.subject}; `mqmk-daemon tasks` lists them")
        rank = {State.QUARANTINED: 1, State.CONFLICT: 1, State.FORGOTTEN: 2}
        task = min(reversed(found), key=lambda task: rank.get(task.state, 0))
        self._ledger.bind_command(command, task.id)
        return task

    def _retry(self, command: Command) -> str:
        task, name = self._find(command), command.subject
        others = [each for each in self._ledger.tasks_named(name) if each.id != task.id]
        if task.state not in ASIDE and any(each.state is State.CONFLICT for each in others):
            raise LedgerError(f"task {name} is {task.state}; forget it first, then retry the other one of that name")
        if task.state in ASIDE and any(each.state not in ASIDE for each in others):
            raise LedgerError(f"another task {name} is in use; forget it first")
        if task.state in ASIDE:
            return self._reopen(task)
        if task.failures:
            self._ledger.update_task(task, failures=0, not_before=0.0)
            return f"{name} is retried now"
        raise LedgerError(f"task {name} is {task.state}: there is nothing to retry")

    def _reopen(self, task: TaskRow) -> str:
        self._ledger.forget_fingerprint(task)
        if task.code == "bad-manifest":  # without it nothing else about the task is known
            return f"TASK.json of {task.name} is read again"
        if task.identity:
            self._files.clear_work(task.identity)
        self._ledger.transition(task.id, task.state, State.DISCOVERED, task.attempt, "task.retried", split=1, stale=0,
                                report=None, base=None)  # fmt: skip
        return f"{task.name} is read again"

    def _promote(self, command: Command) -> str:
        subject = command.subject
        if not self._ledger.tasks_named(subject) and subject.isdecimal():
            return self._publisher.move_to(parse_version(subject))
        task = self._find(command)
        if task.approved and task.state is not State.HELD:
            return f"{subject} is published next"
        if task.state is not State.HELD:
            raise LedgerError(f"task {subject} is {task.state}; only a HELD task can be promoted")
        if task.name in self._publisher.current_names():
            raise LedgerError(f"another task {subject} is served; forget it first")
        trained = bool(task.identity and self._files.trained_folder(task.identity))
        self._ledger.transition(task.id, task.state, State.TRAINED if trained else State.VALIDATED, task.attempt,
                                "task.approved", approved=True)  # fmt: skip
        return f"{subject} is {'published' if trained else 'learned again'} next, whatever its accuracy"

    def _forget(self, command: Command) -> str | None:
        task = self._find(command)
        if task.id in self._publisher.current_tasks():
            return None  # a version without it is built first
        if task.state is not State.FORGOTTEN:
            return self._publisher.forget(task)
        answers = [each.detail.get("answer") for each in self._ledger.events(task) if each.event == "task.forgotten"]
        return str(answers[-1] if answers and answers[-1] else f"{task.name} is forgotten")


def parse_version(subject: str) -> int:
    """A version number as typed by an operator."""
    if not (subject.isascii() and subject.isdecimal() and len(subject) < 20 and 0 < int(subject) <= MAX_VERSION):
        raise LedgerError(f"expected the number of a version, got {subject!r}; `mqmk-daemon versions` lists them")
    return int(subject)
