"""Ray as the daemon uses it: its own head or somebody's cluster, the service on it, and what to do when it dies."""

import logging
import math
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import version

from mqmk.daemon.config import Config
from mqmk.daemon.errors import RayError
from mqmk.daemon.ledger import Ledger
from mqmk.daemon.logs import event
from mqmk.daemon.orchestrator import Replica
from mqmk.daemon.ray_attach import Cluster as ClusterAddress
from mqmk.daemon.ray_attach import attach, detach, wait_for
from mqmk.daemon.ray_command import RayHeadSettings, temp_folder
from mqmk.daemon.ray_head import Head, ensure_head
from mqmk.daemon.ray_watch import HeadHealth, Verdict, Watch, check, judge, repair
from mqmk.daemon.ray_workers import RayWorkers, trainers_that_fit
from mqmk.deploy import serving
from mqmk.deploy.desk import remind
from mqmk.deploy.settings import ServeSettings
from mqmk.matcher.errors import MqmkError

log = logging.getLogger(__name__)
WATCH_SECONDS = 2.0
REMIND_SECONDS = 60.0
UNSERVED_SECONDS = 60.0
"""How long no replica may live before Serve is asked: after a few that died at their start it gives up for good."""


def serve_settings(config: Config) -> ServeSettings:
    """What the service is started with."""
    wanted, backbone = config.serve, config.backbone
    return ServeSettings(
        pools=config.pools_folder,
        store=config.pools.url,
        cache=config.pools.cache,
        cached=config.pools.cached,
        proxies=wanted.proxies,
        host=wanted.host,
        port=wanted.port,
        api_keys=wanted.api_keys,
        anonymous=wanted.open,
        replicas=wanted.replicas,
        max_replicas=wanted.max_replicas,
        target_requests=wanted.target_requests,
        scale_up_seconds=wanted.scale_up_seconds,
        scale_down_seconds=wanted.scale_down_seconds,
        num_cpus=wanted.num_cpus,
        num_gpus=wanted.num_gpus,
        backbone=backbone.name,
        weights=str(backbone.weights or "hub"),
        weights_sha256=backbone.sha256,
        image_size=backbone.image_size,
        matcher=wanted.matcher,
        budget=wanted.budget,
        max_batch=wanted.max_batch,
        batch_wait_seconds=wanted.batch_wait_seconds,
        max_queue=wanted.max_queue,
        request_bytes=wanted.request_bytes,
        timeout_seconds=wanted.timeout_seconds,
        watch_seconds=config.pools.watch_seconds if config.pools.url else wanted.watch_seconds,
        haproxy=wanted.haproxy,
        private=temp_folder(config.ray_folder).parent if wanted.haproxy else None,
        agreement_share=wanted.agreement_share,
        task_labels=config.metrics.task_labels,
    )


def head_settings(config: Config) -> RayHeadSettings:
    """What the local head is started with; on a small machine, room for one trainer beside the replicas."""
    needed = math.ceil(config.ray.trainer_cpus + config.serve.most_replicas * config.serve.num_cpus)
    return RayHeadSettings(
        config.ray_folder,
        num_cpus=config.ray.num_cpus or max(os.cpu_count() or 1, needed),
        num_gpus=config.ray.num_gpus,
        object_store_memory=config.ray.object_store_mb * 1_000_000,
        metrics_port=config.ray.metrics_port,
        environment=serving.environment(serve_settings(config)),
    )


