"""The whole system under monitoring: a daemon learns and serves, Prometheus scrapes it, and every query finds its data.

Runs with OBSERVE_TEST=1 (`make observe-test`, about five minutes); `make test` has short versions in tests/deploy.
OBSERVE_IMAGES=folder also renders the dashboards as PNG files there, after OBSERVE_TASKS tasks (10) instead of three.
"""

import json
import math
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from support.daemons.live_system import System, run_system
from support.servers.monitored import ask, get, wait_for
from support.servers.panel_images import Moments, page, photograph
from support.servers.prometheus import heard

from mqmk.daemon.metrics.declared import DAEMON_METRICS
from mqmk.deploy.grafana.generator.__main__ import BOARDS
from mqmk.deploy.grafana.generator.panels import Board, Panel
from mqmk.deploy.serving.telemetry.declared import RAY_PREFIX, REPLICA_METRICS
from mqmk.learner.data import sketches

ROOT = Path(__file__).resolve().parents[3]
PANELS = [panel for board in BOARDS for row in board.rows for panel in row.panels]
RULES = [
    rule
    for group in yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts.yml").read_text())["groups"]
    for rule in group["rules"]
]
ALERTS = [rule for rule in RULES if "alert" in rule]
IMAGES = os.environ.get("OBSERVE_IMAGES")
TASKS = list(sketches.TASKS)[: int(os.environ.get("OBSERVE_TASKS", "10"))] if IMAGES else ["birds", "sea", "fruit"]
SETTINGS = {"serve.matcher": "cascade", "serve.agreement_share": "0.2"} | ({} if IMAGES else {"train.epochs": "3"})
AGENT_SECONDS = 45  # Ray's agent exports every ten seconds, and a rate needs several samples
NEEDS_A_GPU = "ray_node_gpus_utilization"

pytestmark = [
    pytest.mark.timeout(1500),
    pytest.mark.skipif(not os.environ.get("OBSERVE_TEST"), reason="watches a live system: make observe-test"),
]


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """A system that has learned some tasks, quarantined one and held one, under constant traffic."""
    with run_system(tmp_path_factory.mktemp("live"), SETTINGS) as found:
        found.learn(TASKS[:1])
        found.drop_bad_tasks()
        found.learn(TASKS[1:])
        found.daemon.wait_for(
            lambda: {"QUARANTINED", "HELD"} <= {*found.daemon.states().values()}, 120, "the bad tasks"
        )
        found.daemon.run("rollback", "99", check=False)  # refused: there is no such version
        time.sleep(AGENT_SECONDS)
        yield found


@pytest.fixture(scope="module")
def moments(system: System) -> Moments:
    return Moments(system.prometheus, system.began, time.time())


def numbers(moments: Moments, panel: Panel, index: int) -> int:
    """How many values a query returns: now, if the panel shows the present; otherwise over the whole run."""
    seen = moments.now if panel.look in ("stat", "table", "matrix") else moments.lines
    return sum(len(line.points) for line in seen(panel.queries[index]))


def test_prometheus_reaches_the_daemon_and_the_agent_of_ray_through_the_targets_file(system: System) -> None:
    targets = json.loads((system.daemon.state / "prometheus-targets.json").read_text())
    assert {target["labels"]["part"] for target in targets} == {"daemon", "ray"}
    assert {each["metric"]["part"] for each in ask(system.prometheus, 'up{job="mqmk"} == 1')} == {"daemon", "ray"}


@pytest.mark.parametrize("metric", DAEMON_METRICS, ids=lambda metric: metric.name)
def test_every_declared_metric_of_the_daemon_is_exported(moments: Moments, metric) -> None:
    name = metric.name + ("_count" if metric.kind == "histogram" else "")
    assert ask(moments.server, f"count(last_over_time({name}[1h]))"), name


