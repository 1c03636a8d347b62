"""How the ledger and the state directory become Prometheus samples: every declared metric, read at each scrape.

Labels are bounded: tasks beyond `metrics.task_labels` become `other`, all but the most frequent mistakes are summed,
and replicas beyond a limit are left out.
"""

import logging
import sqlite3
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from importlib.metadata import version
from statistics import fmean
from typing import Any, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from mqmk.daemon.config.sections import Config
from mqmk.daemon.ledger.ledger import State
from mqmk.daemon.logs import event
from mqmk.daemon.metrics.declared import BY_NAME, CODES, DAEMON_METRICS, DEPENDENCIES, PASS_BUCKETS, STEPS
from mqmk.daemon.metrics.event_totals import EventTotals, Histogram
from mqmk.daemon.metrics.ledger_reader import LedgerReader, LedgerSnapshot, VersionEvaluation
from mqmk.daemon.metrics.state_reader import Pool, StateReader, StateSnapshot
from mqmk.deploy.serving.telemetry.declared import OTHER, task_labels
from mqmk.deploy.serving.telemetry.heartbeat import ReplicaStatus

log = logging.getLogger(__name__)
MAX_PAIRS: Final = 500
MAX_REPLICAS: Final = 64
MAX_CODES: Final = 60
BACKLOG: Final = (State.DISCOVERED, State.VALIDATED, State.TRAINING, State.TRAINED)
FAMILIES: Final = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}

Labels = tuple[str, ...]


class Samples:
    """The samples of one scrape; only declared names and labels are accepted."""

    def __init__(self) -> None:
        self._values: dict[str, dict[Labels, float]] = defaultdict(dict)
        self._histograms: dict[str, dict[Labels, Histogram]] = defaultdict(dict)

    def set(self, name: str, value: float, *labels: str) -> None:
        """Set one sample."""
        if len(BY_NAME[name].labels) != len(labels):
            raise ValueError(f"{name} has the labels {BY_NAME[name].labels}, got {labels}")
        self._values[name][labels] = float(value)

    def add(self, name: str, value: float, *labels: str) -> None:
        """Add to a sample, which starts at 0."""
        self.set(name, self._values[name].get(labels, 0.0) + value, *labels)

    def set_mean(self, name: str, values: Iterable[tuple[Labels, float]]) -> None:
        """Set samples; those with equal labels are averaged."""
        groups: dict[Labels, list[float]] = defaultdict(list)
        for labels, value in values:
            groups[labels].append(value)
        for labels, group in groups.items():
            self.set(name, fmean(group), *labels)

    def set_histogram(self, name: str, values: Histogram, *labels: str) -> None:
        """Set a histogram."""
        self._histograms[name][labels] = values

    def families(self) -> Iterator[Metric]:
        """Every declared metric, in order of declaration."""
        for each in DAEMON_METRICS:
            if each.kind == "histogram":
                histogram = HistogramMetricFamily(each.name, each.description, labels=each.labels)
                for labels, values in self._histograms[each.name].items():
                    bounds = [*map(str, values.bounds), "+Inf"]
                    histogram.add_metric(labels, list(zip(bounds, values.cumulative(), strict=True)), values.total)
                yield histogram
                continue
            family: Any = FAMILIES[each.kind](each.name, each.description, labels=each.labels)
            for labels, value in self._values[each.name].items():
                family.add_metric(labels, value)
            yield family


