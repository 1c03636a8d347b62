"""Ray as the daemon uses it: its own head or an external cluster, the service on it, and recovery when it dies."""

import logging
import math
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Protocol

import ray

from mqmk.daemon.config.sections import Config
from mqmk.daemon.errors import RayError
from mqmk.daemon.ledger.ledger import Ledger
from mqmk.daemon.logs import event
from mqmk.daemon.ray_runtime.attach import AbortCheck, ExternalCluster, attach, detach, run_until
from mqmk.daemon.ray_runtime.head import Head, ensure_head
from mqmk.daemon.ray_runtime.head_command import RayHeadSettings, temp_folder
from mqmk.daemon.ray_runtime.watchdog import (
    Action,
    ClusterCheck,
    HeadHealth,
    Watch,
    check,
    check_cluster,
    decide,
    repair,
)
from mqmk.daemon.replicas import Replica
from mqmk.daemon.words import plural
from mqmk.daemon.workers.ray_pool import RayWorkers, WarmWorkers
from mqmk.deploy.serving import application
from mqmk.deploy.serving.settings import ServiceSpec
from mqmk.deploy.serving.telemetry.coordinator import refresh_credentials
from mqmk.matcher.errors import MqmkError

log = logging.getLogger(__name__)
WATCH_SECONDS = 2.0
CREDENTIALS_SECONDS = 10.0
CONNECT_SECONDS = 300.0
"""How long an external cluster may take to start our workers and the service."""
NO_REPLICA_SECONDS = 60.0
"""How long there may be no replica before we redeploy: Serve gives up after a few failed starts."""


def service_spec(config: Config) -> ServiceSpec:
    """What the service is started with."""
    pools, backbone = config.pools, config.backbone
    return ServiceSpec(
        config.pools_folder,
        config.serve,
        store=pools.url,
        store_watch_seconds=pools.watch_seconds,
        cache=pools.cache,
        cached=pools.cached,
        backbone=backbone.name,
        weights=str(backbone.weights or "hub"),
        weights_sha256=backbone.sha256,
        image_size=backbone.image_size,
        formats=config.limits.formats or (),
        task_labels=config.metrics.task_labels,
        private=temp_folder(config.ray_folder).parent if config.serve.haproxy else None,
    )


def head_settings(config: Config) -> RayHeadSettings:
    """Settings of the local head; even on a small machine, one trainer fits beside the replicas."""
    needed = math.ceil(config.ray.trainer_cpus + config.serve.most_replicas * config.serve.num_cpus)
    return RayHeadSettings(
        config.ray_folder,
        num_cpus=config.ray.num_cpus or max(os.cpu_count() or 1, needed),
        num_gpus=config.ray.num_gpus,
        object_store_memory=config.ray.object_store_mb * 1_000_000,
        metrics_port=config.ray.metrics_port,
        environment=application.environment(service_spec(config)),
    )


class Deploy(Protocol):
    """Deploys the service (application.deploy)."""

    def __call__(self, spec: ServiceSpec, *, ours: bool, restart: bool, check_abort: AbortCheck) -> None:
        """Deploy unless it runs with these settings; `restart` restarts Serve first."""


