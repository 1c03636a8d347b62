"""`retry`, `rollback`, `promote`, `forget`: queued in the ledger here, applied by the daemon. `commands` lists them."""

import json
import time
from typing import TYPE_CHECKING

import click

from mqmk.daemon.cli.options import TaskName, config_options
from mqmk.daemon.cli.state import open_ledger

if TYPE_CHECKING:
    from mqmk.daemon.config.load import Loaded
    from mqmk.daemon.ledger.ledger import Command, Ledger

REFUSED, STILL_WAITING = 5, 6  # exit codes
MAX_ID = 2**63 - 1  # SQLite's largest integer


def _operator_command(kind: str, argument: str, help: str) -> click.Command:
    @click.command(kind, help=help)
    @click.argument("subject", type=TaskName(), metavar=argument)
    @click.option("--wait", type=float, default=60.0, show_default=True, metavar="SECONDS",
                  help="How long to wait for the result; 0 queues the command and returns immediately.")  # fmt: skip
    @click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
    @config_options
    def command(loaded: "Loaded", subject: str, wait: float, as_json: bool) -> None:
        raise SystemExit(_apply(loaded, kind, subject, wait, as_json))

    return command


def _apply(loaded: "Loaded", kind: str, subject: str, wait: float, as_json: bool) -> int:
    from mqmk.daemon.host.lock import lock_owner

    with open_ledger(loaded) as ledger:
        _check(ledger, kind, subject)
        found = ledger.enqueue_command(kind, subject)
        running, deadline = lock_owner(loaded.config.state.dir), time.monotonic() + wait
        while found.state == "PENDING" and running and time.monotonic() < deadline:
            time.sleep(0.1)
            found, running = ledger.command(found.id), lock_owner(loaded.config.state.dir)
    text = found.answer or (_describe_pending(found, bool(running)) if found.state == "PENDING" else "")
    if as_json:
        click.echo(json.dumps({"id": found.id, "state": found.state, "answer": text}))
    else:
        click.echo(text, err=found.state == "REFUSED")
    return {"DONE": 0, "REFUSED": REFUSED, "CANCELLED": REFUSED, "PENDING": STILL_WAITING if wait else 0}[found.state]


def _describe_pending(command: "Command", running: bool) -> str:
    cancel = f"`mqmk-daemon commands cancel {command.id}` cancels it"
    when = "The daemon has not applied it yet" if running else "It runs when the daemon starts"
    return f"Queued as command {command.id}. {when}; {cancel}."


def _check(ledger: "Ledger", kind: str, subject: str) -> None:
    """LedgerError for a command that no daemon could ever apply; it is not queued."""
    from mqmk.daemon.pipeline.operator_commands import parse_version

    if kind == "rollback" or (kind == "promote" and not ledger.tasks_named(subject) and subject.isdecimal()):
        ledger.version(parse_version(subject))
    elif not ledger.tasks_named(subject):
        from mqmk.daemon.errors import LedgerError

        raise LedgerError(f"there is no task {subject}; `mqmk-daemon tasks` lists them")


retry = _operator_command("retry", "TASK", "Retry a task now: quarantined, in conflict, or waiting for a retry.")
rollback = _operator_command(
    "rollback", "VERSION", "Serve an earlier version. Tasks that it does not contain become HELD."
)
promote = _operator_command(
    "promote", "TASK|VERSION", "Serve a held task regardless of its accuracy, or switch to a version."
)
forget = _operator_command("forget", "TASK", "Publish a version without this task and delete its data.")


@click.group()
def commands() -> None:
    """List operator commands, or cancel a queued one."""


@commands.command("list")
@click.option("--all", "everything", is_flag=True, help="Include recently completed commands.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@config_options
def list_commands(loaded: "Loaded", everything: bool, as_json: bool) -> None:
    """List queued commands, oldest first."""
    from mqmk.daemon.words import time_text

    with open_ledger(loaded) as ledger:
        found = ledger.commands() if everything else ledger.pending_commands()
    rows = [{"id": each.id, "at": time_text(each.at), "command": f"{each.kind} {each.subject}", "state": each.state,
             "answer": each.answer} for each in found]  # fmt: skip
    if as_json:
        click.echo(json.dumps(rows, indent=2))
    elif not rows:
        click.echo("No commands are queued.")
    for row in rows if not as_json else []:
        click.echo("  ".join(str(value) for value in row.values() if value is not None))


@commands.command("cancel")
@click.argument("number", type=click.IntRange(1, MAX_ID), metavar="ID")
@config_options
def cancel_command(loaded: "Loaded", number: int) -> None:
    """Cancel a queued command; fails once it has been applied."""
    with open_ledger(loaded) as ledger:
        command = ledger.cancel_command(number)
    click.echo(f"Cancelled command {number}: {command.kind} {command.subject}.")
