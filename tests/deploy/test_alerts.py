"""Alerts: each fires and stays silent as it should, says what to do, and reaches a person."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml
from support.servers.monitored import lived_in, needed, wait_for
from support.servers.prometheus import heard, watched, webhook

from mqmk.daemon.metrics.server import serve_metrics, write_targets

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


def test_a_quarantined_task_reaches_a_person_through_prometheus_and_alertmanager(tmp_path: Path) -> None:
    config, ledger, clock = lived_in(tmp_path / "state")
    server = serve_metrics(config, config.ledger_file, clock)
    targets = write_targets(config.state.dir, server.target, None)
    with webhook() as (url, told), watched(tmp_path, targets, url):
        wait_for(lambda: heard(told, "MqmkTaskQuarantined"), 30, "the alert to arrive")
    server.close()
    ledger.close()
    first = heard(told, "MqmkTaskQuarantined")[0]
    assert first["status"] == "firing" and first["labels"]["code"] == "truncated"
    assert "mqmk-daemon retry" in first["annotations"]["action"]
