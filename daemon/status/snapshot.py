"""What is known about a state directory, from its ledger and files; the daemon may run or not."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from mqmk.daemon.config.sections import Config
from mqmk.daemon.errors import LedgerError
from mqmk.daemon.host.lock import lock_owner
from mqmk.daemon.ledger.ledger import IN_POOL, Event, Ledger, State, TaskRow
from mqmk.daemon.ledger.rows import Health
from mqmk.daemon.metrics.ledger_reader import LedgerReader
from mqmk.daemon.ray_runtime.processes import process
from mqmk.daemon.redaction import redact
from mqmk.daemon.status.figures import Figures, task_figures, version_figures
from mqmk.daemon.status.summary import matching_summary
from mqmk.daemon.words import command, time_text
from mqmk.deploy.serving.telemetry.heartbeat import ReplicaStatus, live_replicas
from mqmk.matcher.errors import PoolError
from mqmk.matcher.pointer import POINTER, Pointer, read_pointer

NEXT_STEP: Mapping[State, str] = {
    State.DISCOVERED: "validation of its samples",
    State.VALIDATED: "training when a worker is free (the first task alone, later ones in parallel)",
    State.TRAINING: "training is running",
    State.TRAINED: "a version with it is built, evaluated and gated",
    State.PUBLISHED: "replicas load its version",
    State.SERVING: "nothing: it is serving",
    State.QUARANTINED: "fix the shards and drop them again, or {retry}",
    State.CONFLICT: "drop it under another name, or {forget}, then {retry}",
    State.HELD: "{promote} serves it anyway, {forget} discards it",
    State.FORGOTTEN: "nothing: it was removed on request; {retry} learns it again",
}
FORGOTTEN: Final = "task.forgotten"
NO_REPLICA: Final = "no replica is alive, so requests fail; the first one takes up to a minute to start"


@dataclass(frozen=True)
class Snapshot:
    """Reads on demand; nothing is cached except what never changes."""

    config: Config
    ledger: Ledger

    def status(self) -> dict[str, Any]:
        """What `status --json` prints."""
        owner = lock_owner(self.config.state.dir)
        current, reports = self.current_version(), self._reports()
        health = [*self.ledger.health(), *self._pointer_health()]
        if owner and self.serving_problem:
            health.append(Health("serving", False, self.serving_problem, since=owner.since))
        troubled = not all(each.up for each in health) or any(each.last_failure for each in reports)
        return {
            "state": "stopped" if owner is None else "degraded" if troubled else "running",
            "pid": owner.pid if owner else None,
            "since": time_text(owner.since) if owner else None,
            "pool_version": current,
            "bucket": redact(self.config.bucket_url),
            "state_dir": str(self.config.state.dir),
            "serving": self.serving(),
            "matching": matching_summary(self._evaluations.evaluation(current), reports),
            "tasks": self.tasks(),
            "counts": {state.value: count for state, count in self.ledger.counts().items() if count},
            "progress": [dict(each) for each in self.ledger.progress().values()],
            "health": [
                {"dependency": h.dependency, "up": h.up, "message": h.message, "since": time_text(h.since)}
                for h in health
            ],
            "commands": [{"id": c.id, "kind": c.kind, "subject": c.subject} for c in self.ledger.pending_commands()],
        }

    def current_version(self) -> int | None:
        """What CURRENT names; None before the first version, or if it cannot be read."""
        with suppress(PoolError):
            current = read_pointer(self.config.pools_folder)
            return current.version if current else None
        return None

    def _pointer_health(self) -> Iterator[Health]:
        """A problem if CURRENT cannot be read, which may also have stopped the daemon."""
        try:
            read_pointer(self.config.pools_folder)
        except PoolError as error:
            yield Health("pools", False, str(error), since=(self.config.pools_folder / POINTER).stat().st_mtime)

    def serving(self) -> dict[str, Any]:
        """The live replicas and their versions; `skew` while one differs from CURRENT."""
        reports, current = self._reports(), self.current_version()
        return {
            "url": service_url(self.config) if reports else None,
            "replicas": [
                {"id": each.replica_id, "pool_version": each.pool_version, "ready": each.ready,
                 "failures": each.failures, "last_failure": each.last_failure, "node": each.node} for each in reports
            ],
            "skew": any(each.pool_version != current for each in reports),
        }  # fmt: skip

    @property
    def serves(self) -> bool:
        """Whether serving is configured."""
        return self.config.serve.enabled and self.config.ray.address != "none"

    @property
    def serving_problem(self) -> str | None:
        """Why requests fail although serving is configured; None if they do not."""
        return NO_REPLICA if self.serves and not self._reports() else None

    def _reports(self) -> list[ReplicaStatus]:
        """Of live replicas; one of this machine's own Ray is dead as soon as its process is gone."""
        reports = live_replicas(_reports_folder(self.config)) if self.config.serve.enabled else []
        here = self.config.ray.address == "local"
        return [each for each in reports if not here or process(each.pid) is not None]

    @cached_property
    def _evaluations(self) -> LedgerReader:
        """Caches what never changes, so that reading every half second is cheap."""
        return LedgerReader(self.config.ledger_file)

    def tasks(self) -> list[dict[str, Any]]:
        """The summary of every task."""
        evaluation, samples = self._current_evaluation(), self.ledger.samples()
        return [_summarize(row, samples.get(row.id, {}), evaluation) for row in self.ledger.tasks()]

    def _current_evaluation(self) -> Mapping[str, Any]:
        found = self._evaluations.evaluation(self.current_version())
        return found.document if found else {}

    def task_details(self, name: str) -> list[dict[str, Any]]:
        """Everything about the tasks with this name."""
        rows, same_as = self.ledger.tasks_named(name), None
        if not rows and (twin := self.ledger.task_of_folder(name)):
            rows, same_as = [twin], f"{name} has the same content as {twin.name} ({twin.state}): nothing to do"
        if not rows:
            raise LedgerError(f"there is no task {name}; `mqmk-daemon tasks` lists them")
        progress, events = self.ledger.progress(), {row.id: self.ledger.events(row) for row in rows}
        reports = {row.id: self.ledger.report(row) or {} for row in rows}
        evaluation = self._current_evaluation()
        return [
            _summarize(row, reports[row.id].get("samples", {}), evaluation)
            | {
                "folder": row.folder,
                "same_as": same_as,
                "identity": row.identity,
                "warnings": [*reports[row.id].get("warnings", [])],
                "metrics": dict(row.metrics),
                "progress": dict(progress[row.id]) if row.id in progress else None,
                "forgotten": _deletion(events[row.id]) if row.state is State.FORGOTTEN else None,
                "events": [
                    {"at": time_text(e.at), "event": e.event, "state": e.state, "detail": dict(e.detail)}
                    for e in events[row.id]
                ],
            }
            for row in rows
        ]

    def versions(self) -> list[dict[str, Any]]:
        """Every version."""
        current = self.current_version()
        names = self.ledger.names()
        return [
            {
                "version": row.version,
                "digest": row.digest,
                "parent": row.parent,
                "kind": row.kind,
                "task": names[row.tasks[0].task] if len(row.tasks) == 1 else None,
                "tasks": [names[each.task] for each in row.tasks],
                "current": row.version == current,
                "stored": (self.config.pools_folder / "versions" / Pointer(row.version, row.digest).card).is_file(),
                "recorded": row.recorded,
                "withdrawn": names.get(row.withdrawn or 0),
                "exact": row.exact,
                **version_figures(row.evaluation).version_document(),
                "matcher": row.evaluation.get("matcher"),
                "created_at": time_text(row.created_at),
            }
            for row in self.ledger.summarized_versions()
        ]


