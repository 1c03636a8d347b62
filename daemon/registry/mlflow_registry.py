"""The registry in MLflow: training runs are runs, pool versions are model versions, an alias marks the served one.

MLflow has no transactions across calls, so every record has one final step that makes it valid: a run when its status
is FINISHED, a version when it exists (MLflow creates it with all its tags at once). What a killed process left before
that step is found by its effect id and completed, or replaced if its content differs.
"""

import json
import shutil
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
from mqmk.daemon.redaction import redact
from mqmk.daemon.registry.interface import (
    Registry,
    add_layers,
    artifacts_missing,
    check_record,
    install_pool,
    recorded_tasks,
    require_next,
    require_same,
    version_number_taken,
)
from mqmk.daemon.registry.mlflow_env import configure_client, database_path, require_readable, transfer_timeout
from mqmk.daemon.registry.mlflow_runs import (
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
from mqmk.daemon.registry.records import (
    LAYERS,
    Deletion,
    RegisteredVersion,
    TrainingRecord,
    VersionRecord,
    version_from_tags,
    version_tags,
)
from mqmk.matcher.durable import sync_folder
from mqmk.matcher.errors import MqmkError, PoolError
from mqmk.matcher.pool_cards import CardTask
from mqmk.matcher.pool_files import TENSORS, PoolVersion
from mqmk.matcher.pool_store import PoolStore

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
ERASED: Final = "erased"
"""The tag of a run whose layers were deleted, because a task was forgotten."""
MAX_PARAMETERS, MAX_POINTS = 100, 1000  # per request
_MAY_PASS: Final = (408, 409, 429, 499)

T = TypeVar("T")


class MlflowRegistry:
    """Records in MLflow: a SQLite file with local artifacts (`sqlite:///…`), or a tracking server (`https://…`).

    `artifacts` is for SQLite only: a server has its own artifact store.
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
        with self._session() as client:
            return self._run(client, self._trainings, training_draft(record)).info.run_id

    def record_version(self, record: VersionRecord) -> None:
        """A model version, whose own run holds the card, the layers that came with it, and the metrics."""
        with self._session() as client:
            if known := self._find(client, record.version):
                return require_same(_to_registered(known), record)
            require_next(record, self._latest_number(client))
            check_record(record)
            note = version_note(record)
            run = self._run(client, self._pools, pool_draft(record, note))
            self._create(client, record, run, note)
        return None

    def point_serving(self, version: int) -> None:
        """Move the alias."""
        with self._session() as client:
            self._require(client, version)
            client.set_registered_model_alias(self._model, ALIAS, str(version))

    def record_deletion(self, effect_id: str, task: str, version: int, exact: bool) -> None:
        """A tag on the version, and one on each training run of that task."""
        deletion = Deletion(effect_id, task, version, exact)
        with self._session() as client:
            known = _deletion(self._require(client, version))
            if known not in (None, deletion):
                raise RegistryError(f"version {version}: expected no other deletion, got {known}", transient=False)
            for run in self._search(client, self._trainings, "task", task):
                client.set_tag(run.info.run_id, "forgotten_in_version", str(version))
            fields = json.dumps({"effect_id": effect_id, "task": task, "exact": exact})
            client.set_model_version_tag(self._model, str(version), "deletion", fields)

    def versions(self) -> list[RegisteredVersion]:
        """All model versions, in order."""
        with self._session() as client:
            return sorted(map(_to_registered, self._list_model_versions(client)), key=lambda version: version.version)

    def deletions(self) -> list[Deletion]:
        """All deletions, in order of their versions."""
        with self._session() as client:
            found = [deletion for version in self._list_model_versions(client) if (deletion := _deletion(version))]
        return sorted(found, key=lambda deletion: deletion.version)

    def serving(self) -> int | None:
        """The version with the alias."""
        with self._session() as client:
            model = _none_if_missing(lambda: client.get_registered_model(self._model))
            return int(model.aliases[ALIAS]) if model and ALIAS in model.aliases else None

    def fetch_pool(self, version: int, store: PoolStore) -> PoolVersion:
        """Download what the store lacks, from this version's run and, as far back as needed, those before it."""
        return self._fetch(version, store, install_pool)

    def fetch_tasks(self, version: int, store: PoolStore) -> tuple[CardTask, ...]:
        """From the version's own run; its pages may be in those before it."""
        return self._fetch(version, store, recorded_tasks)

    def _fetch(
        self, version: int, store: PoolStore, read: Callable[[dict[str, bytes], RegisteredVersion, PoolStore], T]
    ) -> T:
        with self._session() as client, tempfile.TemporaryDirectory() as part:
            known = self._require(client, version)
            files = self._download(client, known, Path(part))
            if not files:
                raise artifacts_missing(version)
            before: ModelVersion | None = known
            while before is not None:
                try:
                    return read(files, _to_registered(known), store)
                except PoolError:
                    before = self._parent(client, before)
                    if before is None:
                        raise
                    add_layers(self._download(client, before, Path(part)), store)
        raise artifacts_missing(version)

    def _parent(self, client: "MlflowClient", version: "ModelVersion") -> "ModelVersion | None":
        parent = _to_registered(version).parent
        return None if parent is None else self._find(client, parent)

    def _download(self, client: "MlflowClient", version: "ModelVersion", part: Path) -> dict[str, bytes]:
        """The files of a version's own run and of its trainings, by their paths below `pool/` and `layers/`."""
        found: dict[str, bytes] = {}
        trainings = version.tags.get("training_run", "").split()
        runs = [(version.run_id, POOL_FOLDER, ""), *((run_id, LAYERS, f"{LAYERS}/") for run_id in trainings)]
        for run_id, folder, prefix in runs:
            if run_id and client.list_artifacts(run_id, folder):
                with transfer_timeout():
                    here = Path(client.download_artifacts(run_id, folder, str(part)))
                paths = [path for path in here.rglob("*") if path.is_file()]
                found |= {prefix + path.relative_to(here).as_posix(): path.read_bytes() for path in paths}
                shutil.rmtree(here)
        return found

    def erase_task(self, identity: str, versions: Sequence[int]) -> list[str]:
        """Delete the layers of every training of these data, and what runs of 0.1 hold of these versions."""
        with self._session() as client:
            erased = []
            for run in self._search(client, self._trainings, "data", identity):
                layers = [file.path for file in client.list_artifacts(run.info.run_id, LAYERS)]
                erased += self._note_erased(client, run, identity, layers)
                if layers:
                    self._erase(run, LAYERS)
            for number in versions:
                version = self._find(client, number)
                if version and version.run_id:
                    erased += self._erase_whole_pool(client, client.get_run(version.run_id), identity)
            return erased

    def _erase_whole_pool(self, client: "MlflowClient", run: "Run", identity: str) -> list[str]:
        path = f"{POOL_FOLDER}/{TENSORS}"
        if not any(file.path == path for file in client.list_artifacts(run.info.run_id, POOL_FOLDER)):
            return _read_erased(run).get(identity, [])
        names = self._note_erased(client, run, identity, [path])
        self._erase(run, path)
        return names

    def erased_data(self) -> set[str]:
        """By the tags of training runs."""
        with self._session() as client:
            erased = self._runs(client, self._trainings, f"tags.{ERASED} LIKE '{{%'")
            found = {identity for run in erased for identity in _read_erased(run)}
            trainings = {identity: self._search(client, self._trainings, "data", identity) for identity in found}
            return {identity for identity, runs in trainings.items() if all(map(_read_erased, runs))}

    def _note_erased(self, client: "MlflowClient", run: "Run", identity: str, paths: list[str]) -> list[str]:
        """Tag a run with what is about to be deleted of it; returns that and what was noted before."""
        noted = _read_erased(run)
        names = sorted({*noted.get(identity, ()), *(f"{run.info.run_id}/{path}" for path in paths)})
        if noted.get(identity) != names:
            client.set_tag(run.info.run_id, ERASED, json.dumps(noted | {identity: names}))
        return names

    def _erase(self, run: "Run", path: str) -> None:
        from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

        repository = get_artifact_repository(run.info.artifact_uri, tracking_uri=self._uri)
        with transfer_timeout():
            repository.delete_artifacts(path)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Drop the client; MLflow itself keeps its connections until the process ends."""
        self._client = None

    # Runs

    def _run(self, client: "MlflowClient", experiment: str, draft: RunDraft) -> "Run":
        """The one finished run with this effect id."""
        found = self._search(client, experiment, "effect_id", draft.effect_id)
        kept = next((run for run in found if run.info.status == "FINISHED"), None)
        kept = kept or next((run for run in found if run.data.tags.get("content") == draft.content), None)
        for run in found:
            if kept is None or run.info.run_id != kept.info.run_id:
                client.delete_run(run.info.run_id)
        if kept and kept.info.status == "FINISHED":
            return kept
        run = kept or self._start(client, experiment, draft)
        self._log_contents(client, run, draft)
        ended = None if draft.ended is None else round(draft.ended * 1000)
        client.set_terminated(run.info.run_id, "FINISHED", ended)
        return run

    def _start(self, client: "MlflowClient", experiment: str, draft: RunDraft) -> "Run":
        started = round((time.time() if draft.started is None else draft.started) * 1000)
        return client.create_run(self._experiment(client, experiment), started, draft.all_tags(), draft.name)

    def _log_contents(self, client: "MlflowClient", run: "Run", draft: RunDraft) -> None:
        """Any part of this may exist already: MLflow accepts the same parameter, point or file twice."""
        from mlflow.entities import Metric, Param

        start, run_id = run.info.start_time, run.info.run_id  # the same time if it is done again
        params = [Param(name, value) for name, value in draft.parameters.items()]
        points = [Metric(name, value, start + step, step) for name, value, step in draft.points]
        for some in _batches(params, MAX_PARAMETERS):
            client.log_batch(run_id, params=some)
        for few in _batches(points, MAX_POINTS):
            client.log_batch(run_id, metrics=few)
        with tempfile.TemporaryDirectory() as folder, transfer_timeout():
            write_files(draft.files, Path(folder))
            client.log_artifacts(run_id, folder)

    def _search(self, client: "MlflowClient", experiment: str, tag: str, value: str) -> "list[Run]":
        return self._runs(client, experiment, f"tags.{tag} = '{value}'")

    def _runs(self, client: "MlflowClient", experiment: str, where: str) -> "list[Run]":
        found: list[Run] = []
        token, own = None, [self._experiment(client, experiment)]
        while True:
            page = client.search_runs(own, where, order_by=["start_time ASC"], page_token=token)
            found, token = [*found, *page], page.token
            if not token:
                return found

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
                transient=False,
            )
        return known.experiment_id

    # Versions

    def _create(self, client: "MlflowClient", record: VersionRecord, run: "Run", note: str) -> None:
        if _none_if_missing(lambda: client.get_registered_model(self._model)) is None:
            client.create_registered_model(self._model, description=MODEL_NOTE)
        source = f"{run.info.artifact_uri}/{POOL_FOLDER}"
        made = client.create_model_version(self._model, source, run.info.run_id, version_tags(record), description=note)
        if int(made.version) != record.version:  # MLflow does not reuse numbers of deleted versions
            client.delete_model_version(self._model, made.version)
            raise version_number_taken(record.version, int(made.version))

    def _find(self, client: "MlflowClient", version: int) -> "ModelVersion | None":
        return _none_if_missing(lambda: client.get_model_version(self._model, str(version)))

    def _require(self, client: "MlflowClient", version: int) -> "ModelVersion":
        found = self._find(client, version)
        if found is None:
            raise RegistryError(f"version {version} is not recorded in MLflow as {self._model!r}", transient=False)
        return found

    def _latest_number(self, client: "MlflowClient") -> int:
        page = client.search_model_versions(f"name='{self._model}'", max_results=1, order_by=["version_number DESC"])
        return int(page[0].version) if page else 0

    def _list_model_versions(self, client: "MlflowClient") -> "list[ModelVersion]":
        found: list[ModelVersion] = []
        token = None
        while True:
            page = client.search_model_versions(f"name='{self._model}'", max_results=1000, page_token=token)
            found, token = [*found, *page], page.token
            if not token:
                return found

    def _open(self) -> "MlflowClient":
        """Only when it is first needed: the import of MLflow takes two seconds."""
        configure_client()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # MLflow's imports emit deprecation warnings
            if self._database is not None:
                if not self._database.exists():
                    _create_database(self._database)
                require_readable(self._database)
            client = self._connect(self._uri)
            _none_if_missing(lambda: client.get_registered_model(self._model))  # imports the rest
        return client

    @contextmanager
    def _session(self) -> "Iterator[MlflowClient]":
        """The client; MLflow's errors become RegistryError."""
        try:
            if self._client is None:
                self._client = self._open()
            yield self._client
        except MqmkError:
            raise
        except Exception as error:
            transient = _is_transient(error)
            if transient is None:
                raise
            place = self._database or urlsplit(self._uri).hostname
            raise RegistryError(f"MLflow ({place}): {redact(str(error)).strip()[:500]}", transient=transient) from error


def _to_registered(version: "ModelVersion") -> RegisteredVersion:
    return version_from_tags(int(version.version), version.tags)


def _deletion(version: "ModelVersion") -> Deletion | None:
    fields = json.loads(version.tags.get("deletion", "null"))
    return Deletion(version=int(version.version), **fields) if fields else None


def _read_erased(run: "Run") -> dict[str, list[str]]:
    """What was deleted of a run, by the data of the task that was forgotten."""
    noted: dict[str, list[str]] = json.loads(run.data.tags.get(ERASED, "{}"))
    return noted


def _batches(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    return (items[start : start + size] for start in range(0, len(items), size))


def _none_if_missing(call: Callable[[], T]) -> T | None:
    """None if MLflow has no such resource."""
    from mlflow.exceptions import MlflowException

    try:
        return call()
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return None


def _is_transient(error: Exception) -> bool | None:
    """Whether a retry may help; None for an error that is not MLflow's."""
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    if isinstance(error, MlflowException):
        status = int(error.get_http_status_code())  # type: ignore[no-untyped-call]
        return status >= 500 or status in _MAY_PASS
    return True if isinstance(error, OSError | SQLAlchemyError | sqlite3.Error) else None


def _create_database(database: Path) -> None:
    """MLflow creates its tables in many steps: in a temporary file, so that a killed process leaves no half of them."""
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    database.parent.mkdir(parents=True, exist_ok=True)
    part = database.with_name(f".{database.name}.part")
    part.unlink(missing_ok=True)  # left by a killed process
    part.with_name(f"{part.name}-journal").unlink(missing_ok=True)
    root = database.parent.absolute().as_uri()
    store = SqlAlchemyStore(f"sqlite:///{part.absolute()}", root)  # type: ignore[no-untyped-call]
    store.engine.dispose()
    part.replace(database)
    sync_folder(database.parent)


def _connect(tracking_uri: str) -> "MlflowClient":
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri, registry_uri=tracking_uri)