class DaemonCollector(Collector):
    """Everything the daemon exports. Scrapes may come from several threads at once."""

    def __init__(self, config: Config, ledger: LedgerReader, files: StateReader,
                 clock: Callable[[], float] = time.time) -> None:  # fmt: skip
        self._config, self._ledger, self._files, self._clock = config, ledger, files, clock
        self._began, self._scraping, self._counting = clock(), threading.Lock(), threading.Lock()
        self._passes, self._failed, self._last_pass = Histogram(PASS_BUCKETS), 0, 0.0

    def record_pass(self, seconds: float, *, failed: bool = False) -> None:
        """Count one pass of the loop, which never waits for a scrape."""
        with self._counting:
            self._passes.observe(seconds)
            self._failed += failed
            self._last_pass = self._clock()

    def collect(self) -> Iterator[Metric]:
        """All samples; if the ledger cannot be read, `mqmk_ledger_up` is 0 and the rest is missing."""
        with self._scraping:
            samples = Samples()
            self._add_daemon(samples)
            try:
                files = self._files.read()
                ledger = self._ledger.read(files.pool.version if files.pool else None)
            except (sqlite3.Error, OSError) as error:
                log.warning(f"metrics: {error}", extra=event("metrics.ledger_unreadable", error=repr(error)))
                samples.set("mqmk_ledger_up", 0)
            else:
                samples.set("mqmk_ledger_up", 1)
                self._add_all(samples, ledger, files)
            return iter(list(samples.families()))

    @property
    def _serves(self) -> bool:
        return self._config.serve.enabled and self._config.ray.address != "none"

    def _add_daemon(self, samples: Samples) -> None:
        samples.set("mqmk_daemon_info", 1, version("mqmk-daemon"), self._config.backbone.name,
                    self._config.serve.matcher)  # fmt: skip
        samples.set("mqmk_daemon_start_timestamp_seconds", self._began)
        with self._counting:
            samples.set("mqmk_pass_failures_total", self._failed)
            samples.set("mqmk_last_pass_timestamp_seconds", self._last_pass)
            samples.set_histogram("mqmk_pass_duration_seconds", deepcopy(self._passes))
        samples.set("mqmk_replicas_configured", self._config.serve.replicas if self._serves else 0)

    def _add_all(self, samples: Samples, ledger: LedgerSnapshot, files: StateSnapshot) -> None:
        labels = task_labels(ledger.names.values(), self._config.metrics.task_labels)
        backlog = (*BACKLOG, State.PUBLISHED) if self._serves else BACKLOG
        _add_tasks(samples, ledger, backlog)
        _add_steps(samples, ledger, labels)
        _add_event_totals(samples, self._ledger.totals, backlog, self._clock())
        _add_training(samples, ledger, labels)
        _add_dependencies(samples, ledger, files)
        _add_pool(samples, files.pool, ledger)
        _add_replicas(samples, files.replicas, files.pool.version if files.pool else None)
        if ledger.evaluated:
            _add_heldout(samples, ledger.evaluated, labels)


def _add_tasks(samples: Samples, ledger: LedgerSnapshot, backlog: tuple[State, ...]) -> None:
    for state, count in ledger.states.items():
        samples.set("mqmk_tasks", count, state)
    samples.set("mqmk_backlog_tasks", sum(ledger.states[state] for state in backlog))
    for aside, code in CODES:
        samples.set("mqmk_tasks_waiting_for_operator", 0, aside, code)
    for place, ((aside, code), count) in enumerate(sorted(ledger.waiting.items())):
        samples.add("mqmk_tasks_waiting_for_operator", count, aside, code if place < MAX_CODES else OTHER)
    samples.set("mqmk_commands_pending", ledger.pending_commands)
    for kind in ("learn", "forget"):
        samples.set("mqmk_versions_total", ledger.versions.get(kind, 0), kind)
    samples.set("mqmk_versions_unrecorded", ledger.unrecorded)


def _add_steps(samples: Samples, ledger: LedgerSnapshot, labels: Mapping[str, str]) -> None:
    """Of two tasks with one name the second is in conflict: the one that got further is shown."""
    by_name: dict[str, int] = defaultdict(int)
    for number, name in ledger.names.items():
        state = ledger.task_states[number]
        by_name[name] = max(by_name[name], STEPS.index(state) + 1 if state in STEPS else 0)
    by_label: dict[str, list[int]] = defaultdict(list)
    for name, step in by_name.items():
        by_label[labels.get(name, OTHER)].append(step)
    for label, steps in by_label.items():
        samples.set("mqmk_task_step", min(steps), label)


def _add_event_totals(samples: Samples, totals: EventTotals, backlog: tuple[State, ...], now: float) -> None:
    for state in State:
        samples.set("mqmk_task_transitions_total", totals.transitions[state], state)
    samples.set("mqmk_backlog_oldest_task_age_seconds", totals.oldest_age(backlog, now))
    for state in backlog:
        samples.set("mqmk_task_last_event_age_seconds", totals.seconds_since_event(state, now), state)
    samples.set("mqmk_task_retries_total", totals.retries)
    samples.set("mqmk_training_epochs_total", totals.epochs)
    for result in ("passed", "held"):
        samples.set("mqmk_gate_results_total", totals.gates[result], result)
    for kind in ("retry", "rollback", "promote", "forget"):
        for answer in ("DONE", "REFUSED"):
            samples.set("mqmk_commands_total", totals.commands[kind, answer], kind, answer)
    samples.set_histogram("mqmk_task_time_to_serving_seconds", totals.time_to_serving)
    for stage, histogram in totals.stages.items():
        samples.set_histogram("mqmk_task_stage_seconds", histogram, stage)


def _add_training(samples: Samples, ledger: LedgerSnapshot, labels: Mapping[str, str]) -> None:
    running = [(labels.get(ledger.names.get(task, ""), OTHER), detail) for task, detail in ledger.progress.items()]
    samples.set_mean("mqmk_training_progress_ratio", [((task,), d["epoch"] / d["epochs"]) for task, d in running])
    samples.set_mean("mqmk_training_loss", [((task,), d["loss"]) for task, d in running])
    samples.set_mean("mqmk_training_remaining_seconds", [((task,), d["seconds_left"]) for task, d in running])
    for task, detail in running:
        samples.add("mqmk_training_images_per_second", detail["images_per_second"], task)


