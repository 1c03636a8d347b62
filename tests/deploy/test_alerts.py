"""Alerts: each fires and stays silent as it should, says what to do, and reaches a person."""

import http.server
import json
import re
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from monitored import lived_in, needed, running, wait_for
from ports import free_port

from mqmk.daemon.metrics import scrape_file, serve_metrics

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "deploy" / "prometheus"
ALERTS = [rule for group in yaml.safe_load((RULES / "alerts.yml").read_text())["groups"] for rule in group["rules"]
          if "alert" in rule]  # fmt: skip


def tool(*command: str) -> str:
    """What a checking program says; it must be content."""
    done = subprocess.run([needed(command[0]), *command[1:]], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_prometheus_and_alertmanager_accept_their_files() -> None:
    tool("promtool", "check", "rules", str(RULES / "alerts.yml"))
    tool("promtool", "check", "config", "--syntax-only", str(RULES / "prometheus.yml"))
    tool("amtool", "check-config", str(ROOT / "deploy" / "alertmanager" / "alertmanager.yml"))


def test_each_alert_fires_and_stays_silent_as_it_should() -> None:
    tool("promtool", "test", "rules", str(RULES / "alerts.test.yml"))


def test_every_alert_has_a_case_in_which_it_fires() -> None:
    cases = (RULES / "alerts.test.yml").read_text()
    assert set(re.findall(r'\{alertname="(\w+)"\}', cases)) == {rule["alert"] for rule in ALERTS}


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_an_alert_says_how_urgent_it_is_what_to_do_and_where_to_read_more(rule) -> None:
    assert rule["labels"]["severity"] in ("page", "ticket") and "for" in rule
    assert len(rule["annotations"]["summary"]) > 15 and len(rule["annotations"]["action"]) > 15
    file, _, section = rule["annotations"]["runbook"].partition("#")
    text = (ROOT / file).read_text()
    part = re.search(rf"^## {rule['alert']}$(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert section == rule["alert"].lower() and part, f"{file} has no section {rule['alert']}"
    assert "mqmk-daemon" in part[1], "the section says what to type"


@pytest.fixture
def webhook() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Somebody to tell, and what they were told."""
    told: list[dict[str, Any]] = []

    class Person(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            told.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Person)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/alerts", told
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_quarantined_task_reaches_a_person_through_prometheus_and_alertmanager(tmp_path: Path, webhook) -> None:
    prometheus, alertmanager = needed("prometheus"), needed("prometheus-alertmanager")
    url, told = webhook
    config, ledger, clock = lived_in(tmp_path / "state")
    server, ours, theirs = serve_metrics(config, config.ledger_file, clock), free_port(), free_port()
    targets = scrape_file(config.state.dir, server.target, None)
    rules = (RULES / "prometheus.yml").read_text().replace("/var/lib/mqmk/prometheus-targets.json", str(targets))
    (tmp_path / "prometheus.yml").write_text(
        rules.replace("15s", "1s").replace("127.0.0.1:9093", f"127.0.0.1:{theirs}")
    )
    (tmp_path / "alerts.yml").write_text((RULES / "alerts.yml").read_text())
    route = (ROOT / "deploy" / "alertmanager" / "alertmanager.yml").read_text()
    route = route.replace("http://127.0.0.1:9099/alerts", url).replace("30s", "0s").replace("10s", "0s")
    (tmp_path / "alertmanager.yml").write_text(route)
    watching = [prometheus, f"--config.file={tmp_path / 'prometheus.yml'}", f"--storage.tsdb.path={tmp_path / 'tsdb'}",
                f"--web.listen-address=127.0.0.1:{ours}", "--log.level=error"]  # fmt: skip
    telling = [alertmanager, f"--config.file={tmp_path / 'alertmanager.yml'}", f"--storage.path={tmp_path / 'told'}",
               f"--web.listen-address=127.0.0.1:{theirs}", "--cluster.listen-address="]  # fmt: skip

    def heard() -> list[dict[str, Any]]:
        every = [alert for message in told for alert in message["alerts"]]
        return [alert for alert in every if alert["labels"]["alertname"] == "MqmkTaskQuarantined"]

    with running(telling, f"http://127.0.0.1:{theirs}/-/ready"), running(watching, f"http://127.0.0.1:{ours}/-/ready"):
        wait_for(heard, 30, "the alert to arrive")
    server.close()
    ledger.close()
    assert heard()[0]["status"] == "firing" and heard()[0]["labels"]["code"] == "truncated"
    assert "mqmk-daemon retry" in heard()[0]["annotations"]["action"]
