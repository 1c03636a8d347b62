"""`mqmk-daemon export`: one pool version as a self-contained folder, for `mqmk.load` and `predict --local`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mqmk.daemon.cli.options import config_options

if TYPE_CHECKING:
    from mqmk.daemon.config.load import Loaded


@click.command()
@click.argument("version")
@click.argument("destination", type=click.Path(path_type=Path))
@config_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def export(loaded: "Loaded", version: str, destination: Path, as_json: bool) -> None:
    """Write VERSION (a number, or `current`) to a new folder, DESTINATION: all layers in one file, and a card.

    The daemon may be running. The folder is self-contained: `mqmk.load(DESTINATION)` and `mqmk-daemon predict --local
    DESTINATION` read it.
    """
    from mqmk.daemon.errors import DaemonError
    from mqmk.matcher.durable import write_folder
    from mqmk.matcher.pool_files import CARD, TENSORS, encode
    from mqmk.matcher.pool_store import PoolStore

    store = PoolStore(loaded.config.pools_folder)
    current = store.current()
    if version == "current" and current is None:
        raise DaemonError("nothing has been learned yet: there is no current version")
    number = current.version if version == "current" and current else int(version) if version.isdecimal() else 0
    cards = store.cards(number)
    if not cards:
        raise DaemonError(f"there is no version {version} in the store; `mqmk-daemon versions` lists them")
    if destination.exists():
        raise DaemonError(f"{destination} exists already; name a new folder")
    identity, files = encode(store.assemble(cards[0]), number, cards[0].identity.parent)
    write_folder(destination, {TENSORS: files.tensors, CARD: files.card})
    tasks, size = len(cards[0].tasks), len(files.tensors) + len(files.card)
    if as_json:
        click.echo(json.dumps({"version": number, "digest": identity.digest, "tasks": tasks, "bytes": size}))
        return
    click.echo(f"{destination}: version {number}, {tasks} tasks, {size / 1e6:.1f} MB")