@dataclass
class RayCluster:
    """The connection to Ray, with workers and the service; `reconcile` repairs what it can."""

    config: Config
    ledger: Ledger
    deploy: Deploy = application.deploy
    head: Head | None = None
    """Ours; None on an external cluster."""
    workers: RayWorkers = field(init=False)
    _check: ClusterCheck | None = None
    """Of the external cluster that we are attached to."""
    _watch: Watch = field(default_factory=Watch)
    _checked_at: float = 0.0
    _credentials_sent_at: float = 0.0
    _connected: bool = False
    """Attached, with workers and the service started."""
    _served_at: float = 0.0

    def __post_init__(self) -> None:
        self.workers = RayWorkers(self.config, 1)

    @property
    def metrics_target(self) -> str | None:
        """Ray's metrics agent on this node."""
        return f"127.0.0.1:{self.head.metrics_port}" if self.head else None

    def start(self) -> None:
        """Connect for the first time: raises what an operator must fix, retries if Ray dies meanwhile."""
        try:
            self._connect()
        except Exception as error:  # such as a proxy that was killed while it started
            died = self._give_up_reason()() is not None
            if isinstance(error, MqmkError) and not died:
                raise
            self._record_failure(error)

    def _connect(self) -> None:
        """Find or start Ray, attach, and start workers and the service."""
        if self.config.ray.address == "local":
            self.head = ensure_head(head_settings(self.config))
            attach(self.head, give_up=self._give_up_reason())
        else:
            attach(ExternalCluster(self.config.ray.address))
            self._check = ClusterCheck(self.config.ray.address, ray.nodes)
        self.workers.adopt(run_until(self._start_services, self._give_up_reason()))
        self._connected, self._served_at = True, time.monotonic()
        self.ledger.set_health("ray", True)
        trainers = plural(self.workers.trainers, "trainer")
        log.info(f"Ray is ready, {trainers}", extra=event("ray.connected", release=version("ray")))

    def _start_services(self, check_abort: AbortCheck) -> WarmWorkers:
        """Start workers and the service unless they are running."""
        spec = service_spec(self.config)
        if self.head and self.config.serve.enabled:
            application.check_port_is_free(spec)
        check_abort()
        warm = self.workers.warm_up()
        if self.config.serve.enabled:
            check_abort()
            self.deploy(spec, ours=self.head is not None, restart=False, check_abort=check_abort)
        return warm

    def reconcile(self) -> None:
        """Check Ray every two seconds; restart a dead head, and redeploy a service that is gone."""
        now = time.monotonic()
        if now - self._checked_at < WATCH_SECONDS:
            return
        self._checked_at = now
        health = self._check_health(now)
        self._watch, action = decide(self._watch, health, now)
        if action is Action.NONE and self._connected:
            self.ledger.set_health("ray", True)
        elif not health.is_healthy:  # else we could not connect, and the ledger has the reason
            self.ledger.set_health("ray", False, str(health))
        if action is Action.RESTART or (not self._connected and health.answers):
            self._reconnect(health, action)
        elif self._connected and health.answers:
            self._refresh_credentials(now)
            self._redeploy_if_needed(now, restart=action is Action.RESTART_SERVE)

    def _check_health(self, now: float) -> HeadHealth:
        if self._check:
            return self._check.check(now)
        return self._health(self.config.serve.local_address if self._is_serving() else None)

    def _health(self, proxy: tuple[str, int] | None = None) -> HeadHealth:
        if self.head:
            return check(self.head, proxy)
        if self.config.ray.address == "local":
            return HeadHealth()  # there is none yet: connecting starts it
        return check_cluster(self.config.ray.address)

    def _reconnect(self, health: HeadHealth, action: Action) -> None:
        try:
            with ThreadPoolExecutor(1) as meanwhile:
                meanwhile.submit(self._disconnect)  # takes Ray ten seconds if the cluster is dead, longer if it hangs
                if action is Action.RESTART and self.head:
                    self.head = repair(head_settings(self.config), health)
            if self.head or health.answers:  # we reconnect to an external cluster when it is back
                self._connect()
        except Exception as error:  # Ray and Serve may raise anything if they die again meanwhile
            self._record_failure(error)

    def _record_failure(self, error: Exception) -> None:
        what = f"{type(error).__name__}: {error}"  # some of Ray's errors have no text
        log.error(f"cannot connect to Ray: {what}; will retry", extra=event("ray.connect_failed", error=what))
        self.ledger.set_health("ray", False, what)
        self._connected, self._check = False, None
        self.workers.forget()

    def _disconnect(self) -> None:
        self._connected, self._check = False, None
        self.workers.forget()
        with suppress(RayError):  # the next attach reports it
            detach()

    def _refresh_credentials(self, now: float) -> None:
        """Send the coordinator our credentials again: Ray may have restarted it."""
        if self.config.pools.url and now - self._credentials_sent_at > CREDENTIALS_SECONDS:
            self._credentials_sent_at = now
            refresh_credentials()

    def _redeploy_if_needed(self, now: float, restart: bool) -> None:
        """Redeploy if Serve has given up, but not if it is only slow; `restart` if it lost its proxy."""
        if not self.config.serve.enabled or (self.replicas() and not restart):
            self._served_at = now
        elif restart or now - self._served_at > NO_REPLICA_SECONDS:
            self._served_at = now
            why = "Serve does not replace its proxy: restarting it" if restart else "no replica is alive: redeploying"
            log.warning(why, extra=event("serve.redeploy_started"))
            spec, ours = service_spec(self.config), self.head is not None
            try:
                run_until(
                    lambda check_abort: self.deploy(spec, ours=ours, restart=restart, check_abort=check_abort),
                    self._give_up_reason(),
                )
            except Exception as error:  # as above
                log.error(f"redeploying failed: {error}", extra=event("serve.redeploy_failed", error=repr(error)))
            else:
                log.info("redeployed the service", extra=event("serve.redeployed"))

    def _give_up_reason(self) -> Callable[[], str | None]:
        """A function that, called repeatedly, returns why there is no point in waiting for Ray any longer."""
        watch, late = Watch(), time.monotonic() + CONNECT_SECONDS

        def reason() -> str | None:
            nonlocal watch
            now = time.monotonic()
            health = self._health()
            watch, action = decide(watch, health, now)
            if action is Action.RESTART:
                return str(health)
            return f"the cluster was not ready within {CONNECT_SECONDS:.0f} s" if not self.head and now > late else None

        return reason

    def _is_serving(self) -> bool:
        return self.config.serve.enabled and bool(self.replicas())

    def wanted_replicas(self) -> int:
        """How many must have loaded a version before it counts as served; with autoscaling, the minimum."""
        return self.config.serve.replicas

    def replicas(self) -> list[Replica]:
        """Every live replica and the version it serves."""
        if not self.config.serve.enabled:
            return []
        found = application.replicas(service_spec(self.config))
        return [Replica(each.replica_id, each.pool_version, each.digest, each.last_failure) for each in found]

    def stop(self) -> None:
        """Disconnect; serving continues."""
        self.workers.stop()
        self._disconnect()
