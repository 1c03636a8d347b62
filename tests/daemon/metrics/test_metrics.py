"""What the daemon exports for Prometheus."""

import http.client
import json
import logging
import socket
import subprocess
import threading
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.servers.monitored import Clock, evaluation, learn, lived_in, move, needed, report, write_pool_card

from mqmk.daemon.config.sections import Config, Metrics, State
from mqmk.daemon.errors import DaemonError
from mqmk.daemon.ledger.ledger import Ledger
from mqmk.daemon.ledger.ledger import State as TaskState
from mqmk.daemon.metrics.declared import DAEMON_METRICS
from mqmk.daemon.metrics.reference_page import page
from mqmk.daemon.metrics.server import TARGETS, Server, serve_metrics, write_targets
from mqmk.deploy.serving.telemetry.declared import OTHER, REPLICA_METRICS, task_labels

ROOT = Path(__file__).resolve().parents[3]
Page = dict[str, dict[tuple[str, ...], float]]


def text(server: Server) -> str:
    """One scrape."""
    host, port = (server.target or "").split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=10)
    connection.request("GET", "/metrics")
    answer = connection.getresponse()
    body = answer.read().decode()
    connection.close()
    assert answer.status == 200
    return body


def scraped(server: Server) -> Page:
    """Name -> values of the labels, in order of their names -> value."""
    found: Page = defaultdict(dict)
    for family in text_string_to_metric_families(text(server)):
        for sample in family.samples:
            found[sample.name][tuple(value for _, value in sorted(sample.labels.items()))] = sample.value
    return found


@pytest.fixture(scope="module")
def life(tmp_path_factory: pytest.TempPathFactory):
    config, ledger, clock = lived_in(tmp_path_factory.mktemp("life"))
    server = serve_metrics(config, config.ledger_file, clock)
    yield server, ledger
    server.close()
    ledger.close()


@pytest.fixture(scope="module")
def now(life) -> Page:
    return scraped(life[0])


def alone(found: Page, name: str) -> float:
    return found[name][()]


def test_tasks_are_counted_by_state_and_those_that_wait_for_a_person_by_reason(now: Page) -> None:
    assert now["mqmk_tasks"][("SERVING",)] == 3 and now["mqmk_tasks"][("FORGOTTEN",)] == 0
    waiting = {labels: value for labels, value in now["mqmk_tasks_waiting_for_operator"].items() if value}
    assert waiting == {("truncated", "QUARANTINED"): 1, ("gate", "HELD"): 1, ("conflict", "CONFLICT"): 1}
    assert now["mqmk_tasks_waiting_for_operator"][("gave-up", "QUARANTINED")] == 0


def test_how_far_each_task_came_is_shown_and_a_twin_in_conflict_does_not_hide_the_served_one(now: Page) -> None:
    steps = {"sea": 6, "birds": 6, "fruit": 6, "bad": 0, "weak": 0, "tools": 3}
    assert now["mqmk_task_step"] == {(name,): step for name, step in steps.items()}


def test_shard_to_served_and_its_stages_come_from_the_events(now: Page) -> None:
    assert alone(now, "mqmk_task_time_to_serving_seconds_count") == 3
    assert alone(now, "mqmk_task_time_to_serving_seconds_sum") == pytest.approx(300, abs=0.01)
    assert now["mqmk_task_time_to_serving_seconds_bucket"][("120.0",)] == 3
    assert now["mqmk_task_time_to_serving_seconds_bucket"][("60.0",)] == 0
    assert now["mqmk_task_stage_seconds_sum"][("train",)] == pytest.approx(180, abs=0.01)
    assert now["mqmk_gate_results_total"] == {("passed",): 3, ("held",): 1}
    assert now["mqmk_task_transitions_total"][("TRAINING",)] == 5
    assert alone(now, "mqmk_training_epochs_total") == 3
    assert now["mqmk_commands_total"][("rollback", "REFUSED")] == 1


def test_training_and_backlog_are_shown(now: Page) -> None:
    assert now["mqmk_training_progress_ratio"] == {("tools",): 0.25}
    assert now["mqmk_training_images_per_second"] == {("tools",): 300}
    assert alone(now, "mqmk_backlog_tasks") == 1


def test_pool_and_replicas_are_shown(now: Page) -> None:
    assert [alone(now, f"mqmk_pool_{name}") for name in ("version", "tasks", "classes")] == [3, 3, 6]
    assert now["mqmk_replica_pool_version"] == {("r1",): 3}
    assert alone(now, "mqmk_replicas_skewed") == 0 and alone(now, "mqmk_replicas_ready") == 1
    assert now["mqmk_dependency_up"] == {(part,): 1 for part in ("bucket", "ray", "mlflow", "disk", "state")}
    assert now["mqmk_estimated_calibration_error_ratio"] == {("cascade",): 0.03}
    assert now["mqmk_estimated_rate_error_ratio"] == {("cascade",): 0.02}


