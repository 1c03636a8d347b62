"""Dashboards: the checked-in files are what the generator gives, and every query finds data in a real Prometheus."""

import json
import math
import re
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from support.servers.monitored import (
    ask,
    filled,
    learn,
    lived_in,
    needed,
    replica_twin,
    running,
    wait_for,
    write_pool_card,
)

from mqmk.daemon.metrics.declared import DAEMON_METRICS
from mqmk.daemon.metrics.server import serve_metrics, write_targets
from mqmk.daemon.ports import free_port
from mqmk.deploy.grafana.generator.__main__ import BOARDS, as_text, render
from mqmk.deploy.serving.telemetry.declared import RAY_OWN_METRICS, RAY_PREFIX, REPLICA_METRICS

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy" / "grafana" / "dashboards"
PANELS = [panel for board in BOARDS for row in board.rows for panel in row.panels]
KNOWN = (
    {each.name for each in DAEMON_METRICS}
    | {RAY_PREFIX + each.name for each in REPLICA_METRICS}
    | set(RAY_OWN_METRICS)
    | {"up", "ALERTS", "process_resident_memory_bytes"}
)


def names_in(expr: str) -> set[str]:
    """The metrics that a query reads."""
    words = re.findall(r"[a-zA-Z_:][\w:]*(?=[{\[\s),]|$)", re.sub(r'"[^"]*"|\{[^}]*\}', "", expr))
    found = {word for word in words if word.startswith(("mqmk_", "ray_", "process_")) or word in ("up", "ALERTS")}
    return {re.sub(r"_(bucket|sum|count)$", "", name) if name not in KNOWN else name for name in found}


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.uid)
def test_a_checked_in_dashboard_is_what_the_generator_gives(board) -> None:
    assert (FOLDER / f"{board.uid}.json").read_text() == render(board), (
        "python -m mqmk.deploy.grafana.generator.__main__ deploy/grafana/dashboards"
    )


def test_no_dashboard_is_checked_in_that_the_generator_does_not_give() -> None:
    assert {path.stem for path in FOLDER.glob("*.json")} == {board.uid for board in BOARDS}


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.uid)
def test_a_dashboard_is_read_by_the_sdks_types_without_losing_anything(board) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from grafana_foundation_sdk.models.dashboard import Dashboard
    text = (FOLDER / f"{board.uid}.json").read_text()
    assert json.loads(as_text(Dashboard.from_json(json.loads(text)))) == json.loads(text)


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.uid)
def test_a_dashboard_follows_grafanas_own_schema(board) -> None:
    """Made from the types of npm's @grafana/schema 13.2.3 (Apache-2.0) by ts-json-schema-generator, type Dashboard."""
    schema = json.loads(Path(__file__).with_name("grafana_dashboard.schema.json").read_text())
    found = json.loads((FOLDER / f"{board.uid}.json").read_text())
    for annotation in found["annotations"]["list"]:
        del annotation["target"]  # there the schema knows only Grafana's own annotations, not those of a data source
    jsonschema.validate(found, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(found | {"panels": [{"type": 7}]}, schema)


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.uid)
def test_panels_have_a_description_an_id_a_place_of_their_own_and_the_chosen_data_source(board) -> None:
    panels = json.loads((FOLDER / f"{board.uid}.json").read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells: set[tuple[int, int]] = set()
    for panel in panels:
        if panel["type"] == "row":
            continue
        assert len(panel["description"]) > 20 and panel["description"].endswith("."), panel["title"]
        assert all(target["datasource"]["uid"] == "${datasource}" for target in panel["targets"])
        place = panel["gridPos"]
        own = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not own & cells and max(x for x, _ in own) < 24, panel["title"]
        cells |= own


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel.title)
def test_a_panel_reads_only_declared_metrics(panel) -> None:
    for query in panel.queries:
        assert names_in(query.expr) and names_in(query.expr) <= KNOWN, query.expr


def test_every_declared_metric_is_looked_at_or_used_by_an_alert() -> None:
    rules = (ROOT / "deploy" / "prometheus" / "alerts.yml").read_text()
    looked_at = {name for panel in PANELS for query in panel.queries for name in names_in(query.expr)}
    unused = {name for name in KNOWN - looked_at if name not in rules}
    assert unused <= {
        "mqmk_daemon_start_timestamp_seconds", "mqmk_pool_created_timestamp_seconds", "mqmk_heldout_images",
        "mqmk_unknown_threshold", "mqmk_training_epochs_total", "ray_node_cpu_count", "ray_node_gram_used",
    }  # fmt: skip


