"""What the command line says about a state directory: read from the ledger and the files, the daemon running or not."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from mqmk.daemon.config import Config
from mqmk.daemon.errors import LedgerError
from mqmk.daemon.glance import glance
from mqmk.daemon.ledger import Ledger, State, TaskRow
from mqmk.daemon.ledger_rows import Health
from mqmk.daemon.lock import holder_of
from mqmk.daemon.metrics_ledger import LedgerReader
from mqmk.daemon.passwords import hidden
from mqmk.deploy.reports import ReplicaReport, live_reports
from mqmk.matcher.errors import PoolError
from mqmk.matcher.pointer import POINTER, Pointer, read_pointer

NEXT_STEP: Mapping[State, str] = {
    State.DISCOVERED: "its samples are read and checked",
    State.VALIDATED: "it is learned when a worker is free (the first task alone, then side by side)",
    State.TRAINING: "it is being learned",
    State.TRAINED: "a version with it is built, evaluated and judged",
    State.PUBLISHED: "replicas load the version it is in",
    State.SERVING: "nothing: it is served",
    State.QUARANTINED: "mend the shards and drop them again, or `mqmk-daemon retry {name}`",
    State.CONFLICT: "drop it under another name, or `mqmk-daemon forget {name}`, then `mqmk-daemon retry {name}`",
    State.HELD: "`mqmk-daemon promote {name}` serves it all the same, `mqmk-daemon forget {name}` drops it",
    State.FORGOTTEN: "nothing: it was removed on request; `mqmk-daemon retry {name}` learns it again",
}


@dataclass(frozen=True)
class Overview:
    """One look at everything."""

    config: Config
    ledger: Ledger

    def status(self) -> dict[str, Any]:
        """What `status --json` prints."""
        holder = holder_of(self.config.state.dir)
        health = [*self.ledger.health(), *self._pointer_health()]
        troubles = [each.part for each in health if not each.up]
        current = self.current_version()
        return {
            "state": "stopped" if holder is None else "degraded" if troubles else "running",
            "pid": holder.pid if holder else None,
            "since": _time(holder.since) if holder else None,
            "pool_version": current,
            "bucket": hidden(self.config.bucket_url),
            "state_dir": str(self.config.state.dir),
            "serving": self.serving(),
            "matching": glance(self._measured.evaluated(current), self._reports()),
            "tasks": [self.task(row) for row in self.ledger.tasks()],
            "counts": {state.value: count for state, count in self.ledger.counts().items() if count},
            "progress": [dict(each) for each in self.ledger.progress().values()],
            "health": [{"part": h.part, "up": h.up, "says": h.says, "since": _time(h.since)} for h in health],
            "commands": [{"id": c.id, "kind": c.kind, "subject": c.subject} for c in self.ledger.pending()],
        }

    def current_version(self) -> int | None:
        """What CURRENT says; None before the first version and where it cannot be read."""
        with suppress(PoolError):
            current = read_pointer(self.config.pools_folder)
            return current.version if current else None
        return None

    def _pointer_health(self) -> Iterator[Health]:
        """Whether CURRENT can be read: whoever broke it may have stopped the daemon, too."""
        try:
            read_pointer(self.config.pools_folder)
        except PoolError as error:
            yield Health("pools", False, str(error), since=(self.config.pools_folder / POINTER).stat().st_mtime)

    def serving(self) -> dict[str, Any]:
        """Who answers requests, and with which version; `skew` while replicas differ from CURRENT."""
        reports, current = self._reports(), self.current_version()
        return {
            "url": service_url(self.config) if reports else None,
            "replicas": [
                {"id": each.replica_id, "pool_version": each.pool_version, "ready": each.ready,
                 "failures": each.failures, "last_failure": each.last_failure, "node": each.node} for each in reports
            ],
            "skew": any(each.pool_version != current for each in reports),
        }  # fmt: skip

    def _reports(self) -> list[ReplicaReport]:
        return live_reports(_reports_folder(self.config)) if self.config.serve.enabled else []

    @cached_property
    def _measured(self) -> LedgerReader:
        """Keeps what never changes, so that a look every half second is cheap."""
        return LedgerReader(self.config.ledger_file)

    def task(self, row: TaskRow) -> dict[str, Any]:
        """One task in short."""
        report = row.report or {}
        return {
            "name": row.name,
            "state": row.state.value,
            "classes": [*report.get("samples", {})],
            "samples": sum(report.get("samples", {}).values()),
            "reason": row.reason,
            "code": row.code,
            "next": NEXT_STEP[row.state].format(name=row.name),
            "version": row.version,
            "matching_rate": row.metrics.get("matching_rate"),
            "accuracy": row.metrics.get("accuracy"),
            "attempts": row.attempts,
            "next_try": _time(row.not_before) if row.not_before else None,
            "discovered_at": _time(row.discovered_at),
            "updated_at": _time(row.updated_at),
        }

    def show(self, name: str) -> list[dict[str, Any]]:
        """Everything about the tasks of one name."""
        rows = self.ledger.named(name)
        if not rows:
            raise LedgerError(f"there is no task {name}; `mqmk-daemon tasks` lists them")
        progress = self.ledger.progress()
        return [
            self.task(row)
            | {
                "folder": row.folder,
                "identity": row.identity,
                "warnings": [*(row.report or {}).get("warnings", [])],
                "metrics": dict(row.metrics),
                "progress": dict(progress[row.id]) if row.id in progress else None,
                "events": [
                    {"at": _time(e.at), "event": e.event, "state": e.state, "detail": dict(e.detail)}
                    for e in self.ledger.events(row)
                ],
            }
            for row in rows
        ]

    def versions(self) -> list[dict[str, Any]]:
        """Every version."""
        current = self.current_version()
        names = {row.id: row.name for row in self.ledger.tasks()}
        return [
            {
                "version": row.version,
                "digest": row.digest,
                "parent": row.parent,
                "kind": row.kind,
                "task": names.get(row.task or 0),
                "current": row.version == current,
                "stored": (self.config.pools_folder / Pointer(row.version, row.digest).folder).is_dir(),
                "recorded": row.recorded,
                "matching_rate": row.evaluation.get("matching_rate"),
                "accuracy": row.evaluation.get("accuracy"),
                "matcher": row.evaluation.get("matcher"),
                "created_at": _time(row.created_at),
            }
            for row in self.ledger.versions()
        ]


def service_url(config: Config) -> str:
    """Where the service of a state directory answers: as it was started, else as the configuration says."""
    from mqmk.deploy.reports import deployed
    from mqmk.deploy.settings import ServeSettings

    configured = ServeSettings(config.pools_folder, host=config.serve.host, port=config.serve.port, anonymous=True)
    return deployed(_reports_folder(config)).get("url") or configured.url


def _reports_folder(config: Config) -> Path:
    return config.pools_folder.parent / "replicas"


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
