"""The one door to MLflow: trainings are runs, pool versions are model versions, an alias says which is served.

MLflow offers no transactions across calls, so each thing has one last step that makes it count: a run counts when its
status is FINISHED, a version when it exists (MLflow creates it with all its tags at once). Whatever a killed process
left before that step is found by its effect id and completed, or replaced if its content was another.
"""

import json
import sqlite3
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar
from urllib.parse import urlsplit

from mqmk.daemon.errors import RegistryError
from mqmk.daemon.passwords import hidden
from mqmk.daemon.registry_opening import be_quiet_and_quick, database_path, expect_readable, patience
from mqmk.daemon.registry_records import (
    Deletion,
    RegisteredVersion,
    Registry,
    TrainingRecord,
    VersionRecord,
    expect_next,
    expect_same,
    files_gone,
    number_gone,
    place_pool,
    read_files,
    version_from_tags,
    version_tags,
)
from mqmk.daemon.registry_runs import (
    EXPERIMENT_KIND,
    MODEL_NOTE,
    POOL_FOLDER,
    POOLS_NOTE,
    TRAININGS_NOTE,
    RunDraft,
    pool_draft,
    training_draft,
    version_note,
    write_files,
)
from mqmk.matcher.durable import sync_folder
from mqmk.matcher.errors import MqmkError
from mqmk.matcher.pool_files import CARD, TENSORS, PoolFiles

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run
    from mlflow.entities.model_registry import ModelVersion

__all__ = [
    "Deletion",
    "MlflowRegistry",
    "RegisteredVersion",
    "Registry",
    "TrainingRecord",
    "VersionRecord",
]

ALIAS: Final = "serving"
MOST_PARAMETERS, MOST_POINTS = 100, 1000  # that MLflow takes at once
_MAY_PASS: Final = (408, 409, 429, 499)

T = TypeVar("T")


