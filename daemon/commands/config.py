"""`mqmk-daemon config`: every setting, its value, and where the value came from."""

import json
from typing import TYPE_CHECKING, Any, Final

import click

from mqmk.daemon.commands.options import config_options

if TYPE_CHECKING:
    from mqmk.daemon.config_sources import Loaded

PLACES: Final = ("bucket_url", "ledger_file", "pools_folder", "held_out_folder", "work_folder", "tracking_uri")
"""What follows from the settings."""


@click.command()
@config_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def config(loaded: "Loaded", as_json: bool) -> None:
    """Print every setting, its value, and where the value came from. Passwords in URLs are hidden."""
    if as_json:
        click.echo(json.dumps(_document(loaded), indent=2))
    else:
        _print(loaded)


def _document(loaded: "Loaded") -> dict[str, Any]:
    from mqmk.daemon.config_keys import flat, shown

    values = {
        key: value if value is None or isinstance(value, int | float) else
        [shown(one) for one in value] if isinstance(value, tuple) else shown(value)
        for key, value in flat(loaded.config).items()
    }  # fmt: skip
    return {
        "file": str(loaded.file) if loaded.file else None,
        "settings": {key: {"value": value, "from": loaded.origins[key]} for key, value in values.items()},
        "places": {name: shown(getattr(loaded.config, name)) for name in PLACES},
    }


def _print(loaded: "Loaded") -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from mqmk.daemon.config_keys import flat, shown

    table = Table("setting", "value", "from")
    for key, value in flat(loaded.config).items():
        origin = loaded.origins[key]
        cells = Text(key, no_wrap=True), Text(shown(value), overflow="fold"), Text(origin, overflow="fold")
        table.add_row(*cells, style=None if origin == "default" else "bold")
    console = Console()
    console.print(table)
    for name in PLACES:
        console.print(Text(f"{name.replace('_', ' ')}: {shown(getattr(loaded.config, name))}"), soft_wrap=True)
