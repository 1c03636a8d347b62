"""`mqmk-daemon start`: run the daemon until a signal stops it."""

from typing import TYPE_CHECKING

import click

from mqmk.daemon.cli.options import new_state_options

if TYPE_CHECKING:
    from mqmk.daemon.config.load import Loaded


@click.command()
@new_state_options
def start(loaded: "Loaded") -> None:
    """Run the daemon in the foreground. SIGTERM or Ctrl-C stops it; serving continues until `mqmk-daemon stop`."""
    from mqmk.daemon import logs
    from mqmk.daemon.app import run_daemon
    from mqmk.daemon.config.load import COMMAND_LINE

    logs.configure_logging(loaded.config.log)
    typed = loaded.origins["state.dir"] == COMMAND_LINE
    run_daemon(loaded.config, ("--state", str(loaded.config.state.dir)) if typed else ())