def test_the_annotation_of_new_versions_is_on_every_dashboard() -> None:
    for board in BOARDS:
        shown = json.loads((FOLDER / f"{board.uid}.json").read_text())["annotations"]["list"]
        assert any("mqmk_pool_version" in each["target"]["expr"] for each in shown)


def test_provisioning_files_name_what_exists() -> None:
    folder = ROOT / "deploy" / "grafana" / "provisioning"
    source = yaml.safe_load((folder / "datasources" / "prometheus.yml").read_text())["datasources"][0]
    provider = yaml.safe_load((folder / "dashboards" / "mqmk.yml").read_text())["providers"][0]
    assert source["type"] == "prometheus" and source["url"].startswith("http://127.0.0.1")
    assert provider["type"] == "file" and provider["options"]["path"]


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real Prometheus with our own configuration, which scrapes a daemon's metrics and the twin of its replicas."""
    program, folder = needed("prometheus"), tmp_path_factory.mktemp("prometheus")
    config, ledger, clock = lived_in(folder / "state")
    server, port = serve_metrics(config, config.ledger_file, clock), free_port()
    settings = (ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text()
    with replica_twin() as twin:
        targets = write_targets(config.state.dir, server.target, twin)
        settings = settings.replace("/var/lib/mqmk/prometheus-targets.json", str(targets)).replace("15s", "1s")
        (folder / "prometheus.yml").write_text(settings)
        (folder / "alerts.yml").write_text((ROOT / "deploy" / "prometheus" / "alerts.yml").read_text())
        url = f"http://127.0.0.1:{port}"
        command = [program, f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}",
                   f"--web.listen-address=127.0.0.1:{port}", "--log.level=error"]  # fmt: skip
        with running(command, f"{url}/-/ready"):
            wait_for(lambda: len(ask(url, "up == 1")) == 2, 20, "both targets to be scraped")
            server.record_pass(0.1)
            learn(ledger, clock, "late", 4, ["sea", "birds", "fruit"])
            write_pool_card(config, 4, ["sea", "birds", "fruit", "late"])
            wait_for(lambda: ask(url, "mqmk_pool_version == 4"), 20, "the new version to be scraped")
            server.record_pass(0.2)
            wait_for(
                lambda: ask(url, "increase(mqmk_pass_duration_seconds_count[1m]) > 0"), 20, "two scrapes of the loop"
            )
            wait_for(lambda: ask(url, 'ALERTS{alertname="MqmkTaskQuarantined"}'), 20, "rules to be evaluated")
            time.sleep(1.5)  # one scrape more, so that every rate has two points
            yield url
    server.close()
    ledger.close()


def has_data(found: list[dict[str, Any]]) -> bool:
    """At least one number."""
    return any(not math.isnan(float(each["value"][1])) for each in found)


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel.title)
def test_a_panel_shows_data_from_a_real_prometheus(prometheus: str, panel) -> None:
    for query in panel.queries:
        found = ask(prometheus, filled(query.expr))
        assert has_data(found), query.expr
        named = set(re.findall(r"\{\{(\w+)\}\}", query.legend))
        assert all(named <= set(each["metric"]) for each in found), f"{query.legend}: {found[0]['metric']}"


def test_the_annotation_of_new_versions_finds_the_new_version(prometheus: str) -> None:
    shown = json.loads((FOLDER / "mqmk-overview.json").read_text())["annotations"]["list"]
    assert has_data(ask(prometheus, shown[0]["target"]["expr"].replace("15s", "1s")))


def test_the_variable_of_tasks_lists_the_tasks_of_the_pool(prometheus: str) -> None:
    found = {each["metric"]["task"] for each in ask(prometheus, "mqmk_heldout_task_matching_ratio")}
    assert found == {"sea", "birds", "fruit", "late"}


def test_every_recording_rule_gives_a_number(prometheus: str) -> None:
    rules = yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts.yml").read_text())["groups"][0]["rules"]
    for rule in rules:
        assert has_data(ask(prometheus, rule["record"])), rule["record"]