def _summarize(row: TaskRow, samples: Mapping[str, int], evaluation: Mapping[str, Any]) -> dict[str, Any]:
    """The summary of one task; its figures are those in the current version."""
    figures = task_figures(evaluation, row.name) if row.state in IN_POOL else Figures()
    return {
        "name": row.name,
        "state": row.state.value,
        "classes": [*samples],
        "samples": sum(samples.values()),
        "reason": row.reason,
        "code": row.code,
        "next": NEXT_STEP[row.state].format(**{do: command(do, row.name) for do in ("retry", "promote", "forget")}),
        "version": row.version,
        **figures.document(),
        "failures": row.failures,
        "next_try": time_text(row.not_before) if row.not_before else None,
        "discovered_at": time_text(row.discovered_at),
        "updated_at": time_text(row.updated_at),
    }


def _deletion(events: Sequence[Event]) -> dict[str, Any] | None:
    """The outcome of `forget`: whether it was `exact`, and the `answer` as text; None if it was not recorded."""
    found = [each.detail for each in events if each.event == FORGOTTEN and "answer" in each.detail]
    return {"exact": found[-1].get("exact"), "answer": found[-1]["answer"]} if found else None


def service_url(config: Config) -> str:
    """The URL of the service of a state directory: as deployed, else as configured."""
    from mqmk.deploy.serving.telemetry.heartbeat import deployed_service

    return deployed_service(_reports_folder(config)).get("url") or config.serve.url


def _reports_folder(config: Config) -> Path:
    return config.pools_folder.parent / "replicas"
