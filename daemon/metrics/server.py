"""The daemon's HTTP endpoint (`/metrics`, `/healthz`, `/readyz`), and the file of all scrape targets.

    server = serve_metrics(config, config.ledger_file)      # loopback unless configured otherwise; DaemonError if taken
    write_targets(config.state.dir, server.target, ray)     # <state>/prometheus-targets.json, for file_sd_configs
    server.record_pass(seconds)                                  # after each pass of the loop
    server.close()

Every scrape reads the ledger through its own connection, so the daemon's loop neither waits nor counts anything.
"""

import errno
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app

from mqmk.daemon.config.sections import Config
from mqmk.daemon.errors import DaemonError
from mqmk.daemon.logs import event
from mqmk.daemon.metrics.collector import DaemonCollector
from mqmk.daemon.metrics.ledger_reader import LedgerReader
from mqmk.daemon.metrics.probes import ProbeAnswer, Probes
from mqmk.daemon.metrics.state_reader import StateReader
from mqmk.matcher.durable import replace_file

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

log = logging.getLogger(__name__)
TARGETS: Final = "prometheus-targets.json"


@dataclass(frozen=True)
class Server:
    """The running endpoint for metrics and probes."""

    collector: DaemonCollector
    probes: Probes
    target: str
    """Host and port, as Prometheus writes them."""
    _http: WSGIServer
    _thread: threading.Thread

    @property
    def url(self) -> str:
        """Of the metrics."""
        return f"http://{self.target}/metrics"

    def record_pass(self, seconds: float, *, failed: bool = False) -> None:
        """The loop has finished a pass of this duration."""
        self.collector.record_pass(seconds, failed=failed)
        self.probes.record_pass()

    def close(self) -> None:
        """Stop listening."""
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


def serve_metrics(config: Config, ledger: Path, clock: Callable[[], float] = time.time) -> Server:
    """Listen at the configured address; DaemonError says what to do if that fails."""
    collector = DaemonCollector(config, LedgerReader(ledger), StateReader(config), clock)
    registry = CollectorRegistry()
    registry.register(collector)
    ProcessCollector(registry=registry)
    probes, host = Probes(config, ledger), config.metrics.host
    http = _listen(host, config.metrics.port, _application(probes, make_wsgi_app(registry)))
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    target = _target(host, http.server_port)
    log.info(f"metrics at http://{target}/metrics", extra=event("metrics.listening", target=target))
    return Server(collector, probes, target, http, thread)


def write_targets(folder: Path, daemon: str | None, ray: str | None) -> Path:
    """Write the targets for Prometheus if they changed; a full disk is logged and is no reason to stop."""
    path = folder / TARGETS
    targets = [{"targets": [target], "labels": {"part": part}} for part, target in (("daemon", daemon), ("ray", ray))
               if target]  # fmt: skip
    text = (json.dumps(targets, indent=2) + "\n").encode()
    try:
        if not path.exists() or path.read_bytes() != text:
            replace_file(path, text)
            path.chmod(0o644)  # Prometheus is another user; the file holds addresses only
    except OSError as error:
        log.warning(
            f"cannot write the targets for Prometheus: {error}",
            extra=event("metrics.targets_not_written", path=str(path)),
        )
    return path


def _target(host: str, port: int) -> str:
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    return f"[{reachable}]:{port}" if ":" in reachable else f"{reachable}:{port}"


class _Threads(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _ThreadsV6(_Threads):
    address_family = socket.AF_INET6


class _Quiet(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a line for every scrape would flood the log."""


def _listen(host: str, port: int, application: "WSGIApplication") -> WSGIServer:
    server = _ThreadsV6 if ":" in host else _Threads
    try:
        return make_server(host, port, application, server, _Quiet)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            what = f"another program listens at {host}:{port}, the address of the metrics; choose another port "
            to_do = f"(--set metrics.port=..., 0 takes a free one), or see which: ss -ltnp 'sport = :{port}'"
            raise DaemonError(what + to_do) from error
        raise DaemonError(f"cannot serve metrics at {host}:{port}: {error.strerror}; set metrics.host") from error


def _application(probes: Probes, metrics: "WSGIApplication") -> "WSGIApplication":
    answers = {"/healthz": probes.healthz, "/readyz": probes.readyz}

    def application(environ: "WSGIEnvironment", start_response: "StartResponse") -> Iterable[bytes]:
        probe = answers.get(environ["PATH_INFO"])
        return metrics(environ, start_response) if probe is None else _send(probe(), start_response)

    return application


def _send(answer: ProbeAnswer, start_response: "StartResponse") -> Iterable[bytes]:
    status = HTTPStatus(answer.status)
    start_response(f"{status.value} {status.phrase}", [("Content-Type", "application/json")])
    return [json.dumps(answer.body).encode()]
