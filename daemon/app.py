"""Composition root: builds every part of the daemon as configured and runs it, from the lock to the last log line."""

import logging
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack

from mqmk.daemon.bucket.scanner import Bucket
from mqmk.daemon.config.fields import display
from mqmk.daemon.config.sections import Config
from mqmk.daemon.host.lock import DaemonLock, LockOwner
from mqmk.daemon.host.start_checks import check_before_start
from mqmk.daemon.host.systemd import ServiceManager
from mqmk.daemon.ledger.ledger import Ledger
from mqmk.daemon.logs import event, redirect_console_loggers
from mqmk.daemon.loop import DaemonLoop, NoRuntime, Runtime
from mqmk.daemon.metrics.server import serve_metrics
from mqmk.daemon.pipeline.orchestrator import Orchestrator
from mqmk.daemon.pipeline.outbound import Outbound, OutboundThread
from mqmk.daemon.pipeline.s3_mirror import S3Mirror
from mqmk.daemon.pipeline.store_upgrade import upgrade_store
from mqmk.daemon.registry.interface import Registry
from mqmk.daemon.registry.recorder import Recorder
from mqmk.daemon.start_up import Announcement, log_stopped, start_or_undo
from mqmk.daemon.state_dir import StateDir
from mqmk.daemon.status.snapshot import Snapshot

log = logging.getLogger(__name__)


def run_daemon(config: Config, options: Sequence[str] = ()) -> None:
    """Run until a signal arrives; `options` select this daemon on the command line."""
    manager = ServiceManager.take()  # before Ray starts, whose processes would inherit its variables
    backbone = check_before_start(config)
    with ExitStack() as parts:
        lock = DaemonLock(config.state.dir).take()
        parts.callback(lock.release)
        config.state.dir.chmod(0o700)
        ledger = Ledger(config.ledger_file)
        parts.callback(ledger.close)
        upgrade_store(ledger, StateDir(config.state.dir))
        ledger.set_health("backbone", True)
        loop = _build_loop(config, ledger, manager, parts)
        lock.write_owner(LockOwner(os.getpid(), time.time(), loop.metrics.url))
        loop.handle_signals()
        log.info(f"watching {display(config.bucket_url)}", extra=event("daemon.started", state=str(config.state.dir)))
        start_or_undo(loop.runtime, config)
        parts.callback(log_stopped, Snapshot(config, ledger), options)
        parts.callback(loop.runtime.stop)
        manager.ready(f"watching {display(config.bucket_url)}")
        parts.callback(Announcement(config, backbone, loop.metrics.url, options).start())
        outbound = _outbound_thread(config)
        outbound.start()
        parts.callback(outbound.stop)
        loop.run()
    outbound.exit_if_stuck()


def _outbound_thread(config: Config) -> OutboundThread:
    """With its own registry and ledger connection."""
    ledger, registry = Ledger(config.ledger_file), registry_for(config)

    def close() -> None:
        if registry:
            registry.close()
        ledger.close()

    return OutboundThread(outbound_for(config, ledger, StateDir(config.state.dir), registry), close)


def _build_loop(config: Config, ledger: Ledger, manager: ServiceManager, parts: ExitStack) -> DaemonLoop:
    """All parts; those that must be closed are, in reverse order."""
    bucket = Bucket(config.bucket_url, settle_seconds=config.bucket.settle_seconds)
    parts.callback(bucket.close)
    bucket.prepare()
    runtime, files = runtime_for(config, ledger), StateDir(config.state.dir)
    orchestrator = Orchestrator(config, ledger, bucket, files, runtime.workers, runtime)
    metrics = serve_metrics(config, config.ledger_file)
    parts.callback(metrics.close)
    return DaemonLoop(config, ledger, bucket, runtime, orchestrator, metrics, manager=manager)


def runtime_for(config: Config, ledger: Ledger) -> Runtime:
    """Ray as configured."""
    if config.ray.address == "none":
        return NoRuntime(config)
    if config.ray.address == "local":
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # read when ray is imported; keeps our ports on loopback
    from mqmk.daemon.ray_runtime.cluster import RayCluster

    redirect_console_loggers()
    return RayCluster(config, ledger)


def outbound_for(config: Config, ledger: Ledger, files: StateDir, registry: Registry | None) -> Outbound:
    """Copies to S3 and MLflow as configured."""
    return Outbound(Recorder(config, ledger, files, registry), mirror_for(config, ledger, files))


def mirror_for(config: Config, ledger: Ledger, files: StateDir) -> S3Mirror | None:
    """The pool store on S3 as configured."""
    if config.pools.url is None:
        return None
    from mqmk.deploy.serving.pools.s3_store import open_remote_pools  # imports fsspec, which a folder does not need

    return S3Mirror(ledger, files.store, open_remote_pools(config.pools.url, config.pools.cache))


def registry_for(config: Config) -> Registry | None:
    """MLflow as configured."""
    if not config.mlflow.enabled:
        return None
    from mqmk.daemon.registry.mlflow_registry import MlflowRegistry

    return MlflowRegistry(config.tracking_uri, config.artifacts_folder, config.mlflow.experiment, config.mlflow.model)
