"""`mqmk-daemon versions`: every pool version, what made it and how good it is."""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from mqmk.daemon.cli.options import config_options
from mqmk.daemon.cli.state import open_snapshot
from mqmk.daemon.cli.tables import figure_cells, new_table, print_whole
from mqmk.daemon.words import summarize

if TYPE_CHECKING:
    from mqmk.daemon.config.load import Loaded


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@config_options
def versions(loaded: "Loaded", as_json: bool) -> None:
    """List pool versions: what made each one and how good it is."""
    with open_snapshot(loaded) as snapshot:
        rows = snapshot.versions()
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    from rich.text import Text

    numbers = ("matched", "accuracy", "images")
    table = new_table("version", "made by", *numbers, "MLflow", "created", fold=("made by", "created"), right=numbers)
    for row in rows:
        table.add_row(
            f"{'→' if row['current'] else ' '} {row['version']}", Text(_describe_origin(row)), *figure_cells(row),
            _describe_record(row, loaded.config.mlflow.enabled), row["created_at"].replace("T", " "),
        )  # fmt: skip
    print_whole(table)


def _describe_origin(row: Mapping[str, Any]) -> str:
    exact = {None: "", True: ", exactly", False: ", not exactly"}[row["exact"]]
    return f"{row['kind']} {summarize(row['tasks'])}{exact}"


def _describe_record(row: Mapping[str, Any], enabled: bool) -> str:
    """Whether a version is recorded in MLflow, and whether its files are still in the pool store."""
    if not row["stored"]:
        return "recorded only" if row["recorded"] else "gone"
    return ("recorded" if row["recorded"] else "waiting") if enabled else "off"