def test_held_out_figures_are_of_the_current_version_with_what_was_forgotten(now: Page) -> None:
    assert now["mqmk_heldout_task_matching_ratio"] == {("cascade", name): 0.9 for name in ("sea", "birds", "fruit")}
    assert now["mqmk_heldout_calibration_error_ratio"] == {("cascade",): 0.034}
    lost = now["mqmk_heldout_forgetting_ratio"]
    assert [lost[(name,)] for name in ("sea", "birds", "fruit")] == pytest.approx([0.04, 0.02, 0])
    confusion = now["mqmk_heldout_confusion_images"]
    assert confusion[("sea", "sea")] == 90 and confusion[("birds", "sea")] == 5 and len(confusion) == 9


def test_everything_that_is_exported_is_declared_and_follows_prometheus_practice(life) -> None:
    families = {family.name: family for family in text_string_to_metric_families(text(life[0]))}
    declared = {each.name.removesuffix("_total"): each for each in DAEMON_METRICS}
    assert {name for name in families if name.startswith("mqmk_")} == set(declared)
    for name, each in declared.items():
        labels = {label for sample in families[name].samples for label in sample.labels} - {"le"}
        assert labels <= set(each.labels) and families[name].type == each.kind, name
    done = subprocess.run([needed("promtool"), "check", "metrics"], input=text(life[0]), capture_output=True, text=True,
                          check=False)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("metric", [*DAEMON_METRICS, *REPLICA_METRICS], ids=lambda metric: metric.name)
def test_a_declared_metric_is_named_by_its_kind_and_unit(metric) -> None:
    assert metric.name.startswith("mqmk_") and metric.name.endswith("_total") == (metric.kind == "counter")
    assert bool(metric.buckets) == (metric.kind == "histogram") and list(metric.buckets) == sorted(metric.buckets)
    for unit, suffix in (("seconds", "_seconds"), ("bytes", "_bytes"), ("ratio", "_ratio")):
        assert (metric.unit != unit) or suffix in metric.name
    assert metric.description.endswith(".") and len(metric.description) > 20


def test_the_four_kinds_of_matching_rate_have_names_of_their_own() -> None:
    kinds = ("heldout", "labelled", "estimated", "agreement")
    for metric in (*DAEMON_METRICS, *REPLICA_METRICS):
        assert sum(kind in metric.name for kind in kinds) <= 1
    assert all(any(f"mqmk_{kind}_" in metric.name for metric in (*DAEMON_METRICS, *REPLICA_METRICS)) for kind in kinds)


def test_an_empty_daemon_exports_zeros(tmp_path: Path) -> None:
    config = replace(Config(), state=State(tmp_path), metrics=Metrics(port=0))
    Ledger(config.ledger_file).close()
    server = serve_metrics(config, config.ledger_file)
    try:
        found = scraped(server)
    finally:
        server.close()
    for name in (
        "mqmk_pool_version",
        "mqmk_backlog_tasks",
        "mqmk_task_time_to_serving_seconds_count",
        "mqmk_replicas_live",
    ):
        assert alone(found, name) == 0
    assert set(found["mqmk_task_transitions_total"]) == {(state,) for state in TaskState}
    assert sum(found["mqmk_tasks_waiting_for_operator"].values()) == 0


def test_a_restarted_daemon_exports_the_same_totals_and_a_running_one_continues(tmp_path: Path) -> None:
    config, ledger, clock = lived_in(tmp_path)
    first = serve_metrics(config, config.ledger_file, clock)
    before = scraped(first)
    learn(ledger, clock, "late", 4, ["sea", "birds", "fruit"])
    write_pool_card(config, 4, ["sea", "birds", "fruit", "late"])
    second = serve_metrics(config, config.ledger_file, clock)
    try:
        continued, anew = scraped(first), scraped(second)
    finally:
        first.close()
        second.close()
        ledger.close()
    assert alone(before, "mqmk_task_time_to_serving_seconds_count") == 3
    moving = {"mqmk_daemon_start_timestamp_seconds", "mqmk_state_disk_free_bytes"}
    ours = {name for name in anew if name.startswith("mqmk_")} - moving
    assert {name: continued[name] for name in ours} == {name: anew[name] for name in ours}
    assert alone(anew, "mqmk_task_time_to_serving_seconds_count") == 4
    assert alone(anew, "mqmk_pool_version") == 4 and anew["mqmk_replicas_skewed"] == {(): 1}


