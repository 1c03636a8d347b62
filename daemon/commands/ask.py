"""`retry`, `rollback`, `promote`, `forget`: written into the ledger here, acted on by the daemon."""

import json
import time
from typing import TYPE_CHECKING

import click

from mqmk.daemon.commands.options import config_options

if TYPE_CHECKING:
    from mqmk.daemon.config_sources import Loaded

REFUSED, STILL_WAITING = 5, 6  # exit codes


def _asks(kind: str, argument: str, help: str) -> click.Command:
    @click.command(kind, help=help)
    @click.argument("subject", metavar=argument)
    @click.option("--wait", type=float, default=60.0, show_default=True, metavar="SECONDS",
                  help="How long to wait for the daemon's answer; 0 only writes it down.")  # fmt: skip
    @click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
    @config_options
    def command(loaded: "Loaded", subject: str, wait: float, as_json: bool) -> None:
        raise SystemExit(_ask(loaded, kind, subject, wait, as_json))

    return command


def _ask(loaded: "Loaded", kind: str, subject: str, wait: float, as_json: bool) -> int:
    from mqmk.daemon.ledger import Ledger
    from mqmk.daemon.lock import holder_of

    ledger = Ledger(loaded.config.ledger_file)
    found = ledger.ask(kind, subject)
    deadline = time.monotonic() + wait
    while found.state == "PENDING" and holder_of(loaded.config.state.dir) and time.monotonic() < deadline:
        time.sleep(0.1)
        found = ledger.command(found.id)
    ledger.close()
    waits = "written down; the daemon acts on it when it runs" if found.state == "PENDING" else ""
    if as_json:
        click.echo(json.dumps({"id": found.id, "state": found.state, "answer": found.answer or waits}))
    else:
        click.echo(found.answer or waits, err=found.state == "REFUSED")
    return {"DONE": 0, "REFUSED": REFUSED, "PENDING": STILL_WAITING if wait else 0}[found.state]


retry = _asks("retry", "TASK", "Try a quarantined, conflicting or waiting task again now.")
rollback = _asks("rollback", "VERSION", "Serve an earlier version; tasks it does not hold are held back.")
promote = _asks("promote", "TASK|VERSION", "Serve a held task whatever the gate said, or point at a version.")
forget = _asks("forget", "TASK", "Publish a version without this task and delete what was kept of its data.")
