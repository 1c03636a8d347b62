"""`mqmk-daemon status`: health, serving state, and tasks that need attention."""

import json
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from mqmk.daemon.cli.options import config_options
from mqmk.daemon.cli.state import open_snapshot
from mqmk.daemon.cli.tables import print_whole
from mqmk.daemon.cli.tasks import task_table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from mqmk.daemon.config.load import Loaded
    from mqmk.daemon.status.snapshot import Snapshot

WAITING = ("QUARANTINED", "CONFLICT", "HELD")


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.option("--watch", is_flag=True, help="Refresh until Ctrl-C.")
@config_options
def status(loaded: "Loaded", as_json: bool, watch: bool) -> None:
    """Show health, serving state and tasks that need attention.

    Exit code 0: running; 3: running, but something is wrong; 4: stopped.
    """
    with open_snapshot(loaded) as snapshot:
        if as_json:
            document = snapshot.status()
            click.echo(json.dumps(document, indent=2))
        elif watch:
            document = _watch(snapshot)
        else:
            document = snapshot.status()
            print_whole(render_status(document))
    raise SystemExit({"running": 0, "degraded": 3, "stopped": 4}[document["state"]])


def _watch(snapshot: "Snapshot") -> dict[str, Any]:
    from rich.live import Live

    document = snapshot.status()
    with Live(render_status(document), refresh_per_second=4) as live:
        try:
            while True:
                time.sleep(0.5)
                document = snapshot.status()
                live.update(render_status(document))
        except KeyboardInterrupt:
            return document


def render_status(document: Mapping[str, Any]) -> "RenderableType":
    """The status for a terminal."""
    from rich.console import Group
    from rich.text import Text

    from mqmk.daemon.status.summary import summary_line

    serving, matching = document["serving"], summary_line(document["matching"])
    lines = [
        f"{document['state']}   version {document['pool_version'] or 'none yet'}   {_replicas(serving['replicas'])}"
    ]
    lines += [f"serving at {serving['url']}"] if serving["url"] else []
    lines += [f"bucket {document['bucket']}"]
    lines += [matching] if matching else []
    lines += [_replica_problem(each) for each in serving["replicas"] if each["last_failure"]]
    lines += [f"{each['dependency']} unavailable: {each['message']}" for each in document["health"] if not each["up"]]
    lines += [f"queued: {each['kind']} {each['subject']}" for each in document["commands"]]
    aside = ", ".join(each["name"] for each in document["tasks"] if each["state"] in WAITING)
    lines += [f"needs attention: {aside}; `mqmk-daemon show TASK` shows what to do"] if aside else []
    return Group(*(Text(line) for line in lines), task_table(document["tasks"], document["progress"]))


def _replicas(replicas: Sequence[Mapping[str, Any]]) -> str:
    """How many replicas there are, and which versions they serve."""
    from mqmk.daemon.words import plural

    versions = dict.fromkeys(str(each["pool_version"]) for each in replicas if each["pool_version"] is not None)
    return plural(len(replicas), "replica") + (f" with version {', '.join(versions)}" if versions else "")


def _replica_problem(replica: Mapping[str, Any]) -> str:
    """Why a replica does not serve the current version."""
    version = f"keeps serving version {replica['pool_version']}"
    doing = version if replica["ready"] else "is not ready"
    return f"replica {replica['id']} {doing}: {replica['last_failure']}"
