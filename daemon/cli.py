"""The command line: `mqmk-daemon COMMAND`. Each command imports what it needs when it runs, so that --help is quick."""

import importlib
import sys
from collections.abc import Mapping
from importlib.metadata import version
from typing import Final

import click

COMMANDS: Final[Mapping[str, str]] = {
    "pack": "mqmk.daemon.commands.pack:pack",
    "bench": "mqmk.daemon.commands.bench:bench",
}
"""Where each command lives; its module is imported only when the command is named."""

SUMMARIES: Final[Mapping[str, str]] = {
    "pack": "Make task shards and their manifest from a folder of pictures.",
    "bench": "Measure speed and accuracy.",
}


class LazyGroup(click.Group):
    """Lists commands without importing them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, name = COMMANDS[cmd_name].split(":")
        command = getattr(importlib.import_module(module), name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, SUMMARIES[name]) for name in COMMANDS])


@click.command(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(version("mqmk-daemon"), prog_name="mqmk-daemon")
def cli() -> None:
    """A classifier that learns new classes from a bucket of labelled task shards, without forgetting the old ones."""


def main() -> None:
    """The entry point: an error that a user can act on is one line, not a traceback."""
    try:
        cli()
    except Exception as error:
        if not any(cls.__name__ == "MqmkError" for cls in type(error).__mro__):  # its import would load torch
            raise
        click.echo(f"mqmk-daemon: {error}", err=True)
        sys.exit(1)
