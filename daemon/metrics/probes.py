"""`/healthz` and `/readyz` of the daemon: is its loop running, and can predictions be served?

A supervisor restarts what is not healthy and sends no traffic to what is not ready. A dependency that is down (the
bucket, MLflow) is reported by both and fails neither: a restart would not bring it back.
"""

import sqlite3
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from mqmk.daemon.config.sections import Config
from mqmk.daemon.redaction import redact
from mqmk.daemon.words import time_text
from mqmk.deploy.serving.telemetry.heartbeat import ReplicaStatus, live_replicas

SERVING_DEPENDENCIES: Final = ("state", "ray")
"""Dependencies without which nothing can be predicted."""


@dataclass(frozen=True)
class ProbeAnswer:
    """An HTTP status and a JSON object."""

    status: int
    body: Mapping[str, Any]


@dataclass
class Probes:
    """Answers probes from any thread; the loop only records its passes."""

    config: Config
    ledger: Path
    clock: Callable[[], float] = time.monotonic
    _began: float = field(init=False)
    _passed_at: float | None = None

    def __post_init__(self) -> None:
        self._began = self.clock()

    def record_pass(self) -> None:
        """The loop has finished a pass."""
        self._passed_at = self.clock()

    def healthz(self) -> ProbeAnswer:
        """503 if the loop hangs."""
        details = self._details()
        return (
            ProbeAnswer(503, self._stalled_error() | details)
            if self._is_stalled()
            else ProbeAnswer(200, {"ok": True} | details)
        )

    def readyz(self) -> ProbeAnswer:
        """503 with the reason until the daemon has started and a replica is ready."""
        details = self._details()
        problem = self._problem(details["dependencies"])
        return ProbeAnswer(503, problem | details) if problem else ProbeAnswer(200, {"ready": True} | details)

    @property
    def limit(self) -> float | None:
        """Seconds between passes; None if the loop itself trains tasks, which may take any time."""
        if self.config.ray.address == "none":
            return None
        return self.config.metrics.stalled_seconds + self.config.bucket.max_poll_seconds

    def _age(self) -> float:
        return self.clock() - (self._began if self._passed_at is None else self._passed_at)

    def _is_stalled(self) -> bool:
        return self.limit is not None and self._age() > self.limit

    def _details(self) -> dict[str, Any]:
        return {"last_pass_age_seconds": round(self._age(), 3), "dependencies": self._dependencies()}

    def _dependencies(self) -> dict[str, dict[str, Any]]:
        try:
            with closing(sqlite3.connect(f"{self.ledger.absolute().as_uri()}?mode=ro", uri=True, timeout=1)) as db:
                rows = db.execute("SELECT dependency, up, message, since FROM health ORDER BY dependency").fetchall()
        except sqlite3.Error as error:
            return {"ledger": {"up": False, "reason": str(error), "since": None}}
        return {
            name: {"up": bool(up), "reason": redact(message) or None, "since": time_text(since)}
            for name, up, message, since in rows
        }

    def _problem(self, dependencies: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
        if self._passed_at is None:
            return _error("starting", "the daemon is starting: its first pass is not over")
        if self._is_stalled():
            return self._stalled_error()
        for name in SERVING_DEPENDENCIES:
            if name in dependencies and not dependencies[name]["up"]:
                return _error(f"{name}_unavailable", f"{name} is unavailable: {dependencies[name]['reason']}")
        return self._replica_problem()

    def _stalled_error(self) -> dict[str, str]:
        return _error("stalled", f"no pass for {self._age():.0f} s; the limit is {self.limit:g} s")

    def _replica_problem(self) -> dict[str, str]:
        if not self.config.serve.enabled or self.config.ray.address == "none":
            return {}
        found = live_replicas(self.config.state.dir / "replicas")
        if any(replica.ready for replica in found):
            return {}
        return _error("no_replica", f"no replica is ready{_first_failure(found)}; see `mqmk-daemon status`")


def _first_failure(replicas: list[ReplicaStatus]) -> str:
    return next((f": {each.last_failure}" for each in replicas if each.last_failure), "")


def _error(code: str, what: str) -> dict[str, str]:
    return {"error": what, "code": code}
