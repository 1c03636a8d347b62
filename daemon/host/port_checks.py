"""Are the ports of the HTTP API and of the metrics free, ours, or taken?"""

import errno
from typing import Final
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, build_opener

from mqmk.daemon.config.sections import Config
from mqmk.daemon.host.finding import CheckResult
from mqmk.daemon.host.lock import lock_owner
from mqmk.daemon.ports import try_to_listen
from mqmk.daemon.ray_runtime.processes import is_alive
from mqmk.deploy.serving.telemetry.heartbeat import deployed_service

ANSWER_SECONDS: Final = 5.0  # for one connection
TAKEN_OVER: Final = "an earlier daemon of this state directory left its service running there; it will be taken over"


def serve_port(config: Config) -> CheckResult:
    """The port of the HTTP API is free, or this state directory's own service listens on it."""
    if not config.serve.enabled or config.ray.address == "none":
        return "ok", "serving is off", ""
    host, port = config.serve.host, config.serve.port
    if (result := _check_free(host, port, "serve")) is not None:
        return result
    local = config.ray.address == "local"
    if local and _serves_at(config, port):
        return "ok", f"{host}:{port} is ours" + (f": {TAKEN_OVER}" if lock_owner(config.state.dir) is None else ""), ""
    other = b'"mqmk-daemon"' in _fetch(host, port, "/openapi.json")  # which needs no API key
    if other and not local:
        return "ok", f"{host}:{port} is ours", ""
    return _report_in_use("serve", host, port, "the service of another state directory" if other else "another program")


def metrics_port(config: Config) -> CheckResult:
    """The port of the metrics is free, or this state directory's own daemon listens on it."""
    host, port = config.metrics.host, config.metrics.port
    if (result := _check_free(host, port, "metrics")) is not None:
        return result
    owner = lock_owner(config.state.dir)
    if owner and owner.metrics_url and urlsplit(owner.metrics_url).port == port:
        return "ok", f"{host}:{port} is ours", ""
    other = b"mqmk_" in _fetch(host, port, "/metrics")
    return _report_in_use(
        "metrics", host, port, "the daemon of another state directory" if other else "another program"
    )


def _check_free(host: str, port: int, section: str) -> CheckResult | None:
    """None if something listens there."""
    if port == 0:
        return "ok", "any free port", ""
    try:
        try_to_listen(host, port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return None
        to_do = f"choose another {section}.host or {section}.port"
        return "fail", f"cannot listen at {host}:{port}: {error.strerror}", to_do
    return "ok", f"{host}:{port} is free", ""


def _serves_at(config: Config, port: int) -> bool:
    """Whether the Ray head of this state directory is alive and its service was started on this port."""
    from mqmk.daemon.ray_runtime.head import find_head

    head = find_head(config.ray_folder)
    url = deployed_service(config.pools_folder.parent / "replicas").get("url", "")
    return head is not None and is_alive(head.leader) and urlsplit(url).port == port


def _report_in_use(section: str, host: str, port: int, who: str) -> CheckResult:
    end = "`mqmk-daemon stop --state THAT` stops it" if "state directory" in who else (
        f"see which: ss -ltnp 'sport = :{port}'"
    )  # fmt: skip
    return "fail", f"{who} listens at {host}:{port}", f"choose another port (--set {section}.port=...), or {end}"


def _fetch(host: str, port: int, path: str) -> bytes:
    here = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "::1": "[::1]"}.get(host, host)
    try:
        with build_opener(ProxyHandler({})).open(f"http://{here}:{port}{path}", timeout=ANSWER_SECONDS) as reply:
            return bytes(reply.read(2**20))
    except (OSError, ValueError):  # HTTPError and URLError are OSErrors
        return b""
