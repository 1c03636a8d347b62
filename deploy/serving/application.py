"""The daemon's interface to serving: deploy the service on a running Ray, list its replicas, end it.

Expects `ray.init` to have been called. Everything is idempotent: a service that runs with the same settings is left
alone, because deploying again would restart its replicas. Absent: no application of this name, no live replicas.
"""

import json
import socket
import time
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from typing import Any, Final

import ray
from ray import serve
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE
from ray.serve.config import ControllerOptions, HTTPOptions

from mqmk.deploy.serving.errors import ServeError
from mqmk.deploy.serving.ray_compat import haproxy, json_errors
from mqmk.deploy.serving.replica import Replica
from mqmk.deploy.serving.settings import ServiceSpec
from mqmk.deploy.serving.telemetry.coordinator import credentials_fingerprint, ensure_coordinator, stop_coordinator
from mqmk.deploy.serving.telemetry.heartbeat import DEPLOYED, ReplicaStatus, deployed_service, live_replicas

APPLICATION: Final = "mqmk"
DEPLOYMENT: Final = "Replica"
_QUIET: Final = {"enable_access_log": False}  # a line for every request, in the proxy and in the replica
_PROXIES: Final = {"head": "HeadOnly", "every": "EveryNode"}  # Ray's names
_PROXY_START_SECONDS: Final = 60  # Ray's 5 s are too few on a busy machine: it kills the proxy, and our start with it
_LEFT_ALONE: Final = ("RUNNING", "DEPLOYING", "UNHEALTHY")  # Serve replaces dead replicas itself
_CALL_SECONDS: Final = 30.0
_OPENER: Final = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # our own address needs no proxy


def deploy(
    spec: ServiceSpec, *, ours: bool = True, restart: bool = False, check_abort: Callable[[], None] = lambda: None
) -> None:
    """Start the service if it does not run with these settings; returns while its replicas still start.

    A Serve that listens elsewhere is restarted, or rejected where the cluster is not `ours`; `restart` restarts it
    in any case. `check_abort` is called between steps and raises to abort.
    """
    haproxy.prepare(spec)
    if restart or _needs_restart(spec, ours):
        shutdown()
        check_abort()
    serve.start(
        proxy_location=_PROXIES[spec.serve.proxies],
        http_options=HTTPOptions(**_http_options(spec)),
        logging_config=_QUIET,
        controller_options=ControllerOptions(runtime_env={"env_vars": environment(spec)}),
    )
    check_abort()
    if spec.store:
        ensure_coordinator(spec.replicas_folder)
        check_abort()
    digest = spec.digest(_release(spec))
    if deployed_service(spec.replicas_folder).get("settings") == digest and application_status() in _LEFT_ALONE:
        return
    spec.replicas_folder.mkdir(parents=True, exist_ok=True)
    _write_deployed(spec, "")  # a partial deployment is ours to undeploy
    check_abort()
    serve.run_many(
        [serve.RunTarget(target=_application(spec), name=APPLICATION, route_prefix="/")],
        wait_for_ingress_deployment_creation=True,
        wait_for_applications_running=False,  # replicas may wait for a pool that can be served
    )
    check_abort()
    _write_deployed(spec, digest)


def undeploy(spec: ServiceSpec) -> bool:
    """End the service on an existing cluster, and Serve too unless others use it; False if it was not deployed."""
    if not deployed_service(spec.replicas_folder):
        return False
    if application_status() is not None:
        serve.delete(APPLICATION)
    if not serve.status().applications:
        shutdown()
    stop_coordinator()
    (spec.replicas_folder / DEPLOYED).unlink(missing_ok=True)
    return True


def check_port_is_free(spec: ServiceSpec) -> None:
    """ServeError if another program listens there: a proxy on this machine would retry forever."""
    running = _running_options()
    if running is not None and running["port"] == spec.serve.port:
        return  # our own proxy listens there, perhaps at another address
    with suppress(OSError), socket.create_connection(spec.serve.local_address, timeout=1):
        raise ServeError(
            f"another program listens at {spec.serve.host}:{spec.serve.port}; choose another port "
            f"(--set serve.port=...), or see who it is: ss -ltnp 'sport = :{spec.serve.port}'"
        )


def _http_options(spec: ServiceSpec) -> dict[str, Any]:
    """Options that Serve reads only when it starts."""
    return {"host": spec.serve.host, "port": spec.serve.port, "request_timeout_s": spec.serve.timeout_seconds + 10}