def test_time_that_a_task_waits_for_a_person_is_not_its_time_to_be_served(tmp_path: Path) -> None:
    config = replace(Config(), state=State(tmp_path), metrics=Metrics(port=0))
    clock = Clock(1000.0)
    ledger = Ledger(config.ledger_file, clock)
    task = ledger.add_task("sea", "sea", "x", TaskState.DISCOVERED)
    steps = ((0, TaskState.VALIDATED), (0, TaskState.TRAINING), (10, TaskState.TRAINED), (10, TaskState.HELD),
             (90000, TaskState.TRAINED), (7, TaskState.PUBLISHED), (3, TaskState.SERVING))  # fmt: skip
    for seconds, state in steps:
        clock.now += seconds
        task = move(ledger, task, state, f"task.{state.lower()}")
    task = move(ledger, task, TaskState.PUBLISHED, "task.published")  # rolled back and forth: not learned again
    move(ledger, task, TaskState.SERVING, "task.rolled_out")
    server = serve_metrics(config, config.ledger_file, clock)
    try:
        found = scraped(server)
    finally:
        server.close()
        ledger.close()
    assert alone(found, "mqmk_task_time_to_serving_seconds_count") == 1
    assert alone(found, "mqmk_task_time_to_serving_seconds_sum") == 10


def test_silence_about_a_task_grows_until_something_is_heard(tmp_path: Path) -> None:
    config = replace(Config(), state=State(tmp_path), metrics=Metrics(port=0))
    clock = Clock(1000.0)
    ledger = Ledger(config.ledger_file, clock)
    task = move(ledger, ledger.add_task("sea", "sea", "x", TaskState.DISCOVERED), TaskState.VALIDATED, "task.validated")
    task = move(ledger, task, TaskState.TRAINING, "task.training_started")
    server = serve_metrics(config, config.ledger_file, clock)
    try:
        clock.now += 500
        quiet = scraped(server)
        ledger.append_event("task.epoch_finished", task, {"epoch": 1})
        clock.now += 20
        heard = scraped(server)
    finally:
        server.close()
        ledger.close()
    assert quiet["mqmk_task_last_event_age_seconds"][("TRAINING",)] == 500
    assert heard["mqmk_task_last_event_age_seconds"][("TRAINING",)] == 20
    assert alone(heard, "mqmk_backlog_oldest_task_age_seconds") == 520


def test_what_each_task_of_a_version_lost_since_and_what_the_gate_said_of_each_is_counted(tmp_path: Path) -> None:
    config = replace(Config(), state=State(tmp_path), metrics=Metrics(port=0))
    ledger = Ledger(config.ledger_file)
    rows = [ledger.add_task(name, name, name, TaskState.TRAINED) for name in ("sea", "birds", "fruit")]
    ledger.finish_version(
        ledger.plan_version(1, "1" * 64, None, "learn", rows[:2], evaluation(["sea", "birds"], 2)), {}
    )
    last = ledger.plan_version(2, "2" * 64, 1, "learn", rows[2:], evaluation(["sea", "birds", "fruit"], 3))
    ledger.finish_version(last, {})
    write_pool_card(config, 2, ["sea", "birds", "fruit"])
    server = serve_metrics(config, config.ledger_file)
    try:
        found = scraped(server)
    finally:
        server.close()
        ledger.close()
    lost = found["mqmk_heldout_forgetting_ratio"]
    assert lost == {("sea",): pytest.approx(0.02), ("birds",): pytest.approx(0.02), ("fruit",): pytest.approx(0.0)}
    assert found["mqmk_gate_results_total"] == {("passed",): 3, ("held",): 0}
    assert found["mqmk_versions_total"] == {("learn",): 2, ("forget",): 0}


def test_labels_stay_bounded_however_many_tasks_there_are(tmp_path: Path) -> None:
    config = replace(Config(), state=State(tmp_path), metrics=Metrics(port=0, task_labels=5))
    names = [f"task{number}" for number in range(60)]
    ledger = Ledger(config.ledger_file)
    for name in names:
        row = ledger.add_task(name, name, name, TaskState.SERVING)
    ledger.plan_version(1, "d" * 64, None, "learn", [row], evaluation(names, 60))
    write_pool_card(config, 1, names)
    for number in range(100):
        report(config, f"r{number:03d}", 1)
    server = serve_metrics(config, config.ledger_file)
    try:
        found = scraped(server)
    finally:
        server.close()
        ledger.close()
    assert {labels[1] for labels in found["mqmk_heldout_task_matching_ratio"]} == {*names[:5], OTHER}
    assert found["mqmk_heldout_task_matching_ratio"]["cascade", OTHER] == pytest.approx(0.9)
    confusion = found["mqmk_heldout_confusion_images"]
    assert len(confusion) <= 36 and sum(confusion.values()) == 60 * 90 + 60 * 59 * 5
    assert len(found["mqmk_replica_pool_version"]) == 64 and alone(found, "mqmk_replicas_live") == 100