class MlflowRegistry:
    """Records in MLflow: a SQLite file with local artifacts (`sqlite:///…`), or a tracking server (`https://…`).

    `artifacts` is for SQLite only: a server knows where it keeps its own.
    """

    def __init__(
        self,
        tracking_uri: str,
        artifacts: Path | None = None,
        experiment: str = "mqmk",
        model: str = "mqmk",
        connect: "Callable[[str], MlflowClient] | None" = None,
    ) -> None:
        self._uri, self._model = tracking_uri, model
        self._trainings, self._pools = experiment, f"{experiment}-pools"
        self._database = database_path(tracking_uri)
        self._artifacts = self._database and (artifacts or self._database.parent / "mlflow-artifacts")
        self._connect = connect or _connect
        self._client: MlflowClient | None = None

    def record_training(self, record: TrainingRecord) -> str:
        """A run with parameters, the metrics of every epoch, TASK.json, tables and figures."""
        with self._asking() as client:
            return self._run(client, self._trainings, training_draft(record)).info.run_id

    def record_version(self, record: VersionRecord) -> None:
        """A model version, whose own run holds the two pool files and the metrics."""
        with self._asking() as client:
            if known := self._find(client, record.version):
                return expect_same(_registered(known), record)
            expect_next(record, self._highest(client))
            pool, files = read_files(record) or (None, None)
            note = version_note(record, pool)
            run = self._run(client, self._pools, pool_draft(record, files, note))
            self._create(client, record, run, note)
        return None

    def point_serving(self, version: int) -> None:
        """Move the alias."""
        with self._asking() as client:
            self._must_find(client, version)
            client.set_registered_model_alias(self._model, ALIAS, str(version))

    def record_deletion(self, effect_id: str, task: str, version: int, exact: bool) -> None:
        """A tag on the version, and one on each training of that task."""
        deletion = Deletion(effect_id, task, version, exact)
        with self._asking() as client:
            known = _deletion(self._must_find(client, version))
            if known not in (None, deletion):
                raise RegistryError(f"version {version}: expected no other deletion, got {known}", passing=False)
            for run in self._search(client, self._trainings, "task", task):
                client.set_tag(run.info.run_id, "forgotten_in_version", str(version))
            fields = json.dumps({"effect_id": effect_id, "task": task, "exact": exact})
            client.set_model_version_tag(self._model, str(version), "deletion", fields)

    def versions(self) -> list[RegisteredVersion]:
        """All model versions, in order."""
        with self._asking() as client:
            return sorted(map(_registered, self._all(client)), key=lambda version: version.version)

    def deletions(self) -> list[Deletion]:
        """All deletions, in order of their versions."""
        with self._asking() as client:
            found = [deletion for version in self._all(client) if (deletion := _deletion(version))]
        return sorted(found, key=lambda deletion: deletion.version)

    def serving(self) -> int | None:
        """Where the alias is."""
        with self._asking() as client:
            model = _or_none(lambda: client.get_registered_model(self._model))
            return int(model.aliases[ALIAS]) if model and ALIAS in model.aliases else None

    def fetch_pool(self, version: int, into: Path) -> Path:
        """Download the two files, check them against the recorded digest, and put them into a pool store."""
        with self._asking() as client, tempfile.TemporaryDirectory() as part:
            known = self._must_find(client, version)
            assert known.run_id  # given when it was made
            if not client.list_artifacts(known.run_id, POOL_FOLDER):
                raise files_gone(version)
            with patience():
                folder = Path(client.download_artifacts(known.run_id, POOL_FOLDER, part))
            files = PoolFiles((folder / TENSORS).read_bytes(), (folder / CARD).read_bytes())
            return place_pool(files, _registered(known), into)

    def close(self) -> None:
        """Forget the client; MLflow itself keeps its connections for the life of the process."""
        self._client = None

    # Runs

    def _run(self, client: "MlflowClient", experiment: str, draft: RunDraft) -> "Run":
        """The one finished run of an effect id."""
        found = self._search(client, experiment, "effect_id", draft.effect_id)
        kept = next((run for run in found if run.info.status == "FINISHED"), None)
        kept = kept or next((run for run in found if run.data.tags.get("content") == draft.content), None)
        for run in found:
            if kept is None or run.info.run_id != kept.info.run_id:
                client.delete_run(run.info.run_id)
        if kept and kept.info.status == "FINISHED":
            return kept
        run = kept or self._start(client, experiment, draft)
        self._fill(client, run, draft)
        ended = None if draft.ended is None else round(draft.ended * 1000)
        client.set_terminated(run.info.run_id, "FINISHED", ended)
        return run

    def _start(self, client: "MlflowClient", experiment: str, draft: RunDraft) -> "Run":
        started = round((time.time() if draft.started is None else draft.started) * 1000)
        return client.create_run(self._experiment(client, experiment), started, draft.all_tags(), draft.name)

    def _fill(self, client: "MlflowClient", run: "Run", draft: RunDraft) -> None:
        """Any part of this may be there already: MLflow takes the same parameter, point or file twice."""
        from mlflow.entities import Metric, Param

        start, run_id = run.info.start_time, run.info.run_id  # the same time when it is done again
        params = [Param(name, value) for name, value in draft.parameters.items()]
        points = [Metric(name, value, start + step, step) for name, value, step in draft.points]
        for some in _batches(params, MOST_PARAMETERS):
            client.log_batch(run_id, params=some)
        for few in _batches(points, MOST_POINTS):
            client.log_batch(run_id, metrics=few)
        with tempfile.TemporaryDirectory() as folder, patience():
            write_files(draft.files, Path(folder))
            client.log_artifacts(run_id, folder)

    def _search(self, client: "MlflowClient", experiment: str, tag: str, value: str) -> "list[Run]":
        where = f"tags.{tag} = '{value}'"
        return list(client.search_runs([self._experiment(client, experiment)], where, order_by=["start_time ASC"]))

    def _experiment(self, client: "MlflowClient", name: str) -> str:
        known = client.get_experiment_by_name(name)
        if known is None:
            location = (self._artifacts / name).absolute().as_uri() if self._artifacts else None
            note = TRAININGS_NOTE if name == self._trainings else POOLS_NOTE
            return client.create_experiment(name, location, {"mlflow.note.content": note, **EXPERIMENT_KIND})
        if known.lifecycle_stage != "active":
            raise RegistryError(
                f"the MLflow experiment {name!r} was deleted; type `mlflow experiments restore --experiment-id "
                f"{known.experiment_id}` or configure another name",
                passing=False,
            )
        return known.experiment_id

    # Versions

    def _create(self, client: "MlflowClient", record: VersionRecord, run: "Run", note: str) -> None:
        if _or_none(lambda: client.get_registered_model(self._model)) is None:
            client.create_registered_model(self._model, description=MODEL_NOTE)
        source = f"{run.info.artifact_uri}/{POOL_FOLDER}"
        made = client.create_model_version(self._model, source, run.info.run_id, version_tags(record), description=note)
        if int(made.version) != record.version:  # numbers of deleted versions are hidden until one is given out
            client.delete_model_version(self._model, made.version)
            raise number_gone(record.version, int(made.version))

    def _find(self, client: "MlflowClient", version: int) -> "ModelVersion | None":
        return _or_none(lambda: client.get_model_version(self._model, str(version)))

    def _must_find(self, client: "MlflowClient", version: int) -> "ModelVersion":
        found = self._find(client, version)
        if found is None:
            raise RegistryError(f"version {version} is not recorded in MLflow as {self._model!r}", passing=False)
        return found

    def _highest(self, client: "MlflowClient") -> int:
        page = client.search_model_versions(f"name='{self._model}'", max_results=1, order_by=["version_number DESC"])
        return int(page[0].version) if page else 0

    def _all(self, client: "MlflowClient") -> "list[ModelVersion]":
        found: list[ModelVersion] = []
        token = None
        while True:
            page = client.search_model_versions(f"name='{self._model}'", max_results=1000, page_token=token)
            found, token = [*found, *page], page.token
            if not token:
                return found

    def _open(self) -> "MlflowClient":
        """Only when it is first needed: the import of MLflow takes two seconds."""
        be_quiet_and_quick()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # MLflow's imports warn about what MLflow itself uses
            if self._database is not None:
                if not self._database.exists():
                    _create_database(self._database)
                expect_readable(self._database)
            client = self._connect(self._uri)
            _or_none(lambda: client.get_registered_model(self._model))  # imports the rest
        return client

    @contextmanager
    def _asking(self) -> "Iterator[MlflowClient]":
        """The client, and MLflow's errors as ours."""
        try:
            if self._client is None:
                self._client = self._open()
            yield self._client
        except MqmkError:
            raise
        except Exception as error:
            passing = _passing(error)
            if passing is None:
                raise
            place = self._database or urlsplit(self._uri).hostname
            raise RegistryError(f"MLflow ({place}): {hidden(str(error)).strip()[:500]}", passing=passing) from error


