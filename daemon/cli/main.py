"""The command line: `mqmk-daemon COMMAND`. Commands import what they need when they run, so that --help is fast."""

import importlib
import sys
from collections.abc import Mapping
from importlib.metadata import version
from typing import Final

import click

COMMANDS: Final[Mapping[str, tuple[str, str]]] = {
    "start": ("start:start", "Run the daemon: watch the bucket, learn and serve."),
    "stop": ("stop:stop", "Stop the daemon and serving."),
    "status": ("status:status", "Show health, serving state and tasks that need attention."),
    "tasks": ("tasks:tasks", "List every task with its state and reason."),
    "show": ("tasks:show", "Show one task: state, next step and history."),
    "pack": ("pack:pack", "Pack a folder of images into task shards with a manifest."),
    "retry": ("operator_commands:retry", "Retry a task now."),
    "versions": ("versions:versions", "List pool versions and the current one."),
    "rollback": ("operator_commands:rollback", "Serve an earlier version."),
    "promote": ("operator_commands:promote", "Serve a held task or another version."),
    "forget": ("operator_commands:forget", "Remove a task from the pool and delete its data."),
    "commands": ("operator_commands:commands", "List operator commands, or cancel a queued one."),
    "export": ("export:export", "Write one version to a self-contained folder."),
    "predict": ("predict:predict", "Classify images."),
    "evaluate": ("evaluate:evaluate", "Measure accuracy on labelled images."),
    "report": ("report:report", "Write an HTML report about tasks, versions and accuracy."),
    "api-key": ("api_key:api_key", "Create, list and revoke API keys."),
    "config": ("config:config", "Print every setting and where its value came from."),
    "doctor": ("doctor:doctor", "Check everything the daemon needs."),
    "demo": ("demo:demo", "Watch a real daemon learn sketches or your own images."),
    "backup": ("backup:backup", "Back up the state directory online."),
    "bench": ("bench.group:bench", "Measure speed and accuracy."),
}
"""Module and function of each command (imported only when it runs), and its line in --help."""


class LazyGroup(click.Group):
    """A group that lists commands without importing them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, name = COMMANDS[cmd_name][0].split(":")
        command = getattr(importlib.import_module(f"mqmk.daemon.cli.{module}"), name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in COMMANDS.items()])


@click.command(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(version("mqmk-daemon"), prog_name="mqmk-daemon")
def cli() -> None:
    """An image classifier that keeps learning new classes from a bucket of labelled shards, without forgetting."""


def main() -> None:
    """The entry point: an error that the user can act on is one line, not a traceback."""
    try:
        cli()
    except Exception as error:
        if not any(cls.__name__ == "MqmkError" for cls in type(error).__mro__):  # its import would load torch
            raise
        from mqmk.daemon.redaction import redact

        click.echo(f"mqmk-daemon: {redact(str(error))}", err=True)
        sys.exit(1)
