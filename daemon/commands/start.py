"""`mqmk-daemon start`: watch the bucket, learn, serve, until a signal says stop."""

from typing import TYPE_CHECKING

import click

from mqmk.daemon.commands.options import config_options

if TYPE_CHECKING:
    from mqmk.daemon.config_sources import Loaded


@click.command()
@config_options
def start(loaded: "Loaded") -> None:
    """Run the daemon in the foreground. SIGTERM or Ctrl-C ends it; what serves goes on until `mqmk-daemon stop`."""
    from mqmk.daemon import logs
    from mqmk.daemon.service import run_daemon

    logs.set_up(loaded.config.log)
    run_daemon(loaded.config)