def _registered(version: "ModelVersion") -> RegisteredVersion:
    return version_from_tags(int(version.version), version.tags)


def _deletion(version: "ModelVersion") -> Deletion | None:
    fields = json.loads(version.tags.get("deletion", "null"))
    return Deletion(version=int(version.version), **fields) if fields else None


def _batches(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    return (items[start : start + size] for start in range(0, len(items), size))


def _or_none(ask: Callable[[], T]) -> T | None:
    """None for what MLflow does not know."""
    from mlflow.exceptions import MlflowException

    try:
        return ask()
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return None


def _passing(error: Exception) -> bool | None:
    """Whether asking again later may help; None for an error that is not MLflow's."""
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    if isinstance(error, MlflowException):
        status = int(error.get_http_status_code())  # type: ignore[no-untyped-call]
        return status >= 500 or status in _MAY_PASS
    return True if isinstance(error, OSError | SQLAlchemyError | sqlite3.Error) else None


def _create_database(database: Path) -> None:
    """MLflow makes its tables in many steps: beside, then moved, so that a killed process never leaves half of them."""
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    database.parent.mkdir(parents=True, exist_ok=True)
    part = database.with_name(f".{database.name}.part")
    part.unlink(missing_ok=True)  # of a process that was killed
    part.with_name(f"{part.name}-journal").unlink(missing_ok=True)
    root = database.parent.absolute().as_uri()
    store = SqlAlchemyStore(f"sqlite:///{part.absolute()}", root)  # type: ignore[no-untyped-call]
    store.engine.dispose()
    part.replace(database)
    sync_folder(database.parent)


def _connect(tracking_uri: str) -> "MlflowClient":
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri, registry_uri=tracking_uri)
