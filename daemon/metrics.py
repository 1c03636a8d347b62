"""Where the daemon's metrics can be scraped: `/metrics` over HTTP, and a file that tells Prometheus all targets.

    server = serve_metrics(config, config.ledger_file)      # loopback unless configured otherwise; never raises
    scrape_file(config.state.dir, server.target, ray)       # <state>/prometheus-targets.json, for file_sd_configs
    server.passed(seconds)                                  # after each turn of the loop
    server.close()

Every scrape reads the ledger by a connection of its own, so the daemon's loop neither waits nor counts anything.
"""

import json
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server

from mqmk.daemon.config import Config
from mqmk.daemon.logs import event
from mqmk.daemon.metrics_collector import DaemonCollector
from mqmk.daemon.metrics_files import FilesReader
from mqmk.daemon.metrics_ledger import LedgerReader
from mqmk.matcher.durable import replace_file

log = logging.getLogger(__name__)
TARGETS: Final = "prometheus-targets.json"


@dataclass(frozen=True)
class Server:
    """A running metrics endpoint, or none where no port could be had."""

    collector: DaemonCollector
    target: str | None
    """Address and port, as Prometheus writes them."""
    _http: WSGIServer | None = None
    _thread: threading.Thread | None = None

    @property
    def url(self) -> str | None:
        """Where to look."""
        return f"http://{self.target}/metrics" if self.target else None

    def passed(self, seconds: float, *, failed: bool = False) -> None:
        """The daemon's loop came round once, in so many seconds."""
        self.collector.passed(seconds, failed=failed)

    def close(self) -> None:
        """Stop listening."""
        if self._http and self._thread:
            self._http.shutdown()
            self._http.server_close()
            self._thread.join()


def serve_metrics(config: Config, ledger: Path, clock: Callable[[], float] = time.time) -> Server:
    """Listen at the configured address; if its port is taken, at a free one; if that fails, log it and go on."""
    collector = DaemonCollector(config, LedgerReader(ledger), FilesReader(config), clock)
    registry = CollectorRegistry()
    registry.register(collector)
    ProcessCollector(registry=registry)
    wanted = config.metrics
    for port in (wanted.port, 0):
        try:
            http, thread = start_http_server(port, wanted.host, registry)
        except OSError as error:
            _refused(wanted.host, port, error)
            continue
        target = _target(wanted.host, http.server_port)
        log.info(f"metrics at http://{target}/metrics", extra=event("metrics.listening", target=target))
        return Server(collector, target, http, thread)
    return Server(collector, None)


def scrape_file(folder: Path, daemon: str | None, ray: str | None) -> Path:
    """Write which targets Prometheus is to scrape, if that changed; a full disk is logged and no reason to stop."""
    path = folder / TARGETS
    targets = [{"targets": [target], "labels": {"part": part}} for part, target in (("daemon", daemon), ("ray", ray))
               if target]  # fmt: skip
    text = (json.dumps(targets, indent=2) + "\n").encode()
    try:
        if not path.exists() or path.read_bytes() != text:
            replace_file(path, text)
            path.chmod(0o644)  # Prometheus is another user; it holds addresses only
    except OSError as error:
        log.warning(f"Prometheus is not told its targets: {error}", extra=event("metrics.targets", path=str(path)))
    return path


def _target(host: str, port: int) -> str:
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    return f"[{reachable}]:{port}" if ":" in reachable else f"{reachable}:{port}"


def _refused(host: str, port: int, error: OSError) -> None:
    if port:
        text = f"metrics cannot be at {host}:{port} ({error.strerror}); a free port is taken now, or set metrics.port"
    else:
        text = f"there are no metrics: {host} cannot be listened at ({error.strerror}); set metrics.host"
    log.warning(text, extra=event("metrics.refused", host=host, port=port))
