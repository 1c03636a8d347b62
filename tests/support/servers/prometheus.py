"""A real Prometheus and Alertmanager with the shipped files, and a webhook that receives alerts."""

import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.servers.monitored import needed, running

from mqmk.daemon.ports import free_port

DEPLOY = Path(__file__).resolve().parents[3] / "deploy"


@contextmanager
def webhook() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A webhook's URL, and the alerts it received."""
    told: list[dict[str, Any]] = []

    class Person(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            told.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Log nothing."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Person)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/alerts", told
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def watched(folder: Path, targets: Path, tell: str, look_seconds: int = 1) -> Iterator[str]:
    """Prometheus and Alertmanager with the shipped files but shorter intervals; yields the address of Prometheus."""
    prometheus, alertmanager, ours, theirs = (
        needed("prometheus"), needed("prometheus-alertmanager"), free_port(), free_port()
    )  # fmt: skip
    rules = (DEPLOY / "prometheus" / "prometheus.yml").read_text()
    for shipped, here in (("/var/lib/mqmk/prometheus-targets.json", str(targets)), ("15s", f"{look_seconds}s"),
                          ("127.0.0.1:9093", f"127.0.0.1:{theirs}")):  # fmt: skip
        assert shipped in rules
        rules = rules.replace(shipped, here)
    (folder / "prometheus.yml").write_text(rules)
    (folder / "alerts.yml").write_text((DEPLOY / "prometheus" / "alerts.yml").read_text())
    route = (DEPLOY / "alertmanager" / "alertmanager.yml").read_text()
    route = route.replace("http://127.0.0.1:9099/alerts", tell).replace("30s", "0s").replace("10s", "0s")
    (folder / "alertmanager.yml").write_text(route)
    watching = [prometheus, f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'tsdb'}",
                f"--web.listen-address=127.0.0.1:{ours}", "--log.level=error"]  # fmt: skip
    telling = [alertmanager, f"--config.file={folder / 'alertmanager.yml'}", f"--storage.path={folder / 'told'}",
               f"--web.listen-address=127.0.0.1:{theirs}", "--cluster.listen-address="]  # fmt: skip
    with running(telling, f"http://127.0.0.1:{theirs}/-/ready"), running(watching, f"http://127.0.0.1:{ours}/-/ready"):
        yield f"http://127.0.0.1:{ours}"


def heard(told: list[dict[str, Any]], alert: str) -> list[dict[str, Any]]:
    """Notifications about one alert."""
    every = [each for message in told for each in message["alerts"]]
    return [each for each in every if each["labels"]["alertname"] == alert]
