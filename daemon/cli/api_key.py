"""`mqmk-daemon api-key`: create, list and revoke API keys."""

import functools
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mqmk.daemon.cli.options import config_options

if TYPE_CHECKING:
    from mqmk.daemon.config.load import Loaded


@click.group("api-key")
def api_key() -> None:
    """Create, list and revoke API keys. Running replicas pick up changes within seconds."""


def _key_file(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the options, and passes the command `file` (the path of `serve.api_keys`) and `as_json`."""

    @config_options
    @click.option("--file", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
                  help="File with the hashes of the keys. [default: serve.api_keys]")  # fmt: skip
    @click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
    @functools.wraps(command)
    def with_file(*arguments: Any, loaded: "Loaded", file: Path | None, **options: Any) -> None:
        from mqmk.daemon.errors import ConfigError

        file = file or loaded.config.serve.api_keys
        if file is None:
            raise ConfigError("serve.api_keys is not set; set it to a file, or pass --file FILE")
        command(*arguments, file=file, **options)

    return with_file


@api_key.command()
@click.argument("name")
@_key_file
def new(name: str, file: Path, as_json: bool) -> None:
    """Create a key for the client NAME and print it once: the file keeps only its hash."""
    from mqmk.deploy.serving.api_key_file import add_key

    key = add_key(file, name)
    if as_json:
        click.echo(json.dumps({"name": name, "key": key, "file": str(file)}))
        return
    click.echo(key)
    click.echo(f"The API key of {name}. It is not shown again; {file} keeps only its hash.", err=True)


@api_key.command("list")
@_key_file
def list_(file: Path, as_json: bool) -> None:
    """List every key: name, creation date and the start of its hash."""
    from mqmk.deploy.serving.api_key_file import list_keys

    entries = list_keys(file)
    if as_json:
        click.echo(json.dumps({"file": str(file), "keys": [asdict(entry) for entry in entries]}, indent=2))
        return
    width = max(4, *(len(entry.name) for entry in entries))
    click.echo(f"{'NAME':{width}}  CREATED     SHA256")
    for entry in entries:
        click.echo(f"{entry.name:{width}}  {entry.created:10}  {entry.hash[:12]}")


@api_key.command()
@click.argument("key", metavar="NAME|HASH")
@_key_file
def revoke(key: str, file: Path, as_json: bool) -> None:
    """Revoke a key, given by its name or by at least 8 digits of its hash."""
    from mqmk.deploy.serving.api_key_file import revoke_key

    revoked = revoke_key(file, key)
    if as_json:
        click.echo(json.dumps({"revoked": asdict(revoked), "file": str(file)}))
    else:
        click.echo(f"Revoked {revoked.name} ({revoked.hash[:12]}). Running replicas reject it within seconds.")
