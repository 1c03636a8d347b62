"""One Ray Serve replica: the frozen ViT, the pool that CURRENT names, and the HTTP API around them.

It is ready when it holds CURRENT: until then its constructor waits and Serve sends it nothing. After that a pool is
never a reason to stop; only a dead watcher thread is, and Serve then replaces the replica.
"""

import os
import time
from typing import Any

import ray.util
import torch
from fastapi import FastAPI
from ray import serve

from mqmk.deploy.api import build_api
from mqmk.deploy.desk import DistantReporter, take_up_credentials
from mqmk.deploy.errors import NotReadyError
from mqmk.deploy.feedback import Verdict
from mqmk.deploy.keys import read_keys
from mqmk.deploy.measures import Measures
from mqmk.deploy.pool_holder import PoolHolder, Watcher
from mqmk.deploy.replica_metrics import RayMetrics
from mqmk.deploy.replica_port import keep_on_loopback
from mqmk.deploy.reports import ReplicaReport, Reporter
from mqmk.deploy.service import Service
from mqmk.deploy.settings import ServeSettings
from mqmk.matcher.backbone import load_backbone
from mqmk.matcher.pool_store import PoolSource, PoolStore
from mqmk.matcher.predictor import PredictSettings
from mqmk.matcher.prompted_vit import FrozenViT


class Replica:
    """What Serve constructs, asks for its health, and routes requests to."""

    def __init__(self, settings: ServeSettings) -> None:
        self._node: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        keep_on_loopback(self._node)
        context = serve.get_replica_context()
        torch.set_num_threads(settings.threads)
        self._id, self._settings, self._ready = context.replica_tag, settings, False
        self._names = (context.deployment, context.app_name)
        self._keys = read_keys(settings.api_keys)
        self._reporter = DistantReporter(self._id) if settings.store else Reporter(settings.reports, self._id)
        vit = _backbone(settings)
        predicting = PredictSettings(settings.matcher, settings.budget)
        self._holder = PoolHolder(_pools(settings), vit, predicting, retry_seconds=settings.retry_seconds)
        self._service = Service(vit, self._holder, settings, self._ask_others, Measures(RayMetrics(), settings))
        self._watcher = Watcher(self._holder, settings.watch_seconds, self._report)
        self._watcher.start()
        while not self._holder.caught_up:
            time.sleep(0.2 if settings.store else 0.05)
        self._ready = True

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Serve asks for the API after the constructor."""
        return build_api(self._service, self._keys, echo_id=False)  # Serve does, with HAProxy in front, too

    def check_health(self) -> None:
        """Serve replaces a replica that raises here."""
        if not self._watcher.alive:
            raise RuntimeError("the thread that watches CURRENT has ended")

    def hint(self) -> None:
        """CURRENT was moved: look now."""
        self._watcher.hint()

    def tell(self, request_id: str, label: str) -> Verdict | None:
        """Feedback that reached another replica."""
        return self._service.answers.tell(request_id, label)

    def __del__(self) -> None:
        if hasattr(self, "_watcher"):
            self._watcher.stop()
            self._service.close()
            self._reporter.remove()

    async def _ask_others(self, request_id: str, label: str) -> Verdict | None:
        """Ask every replica, this one included; feedback is rare, so answers need no shared store."""
        handle: Any = serve.get_deployment_handle(*self._names)
        asking = handle.broadcast("tell", request_id, label)
        try:
            found = await asking.results_async(timeout_s=5.0, return_exceptions=True)
        except TimeoutError as error:
            raise NotReadyError("another replica did not answer; try again later") from error
        return next((verdict for verdict in found if isinstance(verdict, Verdict)), None)

    def _report(self) -> None:
        self._service.export()
        holder, answers = self._holder, self._service.answers
        held, refusal = holder.held, holder.last_refusal
        self._reporter.write(
            ReplicaReport(
                replica_id=self._id,
                pid=os.getpid(),
                ready=self._ready,
                pool_version=held.version if held else None,
                digest=held.pointer.digest if held else None,
                swaps=holder.swaps,
                failures=holder.refusals.total(),
                failures_by_stage={str(stage): count for stage, count in holder.refusals.items()},
                last_failure=str(refusal) if refusal else None,
                feedback=dict(answers.counts),
                matched_by_task=dict(answers.matched),
                mismatched_by_task=dict(answers.mismatched),
                node=self._node,
            )
        )


def _pools(settings: ServeSettings) -> PoolSource:
    """The store to watch."""
    if settings.store is None:
        return PoolStore(settings.pools)
    from mqmk.deploy.remote_pools import open_remote_pools  # imports fsspec, which a folder does not need

    take_up_credentials()
    return open_remote_pools(settings.store, settings.cache, settings.cached)


def _backbone(settings: ServeSettings) -> FrozenViT:
    device = torch.device("cuda" if settings.num_gpus and torch.cuda.is_available() else "cpu")
    return load_backbone(
        settings.backbone,
        weights=settings.weights,
        sha256=settings.weights_sha256,
        image_size=settings.image_size,
        device=device,
    )