def _add_dependencies(samples: Samples, ledger: LedgerSnapshot, files: StateSnapshot) -> None:
    for name, up in (dict.fromkeys(DEPENDENCIES, True) | dict(ledger.health)).items():
        samples.set("mqmk_dependency_up", up, name)
    samples.set("mqmk_state_disk_free_bytes", files.disk_free)
    samples.set("mqmk_state_disk_size_bytes", files.disk_size)


def _add_pool(samples: Samples, pool: Pool | None, ledger: LedgerSnapshot) -> None:
    samples.set("mqmk_pool_version", pool.version if pool else 0)
    samples.set("mqmk_pool_tasks", pool.tasks if pool else 0)
    samples.set("mqmk_pool_classes", pool.classes if pool else 0)
    samples.set("mqmk_pool_bytes", pool.size if pool else 0)
    samples.set("mqmk_pool_created_timestamp_seconds", ledger.evaluated.created_at if ledger.evaluated else 0)
    matching: Mapping[str, Any] = pool.matching if pool else {}
    for matcher, fitted in matching.get("calibration", {}).items():
        samples.set("mqmk_estimated_calibration_error_ratio", fitted["error"], matcher)
        samples.set("mqmk_estimated_rate_error_ratio", fitted["rate_error"], matcher)
    for matcher, unknown in matching.get("unknown", {}).items():
        samples.set("mqmk_unknown_threshold", unknown["threshold"], matcher)


def _add_replicas(samples: Samples, reports: tuple[ReplicaStatus, ...], current: int | None) -> None:
    samples.set("mqmk_replicas_live", len(reports))
    samples.set("mqmk_replicas_ready", sum(each.ready for each in reports))
    samples.set("mqmk_replicas_skewed", sum(each.pool_version != current for each in reports))
    for each in reports[:MAX_REPLICAS]:
        samples.set("mqmk_replica_pool_version", each.pool_version or 0, each.replica_id)
        samples.set("mqmk_replica_swaps_total", each.swaps, each.replica_id)
        samples.set("mqmk_replica_pool_rejected", each.last_failure is not None, each.replica_id)
        for stage in ("pointer", "read", "fit", "replay", "warm-up"):
            count = each.failures_by_stage.get(stage, 0)
            samples.set("mqmk_replica_swap_failures_total", count, each.replica_id, stage)


def _add_heldout(samples: Samples, evaluated: VersionEvaluation, labels: Mapping[str, str]) -> None:
    document = evaluated.document
    matcher, tasks = str(document.get("matcher", "none")), document.get("tasks", {})
    samples.set("mqmk_heldout_images", document.get("images", document.get("held_out", 0)))
    if document.get("calibration_error") is not None:  # which older releases did not record
        samples.set("mqmk_heldout_calibration_error_ratio", document["calibration_error"], matcher)
    for name, row in document.get("matchers", {}).items():
        samples.set("mqmk_heldout_matching_ratio", row["rate"], name)
        samples.set("mqmk_heldout_accuracy_ratio", row["accuracy"], name)
        samples.set("mqmk_heldout_queries_per_image", row["cost"], name)
    named = [(labels.get(name, OTHER), name, row) for name, row in tasks.items()]
    samples.set_mean(
        "mqmk_heldout_task_matching_ratio", [((task, matcher), row["matching_rate"]) for task, _, row in named]
    )
    samples.set_mean("mqmk_heldout_task_accuracy_ratio", [((task, matcher), row["accuracy"]) for task, _, row in named])
    given = [((task,), row["accuracy_given_task"]) for task, _, row in named]
    samples.set_mean("mqmk_heldout_task_accuracy_given_task_ratio", given)
    before = evaluated.when_learned
    lost = [((task,), before[name] - row["accuracy"]) for task, name, row in named if name in before]
    samples.set_mean("mqmk_heldout_forgetting_ratio", lost)
    _add_confusion(samples, document.get("confusion", {}), labels)


def _add_confusion(samples: Samples, confusion: Mapping[str, Mapping[str, int]], labels: Mapping[str, str]) -> None:
    pairs = [(count, true, matched) for true, row in confusion.items() for matched, count in row.items()]
    mistakes = sorted((pair for pair in pairs if pair[1] != pair[2]), key=lambda pair: (-pair[0], *pair[1:]))
    shown = {pair[1:] for pair in mistakes[:MAX_PAIRS]}
    for count, true, matched in pairs:
        own = true == matched or (true, matched) in shown
        label = labels.get(matched, OTHER) if own else OTHER
        samples.add("mqmk_heldout_confusion_images", count, labels.get(true, OTHER), label)
