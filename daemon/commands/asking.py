"""What `predict` and `evaluate` share: whom to ask, how, and a bar on the terminal while it takes."""

import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import click

from mqmk.daemon.commands.options import config_options
from mqmk.daemon.config import MatcherName

if TYPE_CHECKING:
    from mqmk.daemon.config_sources import Loaded
    from mqmk.daemon.told import Oracle, Told, Wishes

Result = TypeVar("Result")
MATCHERS = ("auto", *get_args(MatcherName))


def asking_options(command: Callable[..., Result]) -> Callable[..., Result]:
    """Adds the options, and hands the command the keyword `asked`: a function from Wishes to a told.Oracle."""

    @click.option("--url", metavar="URL", help="The service to ask.  [default: that of the state directory]")
    @click.option("--local", type=click.Path(exists=True, file_okay=False, path_type=Path), metavar="FOLDER",
                  help="Ask a pool on disk: a version's folder, or a `pools` folder for the current one.")  # fmt: skip
    @click.option("--matcher", type=click.Choice(MATCHERS), help="How the task is found.  [default: as configured]")
    @config_options
    @functools.wraps(command)
    def with_oracle(*arguments: Any, loaded: "Loaded", url: str | None, local: Path | None, **options: Any) -> Result:
        if url and local:
            raise click.UsageError("--url asks a service and --local a folder; expected one of them")
        return command(*arguments, asked=functools.partial(_oracle, loaded, url, local), **options)

    return with_oracle


def _oracle(loaded: "Loaded", url: str | None, local: Path | None, wishes: "Wishes") -> "Oracle":
    from mqmk.daemon.config_sources import DEFAULT, KEY_VARIABLE

    if local:
        from mqmk.daemon.stored_pool import open_pool

        return open_pool(local, loaded.config, wishes, own_backbone=loaded.origins["backbone.name"] == DEFAULT)
    from mqmk.daemon.overview import service_url
    from mqmk.daemon.served_pool import ServedPool

    return ServedPool(url or service_url(loaded.config), os.environ.get(KEY_VARIABLE), wishes)


def all_told(oracle: "Oracle", files: "Sequence[Path]") -> "list[Told]":
    """Ask about every file; several make a bar on the terminal."""
    from rich.console import Console
    from rich.progress import Progress

    told, console = [], Console(stderr=True)
    with Progress(console=console, transient=True, disable=len(files) < 2 or not console.is_terminal) as bar:
        line = bar.add_task("asking", total=len(files))
        for each in oracle.answers(files):
            told.append(each)
            bar.advance(line)
    return told


def list_errors(told: "Sequence[Told]") -> None:
    """Why pictures got no answer, a line each."""
    for each in told:
        if each.error is not None:
            click.echo(f"{each.file}: {each.error}", err=True)
