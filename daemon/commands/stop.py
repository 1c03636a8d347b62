"""`mqmk-daemon stop`: end the daemon and, unless it is to go on serving, its Ray."""

import os
import signal
import time
from typing import TYPE_CHECKING

import click

from mqmk.daemon.commands.options import config_options

if TYPE_CHECKING:
    from mqmk.daemon.config_sources import Loaded


@click.command()
@click.option("--keep-serving", is_flag=True, help="End the daemon only; predictions go on.")
@click.option("--seconds", type=float, default=30.0, show_default=True, help="How long to wait for the daemon.")
@config_options
def stop(loaded: "Loaded", keep_serving: bool, seconds: float) -> None:
    """End the daemon of this state directory, and what it serves."""
    from mqmk.daemon.errors import DaemonError
    from mqmk.daemon.lock import holder_of

    folder = loaded.config.state.dir
    holder = holder_of(folder)
    if holder:
        os.kill(holder.pid, signal.SIGTERM)
        deadline = time.monotonic() + seconds
        while holder_of(folder):
            if time.monotonic() > deadline:
                raise DaemonError(
                    f"process {holder.pid} did not end within {seconds:g} s; `kill -9 {holder.pid}` is safe"
                )
            time.sleep(0.1)
        click.echo(f"daemon {holder.pid} stopped")
    else:
        click.echo("no daemon is running")
    if keep_serving or loaded.config.ray.address != "local":
        return
    from mqmk.daemon.ray_head import stop_head

    if stop_head(loaded.config.ray_folder):
        click.echo("serving stopped")