@pytest.mark.parametrize("metric", REPLICA_METRICS, ids=lambda metric: metric.name)
def test_every_declared_metric_of_the_replicas_is_exported(moments: Moments, metric) -> None:
    name = RAY_PREFIX + metric.name + ("_count" if metric.kind == "histogram" else "")
    found = ask(moments.server, f"last_over_time({name}[1h])")
    assert found and set(metric.labels) <= set(found[0]["metric"]), name


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel.title)
def test_a_panel_shows_data_of_the_live_system(moments: Moments, panel: Panel) -> None:
    if any(NEEDS_A_GPU in query.expr for query in panel.queries) and not ask(moments.server, NEEDS_A_GPU):
        pytest.skip("this machine has no GPU")
    for index, query in enumerate(panel.queries):
        assert numbers(moments, panel, index), query.expr


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel.title)
def test_a_legend_names_labels_that_the_series_have(moments: Moments, panel: Panel) -> None:
    for query in panel.queries:
        for line in moments.lines(query):
            assert set(re.findall(r"\{\{(\w+)\}\}", query.legend)) <= set(line.labels), query.expr


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.get("record") or rule["alert"])
def test_a_rule_reads_only_what_the_live_system_exports(moments: Moments, rule) -> None:
    """An inactive alert returns nothing, so each series that it compares is queried separately."""
    if "record" in rule:
        found = ask(moments.server, rule["record"])
        assert found and not math.isnan(float(found[0]["value"][1])), rule["record"]
    for selector in selectors(rule["expr"]):
        assert ask(moments.server, f"count(last_over_time({selector}[1h]))"), selector


def selectors(expr: str) -> set[str]:
    """The series that a rule reads, except those that exist only after failed requests."""
    found = re.findall(r"\b(?:ray_mqmk_|mqmk_|mqmk:|up\b)[\w:]*(?:\{[^}]*\})?", expr)
    assert found, expr
    return {each for each in found if "5.." not in each}


def test_no_rule_reports_an_error(system: System) -> None:
    with_rules = json.loads(get(f"{system.prometheus}/api/v1/rules"))["data"]["groups"]
    rules = [rule for group in with_rules for rule in group["rules"]]
    assert len(rules) == len(RULES)
    assert {rule["health"] for rule in rules} == {"ok"}, [rule["lastError"] for rule in rules if rule.get("lastError")]


def test_a_quarantined_and_a_held_task_reach_a_person(system: System) -> None:
    wait_for(lambda: heard(system.alerts, "MqmkTaskHeld"), 30, "the alert about the held task")
    torn = heard(system.alerts, "MqmkTaskQuarantined")[0]
    assert torn["status"] == "firing" and "mqmk-daemon retry" in torn["annotations"]["action"]
    assert torn["labels"]["code"] == system.daemon.status()["tasks"][_task_index(system, "torn")]["code"]


def test_the_labelled_and_the_estimated_rate_are_near_the_true_rate_of_the_traffic(system, moments: Moments) -> None:
    """The traffic knows the true task of every image; feedback was sent for a third of the answers."""
    true = system.traffic.matched / system.traffic.asked
    labelled = rate(moments, 'ray_mqmk_labelled_matches_total{result="matched"}', "ray_mqmk_labelled_matches_total")
    estimated = rate(moments, "ray_mqmk_estimated_matches_total", "ray_mqmk_estimated_answers_total")
    print(f"\nof {system.traffic.asked} answers {true:.1%} are matched correctly; labelled {labelled:.1%}, "
          f"estimated {estimated:.1%}")  # fmt: skip
    assert labelled == pytest.approx(true, abs=0.08)
    assert estimated == pytest.approx(true, abs=0.05)


def rate(moments: Moments, part: str, whole: str) -> float:
    return float(ask(moments.server, f"sum({part}) / sum({whole})")[0]["value"][1])


@pytest.mark.skipif(not IMAGES, reason="OBSERVE_IMAGES=folder renders the dashboards there")
def test_images_of_the_dashboards_are_rendered(moments: Moments) -> None:
    folder = Path(IMAGES or "")
    folder.mkdir(parents=True, exist_ok=True)
    photograph({image_name(board): page(board, moments) for board in BOARDS}, folder)
    for board in BOARDS:
        assert 5_000 < (folder / f"{image_name(board)}.png").stat().st_size < 150_000


def image_name(board: Board) -> str:
    return board.uid.replace("mqmk", "monitoring")


def _task_index(system: System, name: str) -> int:
    return [task["name"] for task in system.daemon.status()["tasks"]].index(name)
