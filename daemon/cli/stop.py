"""`mqmk-daemon stop`: stop the daemon and, without --keep-serving, its service."""

import os
import signal
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import click

from mqmk.daemon.cli.options import config_options

if TYPE_CHECKING:
    from pathlib import Path

    from mqmk.daemon.config.load import Loaded
    from mqmk.daemon.config.sections import Config

ATTACH_SECONDS = 20.0
UNDEPLOY_SECONDS = 120.0


@click.command()
@click.option("--keep-serving", is_flag=True, help="Stop only the daemon; serving continues.")
@click.option("--seconds", type=float, default=30.0, show_default=True, help="How long to wait for the daemon to exit.")
@config_options
def stop(loaded: "Loaded", keep_serving: bool, seconds: float) -> None:
    """Stop the daemon of this state directory and its service."""
    late = _stop_daemon(loaded.config.state.dir, seconds)
    if not keep_serving and _stop_serving(loaded.config):
        click.echo("serving stopped")
    if late:
        from mqmk.daemon.errors import DaemonError

        raise DaemonError(f"process {late} did not exit within {seconds:g} s; `kill -9 {late}` is safe")


def _stop_daemon(folder: "Path", seconds: float) -> int | None:
    """The id of the process if it did not exit in time."""
    from mqmk.daemon.host.lock import lock_owner

    owner = lock_owner(folder)
    if owner is None:
        click.echo("no daemon is running")
        return None
    with suppress(ProcessLookupError):  # it exited just now
        os.kill(owner.pid, signal.SIGTERM)
    deadline = time.monotonic() + seconds
    while lock_owner(folder):
        if time.monotonic() > deadline:
            return owner.pid
        time.sleep(0.1)
    click.echo(f"daemon {owner.pid} stopped")
    return None


def _stop_serving(config: "Config") -> bool:
    """Stop our own Ray, or undeploy from an external cluster; whether anything was running."""
    if config.ray.address == "none":
        return False
    if config.ray.address == "local":
        from mqmk.daemon.ray_runtime.head import stop_head

        return bool(stop_head(config.ray_folder))
    return _undeploy(config)


def _undeploy(config: "Config") -> bool:
    from mqmk.deploy.serving.settings import ServiceSpec
    from mqmk.deploy.serving.telemetry.heartbeat import deployed_service

    spec = ServiceSpec(config.pools_folder)
    if not deployed_service(spec.replicas_folder):
        return False
    from mqmk.daemon.errors import RayError
    from mqmk.daemon.ray_runtime.attach import ExternalCluster, attach, detach, run_until
    from mqmk.deploy.serving.application import undeploy

    attach(ExternalCluster(config.ray.address), deadline_seconds=ATTACH_SECONDS)
    end = time.monotonic() + UNDEPLOY_SECONDS
    late = f"the cluster did not stop the service within {UNDEPLOY_SECONDS:g} s; try again"
    try:
        return run_until(lambda _: undeploy(spec), lambda: late if time.monotonic() > end else None)
    except TimeoutError as error:
        raise RayError(str(error)) from error
    finally:
        detach()