def test_of_very_many_mistakes_the_largest_have_a_series_and_the_rest_is_added_up(tmp_path: Path) -> None:
    config = replace(Config(), state=State(tmp_path), metrics=Metrics(port=0))
    names = [f"task{number}" for number in range(40)]
    ledger = Ledger(config.ledger_file)
    for name in names:
        row = ledger.add_task(name, name, name, TaskState.SERVING)
    document = evaluation(names, 40)
    document["confusion"]["task7"]["task9"] = 77
    ledger.plan_version(1, "d" * 64, None, "learn", [row], document)
    write_pool_card(config, 1, names)
    server = serve_metrics(config, config.ledger_file)
    try:
        confusion = scraped(server)["mqmk_heldout_confusion_images"]
    finally:
        server.close()
        ledger.close()
    assert confusion["task9", "task7"] == 77
    assert len(confusion) <= 500 + 40 + 40
    assert sum(confusion.values()) == 40 * 90 + 40 * 39 * 5 + 72


def test_the_first_tasks_keep_their_labels_and_the_rest_share_one() -> None:
    assert task_labels(["a", "b", "a", "c"], 2) == {"a": "a", "b": "b", "c": OTHER}
    assert task_labels(["a"], 0) == {"a": OTHER}


def test_a_taken_port_is_an_error_that_says_what_to_type(tmp_path: Path) -> None:
    config = replace(Config(), state=State(tmp_path))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            DaemonError, match=rf"127\.0\.0\.1:{port}.*--set metrics\.port=.*ss -ltnp 'sport = :{port}'"
        ):
            serve_metrics(replace(config, metrics=Metrics(port=port)), config.ledger_file)


def test_an_address_that_cannot_be_had_is_an_error_too(tmp_path: Path) -> None:
    config = replace(Config(), state=State(tmp_path), metrics=Metrics(host="203.0.113.7"))
    with pytest.raises(DaemonError, match=r"203\.0\.113\.7:9109.*set metrics\.host"):
        serve_metrics(config, config.ledger_file)


def test_a_ledger_that_cannot_be_read_is_said_and_not_created(tmp_path: Path) -> None:
    config = replace(Config(), state=State(tmp_path), metrics=Metrics(port=0))
    server = serve_metrics(config, config.ledger_file)
    try:
        found = scraped(server)
        Ledger(config.ledger_file).close()
        again = scraped(server)
    finally:
        server.close()
    assert alone(found, "mqmk_ledger_up") == 0 and "mqmk_tasks" not in found
    assert alone(again, "mqmk_ledger_up") == 1 and ("SERVING",) in again["mqmk_tasks"]


def test_scrapes_from_many_threads_agree_while_the_daemon_writes(life) -> None:
    server, ledger = life
    counts: list[float] = []
    threads = [threading.Thread(target=lambda: counts.append(scraped(server)["mqmk_task_retries_total"][()]))
               for _ in range(8)]  # fmt: skip
    for thread in threads:
        thread.start()
    for _ in range(20):
        ledger.append_event("task.retry_scheduled", ledger.tasks_named("tools")[0])
    for thread in threads:
        thread.join()
    assert len(counts) == 8 and scraped(server)["mqmk_task_retries_total"][()] == 20


def test_the_loop_shows_that_it_comes_round(life) -> None:
    server, _ = life
    server.record_pass(0.2)
    server.record_pass(2.0, failed=True)
    found = scraped(server)
    assert alone(found, "mqmk_pass_duration_seconds_count") == 2 and alone(found, "mqmk_pass_failures_total") == 1
    assert alone(found, "mqmk_last_pass_timestamp_seconds") > 0


def test_the_targets_file_says_where_to_scrape_and_is_rewritten_only_when_that_changes(tmp_path: Path) -> None:
    path = write_targets(tmp_path, "127.0.0.1:9109", None)
    assert path == tmp_path / TARGETS
    first = path.stat().st_ino
    write_targets(tmp_path, "127.0.0.1:9109", None)
    assert path.stat().st_ino == first
    write_targets(tmp_path, "127.0.0.1:9109", "127.0.0.1:7000")
    assert path.stat().st_ino != first
    assert json.loads(path.read_text()) == [
        {"targets": ["127.0.0.1:9109"], "labels": {"part": "daemon"}},
        {"targets": ["127.0.0.1:7000"], "labels": {"part": "ray"}},
    ]


def test_a_targets_file_that_cannot_be_written_does_not_stop_the_daemon(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        write_targets(tmp_path / "absent", "127.0.0.1:9109", None)
    assert "cannot write the targets for Prometheus" in caplog.text


def test_the_page_of_metrics_is_made_from_the_declarations() -> None:
    assert (ROOT / "docs" / "metrics.md").read_text() == page(), (
        "python -m mqmk.daemon.metrics.reference_page > docs/metrics.md"
    )
