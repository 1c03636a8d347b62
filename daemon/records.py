"""What MLflow is told: every training, every version, which one is served. Late if need be, in order, never twice."""

import json
import logging
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mqmk.daemon import crash_points
from mqmk.daemon.config import Config
from mqmk.daemon.config_keys import flat
from mqmk.daemon.errors import RegistryError
from mqmk.daemon.ledger import Ledger, TaskRow, VersionRow
from mqmk.daemon.logs import event
from mqmk.daemon.operators import Operators
from mqmk.daemon.registry_records import Registry, TrainingRecord, VersionRecord
from mqmk.daemon.state_files import StateFiles
from mqmk.matcher.errors import PoolError
from mqmk.matcher.pointer import Pointer

log = logging.getLogger(__name__)
SERVED = "mlflow.serving"


class Records:
    """Brings the registry up to what the ledger says; when it is down, nothing else waits for it."""

    def __init__(self, config: Config, ledger: Ledger, files: StateFiles, registry: Registry | None) -> None:
        self._config, self._ledger, self._files, self._registry = config, ledger, files, registry
        self._not_before = 0.0

    def catch_up(self, operators: Operators, now: float) -> None:
        """Record whatever is not recorded yet."""
        if self._registry is None or now < self._not_before:
            return
        try:
            for row in self._ledger.unrecorded_versions():
                self._record(row, operators)
            self._follow_the_pointer()
        except (RegistryError, PoolError) as error:
            self._not_before = now + self._config.retry.first_seconds * 5
            if self._ledger.set_health("mlflow", False, str(error)):
                log.warning(f"MLflow does not work: {error}", extra=event("health.down", part="mlflow"))
        else:
            self._ledger.set_health("mlflow", True)

    def _record(self, row: VersionRow, operators: Operators) -> None:
        assert self._registry is not None
        task = self._ledger.task(row.task) if row.task is not None else None
        run = None
        crash_points.reached("record.before")
        if task and row.kind == "learn":
            run = self._registry.record_training(self._training(task, row))
            crash_points.reached("record.training")
        own = Pointer(row.version, row.digest)
        folder = self._files.store.folder / own.folder
        # Not there any more: removed while nothing was recorded. The current one can only be missing by accident.
        removed = not folder.exists() and own != self._files.store.current()
        self._registry.record_version(VersionRecord(
            effect_id=f"version:{row.version}:{row.digest}",
            version=row.version, digest=row.digest, parent=row.parent, kind=row.kind, task=task.name if task else None,
            run_id=run, folder=None if removed else folder, metrics=_numbers(row.evaluation),
            tags=code() | ({"data": task.identity or ""} if task else {}),
        ))  # fmt: skip
        crash_points.reached("record.version")
        if task and row.kind == "forget":
            exact = operators.is_exact(task)
            self._registry.record_deletion(f"forget:{row.version}:{task.identity}", task.name, row.version, exact)
        self._ledger.mark_recorded(row)
        crash_points.reached("record.after")

    def _training(self, task: TaskRow, row: VersionRow) -> TrainingRecord:
        events = self._ledger.events(task, 10_000)
        epochs = [_numbers(each.detail) for each in events if each.event == "task.epoch"]
        begun = [each.at for each in events if each.event == "task.training"]
        ended = [each.at for each in events if each.event == "task.trained"]
        return TrainingRecord(
            effect_id=f"train:{task.identity}",
            task=task.name,
            parameters=self._parameters(),
            epochs=epochs[-self._config.train.epochs :],
            manifest=task.manifest or b"",
            files={"evaluation.json": json.dumps(row.evaluation, indent=2).encode()} | self._figures(row),
            tags=code() | {"data": task.identity or ""},
            started=begun[-1] if begun else None,
            ended=ended[-1] if ended else None,
        )

    def _parameters(self) -> dict[str, Any]:
        values = {key: value for key, value in flat(self._config).items() if value is not None}
        own = {key.removeprefix("train."): value for key, value in values.items() if key.startswith("train.")}
        return own | {"backbone": self._config.backbone.name}

    def _figures(self, row: VersionRow) -> dict[str, bytes]:
        folder = self._files.evaluation(row.digest)
        found = sorted(path for path in folder.rglob("*") if path.is_file())
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}

    def _follow_the_pointer(self) -> None:
        assert self._registry is not None
        current = self._files.store.current()
        if current is None or self._ledger.recall(SERVED) == current.digest:
            return
        if self._ledger.version(current.version).recorded:
            self._registry.point_serving(current.version)
            crash_points.reached("record.alias")
            self._ledger.remember(SERVED, current.digest)


@cache
def code() -> dict[str, str]:
    """Which program made it: the release and, where it runs from a checkout, the commit."""
    found = {"release": version("mqmk-daemon")}
    with suppress(OSError, subprocess.SubprocessError):
        command = ["git", "-C", str(Path(__file__).resolve().parent), "rev-parse", "HEAD"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
        found["git"] = done.stdout.strip()
    return found


def _numbers(evaluation: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in evaluation.items() if isinstance(value, int | float)}
