"""What supervisors are told about the daemon: `/healthz` and `/readyz`."""

import json
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest
from support.servers.monitored import OPENER, Clock

from mqmk.daemon.config.sections import Config, Metrics, Ray, State
from mqmk.daemon.ledger.ledger import Ledger
from mqmk.daemon.metrics.probes import Probes
from mqmk.daemon.metrics.server import serve_metrics
from mqmk.deploy.serving.settings import ServeSettings
from mqmk.deploy.serving.telemetry.heartbeat import ReplicaStatus, StatusFile


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return replace(Config(), state=State(tmp_path), metrics=Metrics(port=0, stalled_seconds=120))


@pytest.fixture(autouse=True)
def ledger(config: Config):
    opened = Ledger(config.ledger_file, Clock(1_700_000_000.0))
    opened.set_health("ray", True)
    opened.set_health("state", True)
    yield opened
    opened.close()


@pytest.fixture
def clock() -> Clock:
    return Clock(1000.0)


@pytest.fixture
def probes(config: Config, clock: Clock) -> Probes:
    return Probes(config, config.ledger_file, clock)


def reports(config: Config, ready: bool, failure: str | None = None) -> None:
    StatusFile(config.state.dir / "replicas", "r1").write(ReplicaStatus("r1", 1, ready, last_failure=failure))


def test_a_loop_that_turns_is_healthy_and_one_that_hangs_is_not(probes, clock):
    clock.now += 100  # still starting
    assert probes.healthz().status == 200
    probes.record_pass()
    clock.now += 120 + 30  # the longest pause, and the patience
    assert (probes.healthz().status, probes.healthz().body["last_pass_age_seconds"]) == (200, 150.0)
    clock.now += 1
    hung = probes.healthz()
    assert (hung.status, hung.body["code"], hung.body["last_pass_age_seconds"]) == (503, "stalled", 151.0)
    assert "no pass for 151 s" in hung.body["error"]
    probes.record_pass()
    assert probes.healthz().status == 200


def test_a_start_that_hangs_is_not_healthy(probes, clock):
    clock.now += 151
    assert probes.healthz().status == 503


def test_a_daemon_that_trains_in_its_own_loop_is_not_called_hung(config, clock):
    probes = Probes(replace(config, ray=Ray(address="none")), config.ledger_file, clock)
    probes.record_pass()
    clock.now += 86_400
    assert (probes.healthz().status, probes.readyz().status) == (200, 200)


def test_dependencies_are_reported_with_reason_and_time_and_are_no_reason_to_restart(probes, ledger):
    ledger.set_health("mlflow", False, "http://me:geheim@mlflow:5000 does not answer")
    probes.record_pass()
    found = probes.healthz()
    assert found.status == 200
    down = found.body["dependencies"]["mlflow"]
    assert (down["up"], down["since"]) == (False, "2023-11-14T22:13:20Z")
    assert "does not answer" in down["reason"] and "geheim" not in json.dumps(found.body)
    assert found.body["dependencies"]["ray"] == {"up": True, "reason": None, "since": "2023-11-14T22:13:20Z"}


def test_a_ledger_that_cannot_be_read_is_reported_and_no_reason_to_restart(config, tmp_path):
    found = Probes(config, tmp_path / "absent.sqlite").healthz()
    assert found.status == 200 and not found.body["dependencies"]["ledger"]["up"]


def test_the_daemon_is_ready_once_it_has_started_and_a_replica_is_ready(probes, config, ledger):
    assert probes.readyz().body["code"] == "starting"
    probes.record_pass()
    assert (probes.readyz().status, probes.readyz().body["code"]) == (503, "no_replica")
    reports(config, ready=False, failure="version 7 is damaged")
    assert "version 7 is damaged" in probes.readyz().body["error"]
    reports(config, ready=True)
    assert (probes.readyz().status, probes.readyz().body["ready"]) == (200, True)
    ledger.set_health("mlflow", False, "away")
    assert probes.readyz().status == 200
    ledger.set_health("ray", False, "the head died")
    found = probes.readyz()
    assert (found.status, found.body["code"]) == (503, "ray_unavailable") and "the head died" in found.body["error"]


def test_a_daemon_that_hangs_is_not_ready(probes, config, clock):
    reports(config, ready=True)
    probes.record_pass()
    clock.now += 151
    assert probes.readyz().body["code"] == "stalled"


def test_a_daemon_that_serves_nothing_needs_no_replica(config):
    probes = Probes(replace(config, serve=ServeSettings(enabled=False)), config.ledger_file)
    probes.record_pass()
    assert probes.readyz().status == 200


def asked(url: str) -> tuple[int, str, dict]:
    try:
        with OPENER.open(url, timeout=10) as answer:
            return answer.status, answer.headers["Content-Type"], json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers["Content-Type"], json.load(error)


def test_both_are_answered_over_http_beside_the_metrics(config):
    server = serve_metrics(config, config.ledger_file)
    try:
        assert asked(f"http://{server.target}/readyz")[:2] == (503, "application/json")
        server.record_pass(0.1)
        status, kind, body = asked(f"http://{server.target}/healthz")
        assert (status, kind, body["ok"]) == (200, "application/json", True) and body["last_pass_age_seconds"] < 5
        reports(config, ready=True)
        assert asked(f"http://{server.target}/readyz")[0] == 200
        with OPENER.open(server.url, timeout=10) as page:
            assert b"mqmk_ledger_up 1.0" in page.read()
    finally:
        server.close()


def test_a_server_on_version_six_answers(config):
    server = serve_metrics(replace(config, metrics=Metrics(host="::1", port=0)), config.ledger_file)
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(server.url, timeout=10) as page:
            assert page.status == 200 and server.target.startswith("[::1]:")
    finally:
        server.close()
