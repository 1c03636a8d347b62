"""`mqmk-daemon backup`: a copy of the state directory that can be started from, made while the daemon works."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mqmk.daemon.commands.options import config_options

if TYPE_CHECKING:
    from mqmk.daemon.config_sources import Loaded


@click.command()
@click.argument("destination", type=click.Path(path_type=Path))
@config_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def backup(loaded: "Loaded", destination: Path, as_json: bool) -> None:
    """Copy ledger, pools, unfinished work and MLflow's own files to a new folder, DESTINATION.

    The daemon may run. The copy is a state directory: `mqmk-daemon start --state DESTINATION` goes on from there. The
    bucket is not in it, and neither are the records of an MLflow server.
    """
    from mqmk.daemon.backup import back_up

    done = back_up(loaded.config, destination)
    if as_json:
        click.echo(json.dumps(asdict(done), indent=2))
        return
    click.echo(f"{destination}: {len(done.versions)} versions, {done.tasks} tasks, {done.bytes / 1e6:.1f} MB")
    click.echo(f"current version: {done.current}")
    if done.missing:
        click.echo(f"not in the store any more, and not in the backup: {', '.join(map(str, done.missing))}")