@dataclass
class RayCluster:
    """Attached to Ray, with workers and the service; `tend` repairs what it can."""

    config: Config
    ledger: Ledger
    deploy: Callable[[ServeSettings], None] = serving.deploy
    head: Head | None = None
    workers: RayWorkers = field(init=False)
    _watch: Watch = field(default_factory=Watch)
    _looked_at: float = 0.0
    _reminded_at: float = 0.0
    _joined: bool = False
    """Attached, with everything started that runs on Ray."""
    _served_at: float = 0.0

    def __post_init__(self) -> None:
        self.workers = RayWorkers(self.config, 1)

    @property
    def metrics_target(self) -> str | None:
        """Ray's metrics agent on this node."""
        return f"127.0.0.1:{self.head.metrics_port}" if self.head else None

    def start(self) -> None:
        """Join Ray for the first time: what an operator must mend is raised, what dies on the way is tried again."""
        try:
            self._join()
        except Exception as error:  # such as a proxy that was killed while it started
            died = self._hopeless()() is not None
            if isinstance(error, MqmkError) and not died:
                raise
            self._failed_to_join(error)

    def _join(self) -> None:
        """Find or start Ray, attach, and see to it that the service runs."""
        if self.config.ray.address == "local":
            self.head = ensure_head(head_settings(self.config))
            attach(self.head, hopeless=self._hopeless())
        else:
            attach(ClusterAddress(self.config.ray.address))
        wait_for(self._equip, self._hopeless())
        self._joined, self._served_at = True, time.monotonic()
        self.ledger.set_health("ray", True)
        log.info(f"Ray is ready, {self.workers.trainers} trainers", extra=event("ray.ready", release=version("ray")))

    def _equip(self) -> None:
        """See to it that workers and the service run."""
        settings = serve_settings(self.config)
        if self.head and self.config.serve.enabled:
            serving.refuse_a_taken_port(settings)
        self.workers.trainers = trainers_that_fit(self.config)
        self.workers.warm_up()
        if self.config.serve.enabled:
            self.deploy(settings)

    def tend(self) -> None:
        """Look after the head every couple of seconds; a dead one is started again, and the service on it."""
        now = time.monotonic()
        if now - self._looked_at < WATCH_SECONDS:
            return
        self._looked_at = now
        if self.head is None:  # somebody's cluster, who looks after it
            if self._joined:
                self._remind(now)
            else:
                self._join_again(HeadHealth(), Verdict.WAIT)
            return
        health = check(self.head, self.config.serve.port if self._is_serving() else None)
        self._watch, verdict = judge(self._watch, health, now)
        if verdict is Verdict.WELL and self._joined:
            self.ledger.set_health("ray", True)
            self._remind(now)
            self._serve_again(now)
            return
        if not health.is_well:  # else it is we who did not get in, and the ledger has the reason
            self.ledger.set_health("ray", False, str(health))
        if verdict is Verdict.RESTART or (not self._joined and health.answers):
            self._join_again(health, verdict)

    def _join_again(self, health: HeadHealth, verdict: Verdict) -> None:
        try:
            with ThreadPoolExecutor(1) as meanwhile:
                meanwhile.submit(self._leave)  # Ray takes ten seconds to leave what is dead, and waits for what hangs
                if verdict is Verdict.RESTART:
                    self.head = repair(head_settings(self.config), health)
            self._join()
        except Exception as error:  # Ray and Serve raise anything when they die again meanwhile
            self._failed_to_join(error)

    def _failed_to_join(self, error: Exception) -> None:
        what = f"{type(error).__name__}: {error}"  # some of Ray's errors have no text
        log.error(f"Ray is not ready: {what}; trying again", extra=event("ray.down", error=what))
        self.ledger.set_health("ray", False, what)
        self._joined = False
        self.workers.forget()

    def _leave(self) -> None:
        self._joined = False
        self.workers.forget()
        with suppress(RayError):  # the next one to attach says so
            detach()

    def _remind(self, now: float) -> None:
        """Tell the desk our credentials again: Ray may have started it anew."""
        if self.config.pools.url and now - self._reminded_at > REMIND_SECONDS:
            self._reminded_at = now
            remind()

    def _serve_again(self, now: float) -> None:
        """Deploy anew where Serve has given up; it leaves alone what is only slow."""
        if not self.config.serve.enabled or self.replicas():
            self._served_at = now
        elif now - self._served_at > UNSERVED_SECONDS:
            self._served_at = now
            log.warning("no replica lives: deploying again if Serve gave up", extra=event("serve.deploy_again"))
            try:
                wait_for(lambda: self.deploy(serve_settings(self.config)), self._hopeless())
            except Exception as error:  # as above
                log.error(f"could not deploy again: {error}", extra=event("serve.down", error=repr(error)))

    def _hopeless(self) -> Callable[[], str | None]:
        """Says, when asked again and again, why nothing more is to be expected from the head."""
        watch = Watch()

        def look() -> str | None:
            nonlocal watch
            if self.head is None:
                return None
            health = check(self.head)
            watch, verdict = judge(watch, health, time.monotonic())
            return str(health) if verdict is Verdict.RESTART else None

        return look

    def _is_serving(self) -> bool:
        return self.config.serve.enabled and bool(self.replicas())

    def replicas(self) -> list[Replica]:
        """Every live replica and the version it answers with."""
        if not self.config.serve.enabled:
            return []
        found = serving.replicas(serve_settings(self.config))
        return [Replica(each.replica_id, each.pool_version, each.digest, each.last_failure) for each in found]

    def stop(self) -> None:
        """Leave; what serves goes on serving."""
        self.workers.stop()
        self._leave()
