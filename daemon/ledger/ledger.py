"""The daemon's memory: one row for each task and version, one append-only event for each change (SQLite, WAL).

Every method is one transaction and is on disk when it returns; after a kill it has happened or it has not. The command
line reads the ledger while the daemon writes to it, and adds operator commands.

DISCOVERED -> VALIDATED -> TRAINING -> TRAINED -> PUBLISHED -> SERVING,
and to the side QUARANTINED, CONFLICT, HELD, FORGOTTEN.
"""

from collections.abc import Mapping
from typing import Any, Final, Literal

from mqmk.daemon.errors import LedgerError
from mqmk.daemon.ledger.database import insert, to_sql
from mqmk.daemon.ledger.rows import IN_POOL, LIVE, Command, Event, Health, State, TaskRow, VersionRow
from mqmk.daemon.ledger.versions import MOVING, VersionLedger

__all__ = ["IN_POOL", "LIVE", "Command", "Event", "Health", "Ledger", "State", "TaskRow", "VersionRow"]

_APPLYING: Final = "applying"  # the command that is being applied


class Ledger(VersionLedger):
    """Tasks and versions, and beside them operator commands, training progress and the health of dependencies."""

    # Operator commands

    def enqueue_command(self, kind: str, subject: str) -> Command:
        """Add a command for the daemon."""
        with self._transaction() as db:
            number = insert(db, "commands", {"at": self._clock(), "kind": kind, "subject": subject,
                                             "state": "PENDING"})  # fmt: skip
        return self.command(number)

    def command(self, number: int) -> Command:
        """One command."""
        found = self._rows("SELECT * FROM commands WHERE id = ?", number)
        if not found:
            raise LedgerError(f"there is no command {number}; `mqmk-daemon commands list` shows them")
        return Command(**found[0])

    def commands(self, last: int = 50) -> list[Command]:
        """The latest commands, oldest first."""
        found = self._rows("SELECT * FROM commands ORDER BY id DESC LIMIT ?", last)
        return [Command(**row) for row in reversed(found)]

    def pending_commands(self) -> list[Command]:
        """Commands that are not resolved, oldest first."""
        return [Command(**row) for row in self._rows("SELECT * FROM commands WHERE state = 'PENDING' ORDER BY id")]

    def bind_command(self, command: Command, task: int) -> Command:
        """Decide once which task is meant."""
        with self._transaction() as db:
            db.execute("UPDATE commands SET task = ? WHERE id = ?", (task, command.id))
        return self.command(command.id)

    def claim_command(self, command: Command) -> bool:
        """Start to apply a command: from now on it cannot be cancelled. False if it has been cancelled."""
        sql = "INSERT OR REPLACE INTO key_values SELECT ?, id FROM commands WHERE id = ? AND state = 'PENDING'"
        with self._transaction() as db:
            return db.execute(sql, (_APPLYING, command.id)).rowcount == 1

    def release_command(self) -> None:
        """Undo the claim of a command for which nothing has been changed: it can be cancelled again."""
        with self._transaction() as db:
            db.execute("DELETE FROM key_values WHERE name = ?", (_APPLYING,))

    def resolve_command(self, command: Command, state: Literal["DONE", "REFUSED"], text: str) -> None:
        """Store the outcome of a command."""
        with self._transaction() as db:
            db.execute("DELETE FROM key_values WHERE name = ?", (_APPLYING,))
            db.execute("UPDATE commands SET state = ?, answer = ? WHERE id = ?", (state, text, command.id))
            detail = {"subject": command.subject, "answer": text, "state": state}
            self._append(db, command.task, f"command.{command.kind}", None, detail)

    def cancel_command(self, number: int) -> Command:
        """Cancel a pending command; LedgerError if it is too late."""
        sql = """UPDATE commands SET state = 'CANCELLED', answer = 'cancelled before it was applied'
            WHERE id = ? AND state = 'PENDING' AND NOT EXISTS (SELECT 1 FROM versions WHERE step = 'PLANNED')
            AND NOT EXISTS (SELECT 1 FROM key_values
                WHERE name = ? OR (name = ? AND value = CAST(commands.id AS TEXT)))"""
        with self._transaction() as db:
            if db.execute(sql, (number, MOVING, _APPLYING)).rowcount:
                command = self.command(number)
                self._append(db, command.task, f"command.{command.kind}", None,
                             {"subject": command.subject, "state": "CANCELLED"})  # fmt: skip
                return command
        command = self.command(number)
        what = "is being applied" if command.state == "PENDING" else f"is {command.state}"
        raise LedgerError(f"command {number} ({command.kind} {command.subject}) {what}: too late to cancel it")

    # Training progress

    def set_progress(self, task: TaskRow, detail: Mapping[str, Any]) -> None:
        """Store how far a task's training is."""
        with self._transaction() as db:
            db.execute("INSERT OR REPLACE INTO progress VALUES (?, ?, ?)", (task.id, to_sql(detail), self._clock()))

    def progress(self) -> dict[int, Mapping[str, Any]]:
        """Task number -> how far its training is."""
        return {row["task"]: row["detail"] for row in self._rows("SELECT * FROM progress")}

    # Health

    def set_health(self, dependency: str, up: bool, message: str = "") -> bool:
        """Store whether a dependency works; True if that changed."""
        known = {row.dependency: row for row in self.health()}.get(dependency)
        if known and (known.up, known.message) == (up, message):
            return False
        since = known.since if known and known.up == up else self._clock()
        with self._transaction() as db:
            db.execute("INSERT OR REPLACE INTO health VALUES (?, ?, ?, ?)", (dependency, up, message, since))
        return known is None or known.up != up

    def health(self) -> list[Health]:
        """Every dependency of the daemon."""
        sql = "SELECT dependency, up, message, since FROM health ORDER BY dependency"
        return [Health(**row) for row in self._rows(sql)]
