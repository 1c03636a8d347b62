"""Records training runs, versions and the served version in MLflow: in order, never twice, late if MLflow is down."""

import json
import logging
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mqmk.daemon import failpoints
from mqmk.daemon.config.fields import flatten
from mqmk.daemon.config.sections import Config
from mqmk.daemon.errors import RegistryError
from mqmk.daemon.ledger.ledger import Ledger, TaskRow, VersionRow
from mqmk.daemon.logs import event
from mqmk.daemon.registry.interface import Registry
from mqmk.daemon.registry.records import TrainingRecord, VersionRecord
from mqmk.daemon.state_dir import StateDir
from mqmk.matcher.errors import PoolError
from mqmk.matcher.pointer import Pointer
from mqmk.matcher.pool_cards import PoolCard

log = logging.getLogger(__name__)
SERVED = "mlflow.serving"
PLACE = "mlflow"


class Recorder:
    """Brings the registry up to date with the ledger; nothing else waits for it."""

    def __init__(self, config: Config, ledger: Ledger, files: StateDir, registry: Registry | None) -> None:
        self._config, self._ledger, self._files, self._registry = config, ledger, files, registry
        self._not_before = 0.0

    def catch_up(self, now: float) -> None:
        """Record whatever is not recorded yet."""
        if self._registry is None or now < self._not_before:
            return
        try:
            for row in self._ledger.unrecorded_versions():
                self._record(row)
            self._erase_forgotten()
            self._update_serving_alias()
        except (RegistryError, PoolError) as error:
            self._not_before = now + self._config.retry.first_seconds * 5
            if self._ledger.set_health("mlflow", False, str(error)):
                log.warning(f"MLflow is unavailable: {error}", extra=event("dependency.failed", dependency="mlflow"))
        else:
            self._ledger.set_health("mlflow", True)

    def _record(self, row: VersionRow) -> None:
        assert self._registry is not None
        tasks = [self._ledger.task(each.task) for each in row.tasks]
        runs: list[str] = []
        failpoints.hit("record.before")
        for task, each in zip(tasks, row.tasks, strict=True) if row.kind == "learn" else ():
            runs.append(self._registry.record_training(self._training(task, each.attempt, row)))
            failpoints.hit("record.training")
        card = self._card(row)
        self._registry.record_version(VersionRecord(
            effect_id=f"version:{row.version}:{row.digest}",
            version=row.version, digest=row.digest, parent=row.parent, kind=row.kind,
            changed=[task.name for task in tasks], run_ids=runs,
            card=self._files.store.card_bytes(card.identity) if card else None,
            files=self._new_files(card) if card else {}, tasks=card.tasks if card else (),
            metrics=_numbers(row.evaluation), former_digest=row.former_digest,
            tags=code_version() | ({"data": " ".join(task.identity or "" for task in tasks)} if tasks else {}),
        ))  # fmt: skip
        failpoints.hit("record.version")
        for task in tasks if row.kind == "forget" else ():
            effect = f"forget:{row.version}:{task.identity}"
            self._registry.record_deletion(effect, task.name, row.version, bool(row.exact))
        self._ledger.mark_recorded(row)
        failpoints.hit("record.after")

    def _erase_forgotten(self) -> None:
        """Delete what the registry holds of tasks that were forgotten."""
        assert self._registry is not None
        for task in self._ledger.tasks_to_erase(PLACE):
            erased = self._registry.erase_task(task.identity or "", self._ledger.whole_versions_to_erase())
            self._ledger.mark_erased(task, PLACE, erased)

    def _training(self, task: TaskRow, attempt: int | None, row: VersionRow) -> TrainingRecord:
        events = self._ledger.events(task, 10_000)
        last = max((place for place, each in enumerate(events) if each.event == "task.training_started"), default=0)
        epochs = [_numbers(each.detail) for each in events[last:] if each.event == "task.epoch_finished"]
        begun = [each.at for each in events if each.event == "task.training_started"]
        ended = [each.at for each in events if each.event == "task.trained"]
        return TrainingRecord(
            effect_id=f"train:{task.identity}" + (f":{attempt}" if attempt else ""),  # none in release 0.1
            task=task.name,
            parameters=self._parameters(),
            epochs=epochs,
            manifest=self._ledger.manifest_bytes(task) or b"",
            files={"evaluation.json": json.dumps(row.evaluation, indent=2).encode()} | self._figures(row),
            layers=self._task_layers(task, row),
            tags=code_version() | {"data": task.identity or ""},
            started=begun[-1] if begun else None,
            ended=ended[-1] if ended else None,
        )

    def _card(self, row: VersionRow) -> PoolCard | None:
        """The card of a version; None if it was removed meanwhile. The current one can only be missing by accident."""
        own = Pointer(row.version, row.digest)
        if not (self._files.store.versions / own.card).exists() and own != self._files.store.current():
            return None
        return self._files.store.card(own)

    def _new_files(self, card: PoolCard) -> dict[str, bytes]:
        """The g layer, pages and pool-level layers that this version has and its parent has not."""
        known = {name for task in card.tasks for name in task.files}
        for before in self._files.store.cards(card.identity.parent) if card.identity.parent else []:
            known |= before.files
        return {name: self._files.store.read_layer(name) for name in sorted(card.files - known)}

    def _task_layers(self, task: TaskRow, row: VersionRow) -> dict[str, bytes]:
        card = self._card(row)
        own = [each for each in card.tasks if each.manifest_sha256 == task.identity] if card else []
        return {name: self._files.store.read_layer(name) for each in own for name in each.files}

    def _parameters(self) -> dict[str, Any]:
        values = {key: value for key, value in flatten(self._config).items() if value is not None}
        own = {key.removeprefix("train."): value for key, value in values.items() if key.startswith("train.")}
        return own | {"backbone": self._config.backbone.name}

    def _figures(self, row: VersionRow) -> dict[str, bytes]:
        folder = self._files.evaluation(row.digest)
        found = sorted(path for path in folder.rglob("*") if path.is_file())
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}

    def _update_serving_alias(self) -> None:
        assert self._registry is not None
        current = self._files.store.current()
        if current is None or self._ledger.get_value(SERVED) == current.digest:
            return
        if self._ledger.version(current.version).recorded:
            self._registry.point_serving(current.version)
            failpoints.hit("record.alias")
            self._ledger.set_value(SERVED, current.digest)


@cache
def code_version() -> dict[str, str]:
    """The release and, when run from a checkout, the commit."""
    found = {"release": version("mqmk-daemon")}
    with suppress(OSError, subprocess.SubprocessError):
        command = ["git", "-C", str(Path(__file__).resolve().parent), "rev-parse", "HEAD"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
        found["git"] = done.stdout.strip()
    return found


def _numbers(evaluation: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in evaluation.items() if isinstance(value, int | float)}
