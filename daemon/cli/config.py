"""`mqmk-daemon config`: every setting, its value and its source."""

import json
from typing import TYPE_CHECKING, Any, Final

import click

from mqmk.daemon.cli.options import new_state_options
from mqmk.daemon.cli.tables import new_table, print_whole

if TYPE_CHECKING:
    from mqmk.daemon.config.load import Loaded

PLACES: Final = ("bucket_url", "ledger_file", "pools_folder", "held_out_folder", "work_folder", "tracking_uri")
"""Derived from the settings."""


@click.command()
@new_state_options  # it reads only settings
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def config(loaded: "Loaded", as_json: bool) -> None:
    """Print every setting, its value and where the value came from. Passwords in URLs are redacted."""
    if as_json:
        click.echo(json.dumps(_document(loaded), indent=2))
    else:
        _print(loaded)


def _document(loaded: "Loaded") -> dict[str, Any]:
    from mqmk.daemon.config.fields import display, flatten

    values = {
        key: value if value is None or isinstance(value, int | float) else
        [display(one) for one in value] if isinstance(value, tuple) else display(value)
        for key, value in flatten(loaded.config).items()
    }  # fmt: skip
    return {
        "file": str(loaded.file) if loaded.file else None,
        "settings": {key: {"value": value, "from": loaded.origins[key]} for key, value in values.items()},
        "places": {name: display(getattr(loaded.config, name)) for name in PLACES},
    }


def _print(loaded: "Loaded") -> None:
    from rich.text import Text

    from mqmk.daemon.config.fields import display, flatten

    table = new_table("setting", "value", "from", fold=("value", "from"))
    for key, value in flatten(loaded.config).items():
        origin = loaded.origins[key]
        table.add_row(*map(Text, (key, display(value), origin)), style=None if origin == "default" else "bold")
    print_whole(table)
    for name in PLACES:
        click.echo(f"{name.replace('_', ' ')}: {display(getattr(loaded.config, name))}")