def _running_options() -> dict[str, Any] | None:
    """HTTP options and proxy location of the Serve on this Ray; None if none runs."""
    try:
        controller = ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
    except ValueError:
        return None
    asked = [controller.get_http_config.remote(), controller.get_proxy_location.remote()]
    found, location = ray.get(asked, timeout=_CALL_SECONDS)
    own = {name: getattr(found, name) for name in ("host", "port", "request_timeout_s")}
    return own | {"location": None if location is None else str(location.value)}


def _needs_restart(spec: ServiceSpec, ours: bool) -> bool:
    """Whether a Serve runs with other HTTP options; ServeError if it is not ours to restart."""
    running = _running_options()
    if running is None or running == _http_options(spec) | {"location": _PROXIES[spec.serve.proxies]}:
        return False
    if not ours and (running["host"], running["port"]) != (spec.serve.host, spec.serve.port):
        raise ServeError(
            f"Ray Serve on this cluster listens at {running['host']}:{running['port']}, not at {spec.serve.host}:"
            f"{spec.serve.port}, and keeps its address while it runs: set serve.host and serve.port to that one, or "
            "end this service first with `mqmk-daemon stop` (with the settings it was started with)"
        )
    return ours


def _write_deployed(spec: ServiceSpec, digest: str) -> None:
    (spec.replicas_folder / DEPLOYED).write_text(json.dumps({"settings": digest, "url": spec.serve.url}))


def _release(spec: ServiceSpec) -> str:
    """Replicas read credentials when they start: new ones need new replicas."""
    return version("mqmk-daemon") + (credentials_fingerprint() if spec.store else "")


def environment(spec: ServiceSpec) -> dict[str, str]:
    """Variables that Serve's processes read at their start: the controller's here, or those of a new Ray head."""
    ours = {
        "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": str(spec.proxy_health_seconds),
        "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": str(spec.proxy_health_timeout_seconds),
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": str(_PROXY_START_SECONDS),
    }
    return ours | json_errors.environment() | haproxy.environment(spec)


def replicas(spec: ServiceSpec) -> list[ReplicaStatus]:
    """The status of every live replica; needs no Ray."""
    return live_replicas(spec.replicas_folder)


def application_status() -> str | None:
    """Serve's status of the application; None if there is none."""
    found = serve.status().applications.get(APPLICATION)
    return None if found is None else str(found.status.value)


def wait_until_live(spec: ServiceSpec, seconds: float) -> None:
    """Return when the service answers over HTTP; ServeError on timeout."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with suppress(OSError), _OPENER.open(f"{spec.serve.url}/v2/health/live", timeout=5) as response:
            if response.status == 200:
                return
        time.sleep(0.1)
    waiting = [replica.last_failure for replica in replicas(spec) if replica.last_failure]
    last = f"; a replica waits: {waiting[0]}" if waiting else ""
    raise ServeError(
        f"{spec.serve.url} did not answer within {seconds:g} s (application: {application_status()}){last}"
    )


def wait_until_ready(spec: ServiceSpec, count: int, seconds: float) -> None:
    """Return when that many replicas are ready; ServeError on timeout."""
    deadline = time.monotonic() + seconds
    while (ready := sum(replica.ready for replica in replicas(spec))) < count:
        if time.monotonic() > deadline:
            raise ServeError(f"expected {count} replicas to be ready within {seconds:g} s, got {ready}")
        time.sleep(0.1)


def shutdown() -> None:
    """End the service; harmless if there is none."""
    serve.shutdown()  # type: ignore[no-untyped-call]


def _application(spec: ServiceSpec) -> Any:
    scaling: dict[str, Any] = {"num_replicas": spec.serve.replicas}
    if spec.serve.max_replicas is not None:
        scaling = {
            "autoscaling_config": {
                "min_replicas": spec.serve.replicas,
                "max_replicas": spec.serve.max_replicas,
                "target_ongoing_requests": spec.serve.target_requests,
                "upscale_delay_s": spec.serve.scale_up_seconds,
                "downscale_delay_s": spec.serve.scale_down_seconds,
            }
        }
    deployment: Any = serve.deployment(
        serve.ingress()(Replica),
        name=DEPLOYMENT,
        ray_actor_options={"num_cpus": spec.serve.num_cpus, "num_gpus": spec.serve.num_gpus},
        max_ongoing_requests=4 * spec.serve.max_queue,  # ours returns 429 first; Serve's own limit is a bare 503
        graceful_shutdown_timeout_s=spec.serve.timeout_seconds,
        logging_config=_QUIET,
        health_check_period_s=2,
        health_check_timeout_s=10,
        **scaling,
    )
    return deployment.bind(spec)
