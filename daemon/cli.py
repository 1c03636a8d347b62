"""The command line: `mqmk-daemon COMMAND`. Each command imports what it needs when it runs, so that --help is quick."""

import importlib
import sys
from collections.abc import Mapping
from importlib.metadata import version
from typing import Final

import click

COMMANDS: Final[Mapping[str, tuple[str, str]]] = {
    "start": ("start:start", "Watch the bucket, learn and serve until told to stop."),
    "stop": ("stop:stop", "End the daemon and what it serves."),
    "status": ("status:status", "Is it fine, what is it doing, what waits for me?"),
    "tasks": ("status:tasks", "Every task with its state and reason."),
    "show": ("status:show", "Everything about one task."),
    "pack": ("pack:pack", "Make task shards and their manifest from a folder of pictures."),
    "retry": ("ask:retry", "Try a task again now."),
    "versions": ("status:versions", "Every pool version, and which one is current."),
    "rollback": ("ask:rollback", "Serve an earlier version."),
    "promote": ("ask:promote", "Serve a held task, or a version."),
    "forget": ("ask:forget", "Publish a version without a task."),
    "predict": ("predict:predict", "Say what is in pictures."),
    "evaluate": ("evaluate:evaluate", "Count right answers about pictures whose classes are known."),
    "report": ("report:report", "Write a page about what was learned and how well."),
    "config": ("config:config", "Print every setting and where it came from."),
    "doctor": ("doctor:doctor", "Check everything the daemon needs, and say what to do."),
    "demo": ("demo:demo", "Watch a real daemon learn sketches, or your own pictures."),
    "backup": ("backup:backup", "Copy the state directory while the daemon works."),
    "bench": ("bench:bench", "Measure speed and accuracy."),
}
"""Where each command lives (its module is imported only when it is named), and its line in --help."""


class LazyGroup(click.Group):
    """Lists commands without importing them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, name = COMMANDS[cmd_name][0].split(":")
        command = getattr(importlib.import_module(f"mqmk.daemon.commands.{module}"), name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in COMMANDS.items()])


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
        from mqmk.daemon.passwords import hidden

        click.echo(f"mqmk-daemon: {hidden(str(error))}", err=True)
        sys.exit(1)
