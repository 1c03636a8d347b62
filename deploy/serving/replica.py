"""One Ray Serve replica: the frozen ViT, the pool that CURRENT names, and the HTTP API around them.

It is ready when it has loaded CURRENT: until then its constructor waits and Serve sends it nothing. After that no pool
is a reason to stop; only a dead thread is, and Serve then replaces the replica. One thread follows CURRENT and is
busy for as long as a pool takes to load; another sends heartbeats.
"""

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import ray.util
import torch
from fastapi import FastAPI
from ray import serve

from mqmk.deploy.serving.api_keys import open_keys
from mqmk.deploy.serving.feedback import AnswerLocation, FeedbackBody, record_once
from mqmk.deploy.serving.http.app import build_api
from mqmk.deploy.serving.inference import Service
from mqmk.deploy.serving.pools.live_pool import LivePool
from mqmk.deploy.serving.ray_compat.loopback import keep_on_loopback
from mqmk.deploy.serving.repeating_thread import RepeatingThread
from mqmk.deploy.serving.settings import ServiceSpec
from mqmk.deploy.serving.telemetry.coordinator import CredentialRenewal, RemoteStatus, adopt_credentials
from mqmk.deploy.serving.telemetry.heartbeat import HEARTBEAT_SECONDS, ReplicaStatus, StatusFile
from mqmk.deploy.serving.telemetry.ray_backend import RayMetrics
from mqmk.deploy.serving.telemetry.recorder import RequestMetrics
from mqmk.matcher.backbone import load_backbone
from mqmk.matcher.errors import PoolError
from mqmk.matcher.pool_store import PoolSource, PoolStore
from mqmk.matcher.predictor import PredictSettings
from mqmk.matcher.prompted_vit import FrozenViT


class Replica:
    """Serve constructs it, checks its health, and routes requests to it."""

    def __init__(self, spec: ServiceSpec) -> None:
        self._node: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        keep_on_loopback(self._node)
        context = serve.get_replica_context()
        torch.set_num_threads(spec.threads)
        self._id, self._spec, self._ready = context.replica_tag, spec, False
        self._names = (context.deployment, context.app_name)
        self._keys = open_keys(spec.serve.api_keys)
        self._status_file = RemoteStatus(self._id) if spec.store else StatusFile(spec.replicas_folder, self._id)
        vit = _load_backbone(spec)
        predicting = PredictSettings(spec.serve.matcher, spec.serve.budget)
        pools, self._renewal = _open_pools(spec)
        self._live_pool = LivePool(
            pools, vit, predicting, retry_seconds=spec.retry_seconds, fallback=spec.serve.fallback == "previous"
        )
        alone = spec.serve.replicas == 1 and spec.serve.max_replicas is None
        other_replicas = None if alone else partial(record_once, self._broadcast)
        self._service = Service(vit, self._live_pool, spec, other_replicas, RequestMetrics(RayMetrics(), spec))
        # a thread of its own: a replica that is slow at something must not look dead
        self._heartbeat = RepeatingThread("heartbeat", self._write_status, HEARTBEAT_SECONDS)
        self._watcher = RepeatingThread("pool-watcher", self._poll, spec.watch_seconds, lower_priority=5)
        self._heartbeat.start()
        self._watcher.start()
        while not self._live_pool.can_serve:
            time.sleep(0.2 if spec.store else 0.05)
        self._ready = True
        self._heartbeat.run_now()

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Called by Serve after the constructor."""
        return build_api(self._service, self._keys, echo_id=False)  # Serve does, also with HAProxy in front

    def check_health(self) -> None:
        """Serve replaces a replica that raises here."""
        if not self._watcher.alive:
            raise RuntimeError("the thread that watches CURRENT has ended")
        if not self._heartbeat.alive:
            raise RuntimeError("the heartbeat thread has ended")

    def find_answer(self, request_id: str) -> AnswerLocation | None:
        """Where an answer is remembered, if it is here."""
        return self._service.answers.find(self._id, request_id)

    def record_label(self, replica: str, request_id: str, label: str) -> FeedbackBody | None:
        """Count the true label of an answer if this is the chosen replica."""
        return self._service.answers.record_label(request_id, label) if replica == self._id else None

    def __del__(self) -> None:
        if hasattr(self, "_watcher"):
            self._watcher.stop()
            self._heartbeat.stop()
            self._service.close()
            self._status_file.remove()

    async def _broadcast(self, method: str, *given: str) -> Sequence[object]:
        """Call every replica, this one included; feedback is rare, so answers need no shared store."""
        handle: Any = serve.get_deployment_handle(*self._names)
        found: Sequence[object] = await handle.broadcast(method, *given).results_async(
            timeout_s=5.0, return_exceptions=True
        )
        return found

    def _poll(self) -> None:
        self._live_pool.poll()
        if self._renewal and self._live_pool.last_rejection:
            with suppress(PoolError):  # the next poll says what is wrong
                self._renewal.renew()
        self._heartbeat.run_now()

    def _write_status(self) -> None:
        self._service.export()
        live_pool, answers = self._live_pool, self._service.answers
        loaded, rejection = live_pool.loaded, live_pool.last_rejection
        self._status_file.write(
            ReplicaStatus(
                replica_id=self._id,
                pid=os.getpid(),
                ready=self._ready,
                pool_version=loaded.version if loaded else None,
                digest=loaded.pointer.digest if loaded else None,
                swaps=live_pool.swaps,
                failures=live_pool.rejections.total(),
                failures_by_stage={str(stage): count for stage, count in live_pool.rejections.items()},
                last_failure=str(rejection) if rejection else None,
                feedback=dict(answers.counts),
                matched_by_task=dict(answers.matched),
                mismatched_by_task=dict(answers.mismatched),
                node=self._node,
            )
        )


def _open_pools(spec: ServiceSpec) -> tuple[PoolSource, CredentialRenewal | None]:
    """The store to follow, and how it gets new credentials."""
    if spec.store is None:
        return PoolStore(spec.pools), None
    from mqmk.deploy.serving.pools.s3_store import open_remote_pools  # imports fsspec, which a folder does not need

    adopt_credentials()
    pools = open_remote_pools(spec.store, spec.cache, spec.cached)
    return pools, CredentialRenewal(pools.reconnect, spec.retry_seconds)


def _load_backbone(spec: ServiceSpec) -> FrozenViT:
    device = torch.device("cuda" if spec.serve.num_gpus and torch.cuda.is_available() else "cpu")
    return load_backbone(
        spec.backbone,
        weights=spec.weights,
        sha256=spec.weights_sha256,
        image_size=spec.image_size,
        device=device,
    )
