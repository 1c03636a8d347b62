"""`mqmk-daemon backup`: an online backup of the state directory."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mqmk.daemon.cli.options import config_options

if TYPE_CHECKING:
    from mqmk.daemon.config.load import Loaded


@click.command()
@click.argument("destination", type=click.Path(path_type=Path))
@config_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def backup(loaded: "Loaded", destination: Path, as_json: bool) -> None:
    """Back up ledger, pools, unfinished work and MLflow's local files to a new folder, DESTINATION.

    The daemon may be running. The backup is itself a state directory: `mqmk-daemon start --state DESTINATION` continues
    from it. It contains neither the bucket nor the records of an MLflow server.
    """
    from mqmk.daemon.host.backup import back_up
    from mqmk.daemon.words import plural

    done = back_up(loaded.config, destination)
    if as_json:
        click.echo(json.dumps(asdict(done), indent=2))
        return
    contents = f"{plural(len(done.versions), 'version')}, {plural(done.tasks, 'task')}"
    click.echo(f"{destination}: {contents}, {done.bytes / 1e6:.1f} MB")
    click.echo(f"current version: {done.current}")
    if done.missing:
        click.echo(
            f"versions whose files were already deleted, so not in the backup: {', '.join(map(str, done.missing))}"
        )
