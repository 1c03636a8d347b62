"""The daemon's door to serving: start the service on a running Ray, ask what its replicas hold, end it.

Expects `ray.init` to have been called. Everything may be done twice: a service that runs with the same settings is left
alone, because deploying again would restart its replicas. Absent: no application of this name, no live reports.
"""

import json
import socket
import time
import urllib.request
from contextlib import suppress
from importlib.metadata import version
from typing import Any, Final

import ray
from ray import serve
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE
from ray.serve.config import ControllerOptions, HTTPOptions

from mqmk.deploy import haproxy
from mqmk.deploy.desk import ensure_desk, fingerprint
from mqmk.deploy.errors import ServeError
from mqmk.deploy.replica import Replica
from mqmk.deploy.reports import DEPLOYED, ReplicaReport, deployed, live_reports
from mqmk.deploy.settings import ServeSettings

APPLICATION: Final = "mqmk"
DEPLOYMENT: Final = "Replica"
_QUIET: Final = {"enable_access_log": False}  # a line for every request, in the proxy and in the replica
_PROXIES: Final = {"head": "HeadOnly", "every": "EveryNode"}  # as Ray says it
_PROXY_START_SECONDS: Final = 60  # Ray's 5 s are too few on a busy machine: it kills the proxy, and our start with it
_LEFT_ALONE: Final = ("RUNNING", "DEPLOYING", "UNHEALTHY")  # Serve replaces dead replicas by itself
_OPENER: Final = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # our own address needs no proxy


def deploy(settings: ServeSettings) -> None:
    """Start the service if it does not run with these settings; returns while its replicas still start."""
    haproxy.prepare(settings)
    serve.start(
        proxy_location=_PROXIES[settings.proxies],
        http_options=HTTPOptions(
            host=settings.host, port=settings.port, request_timeout_s=settings.timeout_seconds + 10
        ),
        logging_config=_QUIET,
        controller_options=ControllerOptions(runtime_env={"env_vars": environment(settings)}),
    )
    if settings.store:
        ensure_desk(settings.reports)
    digest = settings.digest(_release(settings))
    if deployed(settings.reports).get("settings") == digest and application_status() in _LEFT_ALONE:
        return
    settings.reports.mkdir(parents=True, exist_ok=True)
    serve.run_many(
        [serve.RunTarget(target=_application(settings), name=APPLICATION, route_prefix="/")],
        wait_for_ingress_deployment_creation=True,
        wait_for_applications_running=False,  # replicas wait for a pool that can be served, and so might we
    )
    (settings.reports / DEPLOYED).write_text(json.dumps({"settings": digest, "url": settings.url}))


def refuse_a_taken_port(settings: ServeSettings) -> None:
    """For a proxy on this machine, before its first start: it would try to listen there for ever."""
    with suppress(ValueError):
        ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
        return  # Serve runs here, and its proxy listens there
    with suppress(OSError), socket.create_connection((settings.host, settings.port), timeout=1):
        raise ServeError(
            f"another program listens at {settings.host}:{settings.port}; choose another port "
            f"(--set serve.port=...), or see who it is: ss -ltnp 'sport = :{settings.port}'"
        )


def _release(settings: ServeSettings) -> str:
    """Replicas take up credentials when they start: with others, they are started anew."""
    return version("mqmk-daemon") + (fingerprint() if settings.store else "")


def environment(settings: ServeSettings) -> dict[str, str]:
    """What Serve's own processes read at their start; for the controller here, or for a Ray head that is started."""
    return {
        "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": str(settings.proxy_health_seconds),
        "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": str(settings.proxy_health_timeout_seconds),
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": str(_PROXY_START_SECONDS),
    } | haproxy.environment(settings)


def replicas(settings: ServeSettings) -> list[ReplicaReport]:
    """What every live replica holds; needs no Ray."""
    return live_reports(settings.reports)


def application_status() -> str | None:
    """What Serve says about the application; None if it has none."""
    found = serve.status().applications.get(APPLICATION)
    return None if found is None else str(found.status.value)


def wait_until_live(settings: ServeSettings, seconds: float) -> None:
    """Return when the service answers over HTTP; ServeError says how far it came."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with suppress(OSError), _OPENER.open(f"{settings.url}/v2/health/live", timeout=5) as response:
            if response.status == 200:
                return
        time.sleep(0.1)
    waiting = [report.last_failure for report in replicas(settings) if report.last_failure]
    last = f"; a replica waits: {waiting[0]}" if waiting else ""
    raise ServeError(f"{settings.url} did not answer within {seconds:g} s (application: {application_status()}){last}")


def wait_until_ready(settings: ServeSettings, count: int, seconds: float) -> None:
    """Return when that many replicas hold CURRENT; ServeError says how many do."""
    deadline = time.monotonic() + seconds
    while (ready := sum(report.ready for report in replicas(settings))) < count:
        if time.monotonic() > deadline:
            raise ServeError(f"expected {count} replicas to be ready within {seconds:g} s, got {ready}")
        time.sleep(0.1)


def hint(seconds: float = 2.0) -> None:
    """Tell replicas that CURRENT was moved. They would see it by themselves; errors do not matter."""
    with suppress(Exception):
        handle: Any = serve.get_deployment_handle(DEPLOYMENT, APPLICATION)
        handle.broadcast("hint").results(timeout_s=seconds)


def shutdown() -> None:
    """End the service; harmless if there is none."""
    serve.shutdown()  # type: ignore[no-untyped-call]


def _application(settings: ServeSettings) -> Any:
    scaling: dict[str, Any] = {"num_replicas": settings.replicas}
    if settings.max_replicas is not None:
        scaling = {
            "autoscaling_config": {
                "min_replicas": settings.replicas,
                "max_replicas": settings.max_replicas,
                "target_ongoing_requests": settings.target_requests,
                "upscale_delay_s": settings.scale_up_seconds,
                "downscale_delay_s": settings.scale_down_seconds,
            }
        }
    deployment: Any = serve.deployment(
        serve.ingress()(Replica),
        name=DEPLOYMENT,
        ray_actor_options={"num_cpus": settings.num_cpus, "num_gpus": settings.num_gpus},
        max_ongoing_requests=4 * settings.max_queue,  # ours answers 429 first; Serve's own limit is a bare 503
        graceful_shutdown_timeout_s=settings.timeout_seconds,
        logging_config=_QUIET,
        health_check_period_s=2,
        health_check_timeout_s=10,
        **scaling,
    )
    return deployment.bind(settings)
