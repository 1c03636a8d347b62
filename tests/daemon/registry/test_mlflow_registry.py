"""The registry: the same promises over MLflow on SQLite, an MLflow server on PostgreSQL, and the memory twin."""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.builders import frozen, random_pool, random_task, random_timm_vit
from support.servers.mlflow_servers import POSTGRES, Process, mlflow_server, postgres

from mqmk.daemon.builder.evaluation_artifacts import evaluation_files
from mqmk.daemon.errors import RegistryError
from mqmk.daemon.ports import free_port
from mqmk.daemon.registry.in_memory import MemoryRegistry
from mqmk.daemon.registry.mlflow_registry import MlflowRegistry, Registry, TrainingRecord, VersionRecord
from mqmk.daemon.registry.mlflow_runs import POOL_FOLDER, RunDraft
from mqmk.daemon.registry.records import Deletion, version_tags
from mqmk.learner.data.manifest import Manifest, Shard
from mqmk.learner.evaluation.sample_evaluation import SampleTally, TaskShare
from mqmk.matcher.errors import PoolError
from mqmk.matcher.pool import PromptPool
from mqmk.matcher.pool_files import CARD, TENSORS, encode
from mqmk.matcher.pool_store import Pointer, PoolStore

if TYPE_CHECKING:
    from mlflow import MlflowClient

SHARD = Shard("birds-000000.tar", 123, "a" * 64, 64)
MANIFEST = Manifest("birds", ("heron", "owl | barn"), (SHARD,)).to_bytes()
TRAINING = TrainingRecord(
    effect_id="train:birds (1):abc",
    task="birds",
    parameters={"epochs": 3, "learning rate": 0.01, "matcher": "mqmk", "augment": True},
    epochs=[{"loss": 1.0 / (step + 1), "images/s": 50.0} for step in range(3)],
    manifest=MANIFEST,
    files={"evaluation/tasks.csv": b"task,rate\nbirds,0.5\n"},
    tags={"git": "abc1234"},
)


@pytest.fixture(scope="module")
def pool() -> PromptPool:
    """Two tasks on a small backbone."""
    return random_pool((2, 3), vit=frozen(random_timm_vit()))


@pytest.fixture
def store(tmp_path: Path) -> PoolStore:
    """An empty pool store."""
    return PoolStore(tmp_path / "pools")


@pytest.fixture
def again(tmp_path: Path) -> PoolStore:
    """Another one."""
    return PoolStore(tmp_path / "again")


@pytest.fixture
def records(pool: PromptPool, store: PoolStore) -> list[VersionRecord]:
    """Three versions in the store: learned, learned, forgotten."""
    chain = [pool, pool.with_task(random_task("birds", 2)), pool]
    return [written(each, store, number + 1) for number, each in enumerate(chain)]


def files_in(store: PoolStore) -> dict[str, bytes]:
    return {
        str(path.relative_to(store.folder)): path.read_bytes() for path in store.folder.rglob("*") if path.is_file()
    }


def written(pool: PromptPool, store: PoolStore, version: int) -> VersionRecord:
    """A version in the store, and its record with the layers that its parent lacks."""
    before = {name for card in store.cards(version - 1) for name in card.files}
    at = store.write(pool, version, version - 1 or None)
    card = store.card(at)
    kind = "forget" if version == 3 else "learn"
    return VersionRecord(
        effect_id=f"version:{version}:{at.digest[:12]}",
        version=version,
        digest=at.digest,
        parent=at.parent,
        kind=kind,
        changed=["birds"],
        run_ids=[],
        card=store.card_bytes(at),
        files={name: store.read_layer(name) for name in card.files - before},
        tasks=card.tasks,
        tags={"git": "abc1234", "data": "d" * 64},
        metrics={"matching_rate/birds (1)": 0.9},
    )


# Where records are kept


@dataclass(frozen=True)
class FirstStart:
    """Two processes that open a registry where there was none; the first was killed while MLflow made its tables."""

    database: Path
    left_by_the_killed: list[str]
    second: subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def first_start(tmp_path_factory: pytest.TempPathFactory) -> FirstStart:
    """MLflow needs seconds to make its tables, so it is done once."""
    home = tmp_path_factory.mktemp("first")
    database = home / "state" / "mlflow.db"
    script = (
        "import sys; from mqmk.daemon.registry.mlflow_registry import MlflowRegistry\n"
        "assert 'mlflow' not in sys.modules\n"
        f"assert MlflowRegistry('sqlite:///{database}').versions() == []"
    )
    command: list[str | Path] = [sys.executable, "-W", "error", "-c", script]
    with Process(command, home / "log", cwd=home) as first:
        part = database.with_name(".mlflow.db.part")
        first.wait_for(lambda: part.exists() and part.stat().st_size > 0)
    left = [path.name for path in database.parent.iterdir()]
    return FirstStart(database, left, subprocess.run(command, cwd=home, capture_output=True, text=True, check=False))


@pytest.fixture
def empty_database(first_start: FirstStart) -> Path:
    """A database of MLflow's with nothing in it, to be copied."""
    assert first_start.second.returncode == 0, first_start.second.stderr
    return first_start.database


@pytest.fixture
def database(empty_database: Path, tmp_path: Path) -> Path:
    """A database of MLflow's with nothing in it."""
    return Path(shutil.copy(empty_database, tmp_path / "mlflow.db"))


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The address of a real MLflow server on PostgreSQL, with artifacts that it keeps itself."""
    if not (POSTGRES / "initdb").exists():
        pytest.skip("PostgreSQL 15 is not installed: apt-get install postgresql-15")
    if os.geteuid() != 0:
        pytest.skip("PostgreSQL refuses to run as anyone but its own user, to whom only root can change")
    pytest.importorskip("psycopg2", reason="psycopg2-binary is not installed: pip install mqmk-daemon[dev]")
    home = Path(subprocess.check_output(["mktemp", "-d", "/tmp/mqmk-pg.XXXXXX"], text=True).strip())  # a short path
    try:
        with (
            postgres(home) as port,
            mlflow_server(home, f"postgresql+psycopg2://postgres@127.0.0.1:{port}/postgres") as url,
        ):
            yield url
    finally:
        shutil.rmtree(home)


Open = Callable[[], Registry]


@pytest.fixture(params=["memory", "sqlite"])
def reopen(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    """Opens the same registry, as a process does that starts again."""
    if request.param == "memory":
        memory = MemoryRegistry()
        return lambda: memory
    database = request.getfixturevalue("database")
    return partial(MlflowRegistry, f"sqlite:///{database}", tmp_path / "artifacts")


# What every registry promises


def test_an_empty_registry_knows_nothing(reopen: Open):
    registry = reopen()
    assert (registry.versions(), registry.deletions(), registry.serving()) == ([], [], None)


def test_a_training_is_recorded_once_for_each_effect_id(reopen: Open):
    run_id = reopen().record_training(TRAINING)
    assert reopen().record_training(TRAINING) == run_id
    assert reopen().record_training(replace(TRAINING, effect_id="train:birds (2):abc")) != run_id


def test_versions_are_read_back_in_order(reopen: Open, records: list[VersionRecord]):
    for record in records:
        reopen().record_version(record)
        reopen().record_version(record)
    found = reopen().versions()
    assert [(each.version, each.digest, each.parent, each.kind, each.effect_id) for each in found] == [
        (each.version, each.digest, each.parent, each.kind, each.effect_id) for each in records
    ]
    assert [each.parent for each in found] == [None, 1, 2]


def test_the_pointer_goes_forth_and_back(reopen: Open, records: list[VersionRecord]):
    registry = reopen()
    for record in records[:2]:
        registry.record_version(record)
    assert registry.serving() is None
    for version in (1, 2, 2, 1):
        registry.point_serving(version)
        assert reopen().serving() == version


def test_a_deletion_is_recorded_once(reopen: Open, records: list[VersionRecord]):
    registry = reopen()
    registry.record_version(records[0])
    for _ in range(2):
        registry.record_deletion("forget:birds", "birds", 1, exact=True)
    assert reopen().deletions() == [Deletion("forget:birds", "birds", 1, exact=True)]
    with pytest.raises(RegistryError, match="other deletion"):
        registry.record_deletion("forget:owls", "owls", 1, exact=False)


def test_a_pool_is_rebuilt_from_the_registry_alone(reopen: Open, records: list[VersionRecord], store, again):
    registry = reopen()
    for record in records[:2]:
        registry.record_version(record)
    for number in (1, 3):
        store.remove(*store.paths()[number])
    before = files_in(store)
    shutil.rmtree(store.folder)
    found = reopen().fetch_pool(2, again)
    assert (found.version, found.digest, found.parent) == (2, records[1].digest, 1)
    assert files_in(again) == before, "with the layers that came with the version before it"
    assert reopen().fetch_pool(2, again) == found and files_in(again) == before


def test_the_layer_of_a_task_is_recorded_with_its_training_and_erased_with_it(
    reopen: Open, pool: PromptPool, store: PoolStore, again: PoolStore
):
    registry = reopen()
    birds = replace(random_task("birds", 2), manifest_sha256="d" * 64)
    owls = replace(random_task("owls", 2), manifest_sha256="e" * 64)
    chain = [replace(pool, tasks=(birds,)), replace(pool, tasks=(birds, owls)), replace(pool, tasks=(owls,))]
    for number, each in enumerate(chain, start=1):
        record = written(each, store, number)
        layers = {
            name: data for name, data in record.files.items() if any(name.startswith(t.layer) for t in record.tasks)
        }
        runs = []
        if number < 3:
            tags = {"data": each.tasks[-1].manifest_sha256}
            runs = [registry.record_training(replace(TRAINING, effect_id=f"train:{number}", layers=layers, tags=tags))]
        rest = {name: data for name, data in record.files.items() if name not in layers}
        registry.record_version(replace(record, files=rest, run_ids=runs))
    for number, each in enumerate(chain, start=1):
        found = again.read(reopen().fetch_pool(number, again))
        assert [task.name for task in found.tasks] == [task.name for task in each.tasks]
    assert registry.erased_data() == set()
    (gone,) = registry.erase_task("d" * 64, [])
    assert gone.endswith(f"/layers/{store.cards(1)[0].tasks[0].layer}.safetensors")
    assert reopen().erase_task("d" * 64, []) == [gone], "the record is the same if the first answer was lost"
    assert registry.erase_task("c" * 64, []) == [] and reopen().erased_data() == {"d" * 64}
    shutil.rmtree(again.folder)
    for number in (1, 2):
        with pytest.raises(PoolError):
            reopen().fetch_pool(number, again)
        names = [task.name for task in reopen().fetch_tasks(number, again)]
        assert names == [task.name for task in chain[number - 1].tasks], "which tasks there were is still known"
    assert [task.name for task in again.read(reopen().fetch_pool(3, again)).tasks] == ["owls"]
    assert not [
        path for path in again.layers.iterdir() if path.name in [f"{store.cards(1)[0].tasks[0].layer}.safetensors"]
    ]


def test_a_version_that_adds_several_tasks_has_the_layers_of_all_their_trainings(
    reopen: Open, pool: PromptPool, store: PoolStore, again: PoolStore
):
    names = ("birds", "owls", "gulls")
    added = [replace(random_task(name, 2), manifest_sha256=name[0] * 64) for name in names]
    record, runs = written(replace(pool, tasks=tuple(added)), store, 1), []
    for task in record.tasks:
        layers = {f"{task.layer}.safetensors": record.files[f"{task.layer}.safetensors"]}
        tags = {"data": task.manifest_sha256}
        made = replace(TRAINING, effect_id=f"train:{task.name}", task=task.name, layers=layers, tags=tags)
        runs.append(reopen().record_training(made))
    rest = {
        name: data for name, data in record.files.items() if not any(name.startswith(t.layer) for t in record.tasks)
    }
    for _ in range(2):
        reopen().record_version(replace(record, changed=names, run_ids=runs, files=rest))
    found = again.read(reopen().fetch_pool(1, again))
    assert [task.name for task in found.tasks] == [*names]


def test_a_version_whose_files_were_removed_is_recorded_without_them(
    reopen: Open, records: list[VersionRecord], again: PoolStore
):
    whole = replace(records[1], files={**records[0].files, **records[1].files})
    for record in (replace(records[0], card=None, files={}), whole):
        for _ in range(2):
            reopen().record_version(record)
    assert [each.digest for each in reopen().versions()] == [record.digest for record in records[:2]]
    with pytest.raises(RegistryError, match="version 1 is recorded, but its files are missing") as refused:
        reopen().fetch_pool(1, again)
    assert not refused.value.transient
    assert again.holds(reopen().fetch_pool(2, again))


def test_damaged_files_are_replaced_by_the_recorded_ones(reopen: Open, records: list[VersionRecord], store: PoolStore):
    reopen().record_version(records[0])
    at = Pointer(1, records[0].digest)
    for path in (store.versions / at.card, *(store.layers / name for name in store.card(at).files)):
        path.write_bytes(b"cut")
        assert not store.holds(at)
        assert reopen().fetch_pool(1, store).digest == at.digest
        assert store.holds(at)


def test_a_version_that_leaves_a_gap_is_refused(reopen: Open, records: list[VersionRecord]):
    with pytest.raises(RegistryError, match="expected version 1 next, got 2") as refused:
        reopen().record_version(records[1])
    assert not refused.value.transient
    assert reopen().versions() == []


def test_another_pool_under_a_recorded_number_is_refused(reopen: Open, records: list[VersionRecord], pool, tmp_path):
    reopen().record_version(records[0])
    other = written(pool.with_task(random_task("owls", 2)), PoolStore(tmp_path / "other"), 1)
    with pytest.raises(RegistryError, match="belongs to another pool store"):
        reopen().record_version(other)


def test_files_that_are_not_what_the_record_says_are_refused(reopen: Open, records: list[VersionRecord]):
    damaged = (
        replace(records[0], digest="0" * 64),
        replace(records[0], card=b"cut"),
        *(replace(records[0], files={**records[0].files, name: b"cut"}) for name in records[0].files),
    )
    for record in damaged:
        with pytest.raises(PoolError, match="sha256"):
            reopen().record_version(record)
    assert reopen().versions() == []


@pytest.mark.parametrize("call", ["point_serving", "fetch_pool", "record_deletion"])
def test_a_version_that_was_never_recorded_is_named(reopen: Open, call: str, tmp_path: Path):
    arguments = {
        "point_serving": (7,),
        "fetch_pool": (7, PoolStore(tmp_path)),
        "record_deletion": ("x", "birds", 7, True),
    }
    with pytest.raises(RegistryError, match="version 7 is not recorded"):
        getattr(reopen(), call)(*arguments[call])


def test_an_effect_id_that_could_end_a_search_expression_is_refused():
    with pytest.raises(RegistryError, match="effect id"):
        replace(TRAINING, effect_id="x' OR tags.task = 'birds")


# Killed anywhere, and run again


class Killed(BaseException):
    """Stands for SIGKILL: nothing in the registry catches it."""


class DyingClient:
    """MLflow's client in a process that dies before its n-th call, or before the first of that name."""

    def __init__(self, client: "MlflowClient", before: int | str) -> None:
        self._client, self._before, self._calls = client, before, 0

    def __getattr__(self, name: str) -> Any:
        if self._before in (name, self._calls):
            raise Killed(name)
        self._calls += 1
        return getattr(self._client, name)


def dying(place: str | Path, before: int | str) -> MlflowRegistry:
    """The registry in a process that does not live long."""
    return MlflowRegistry(uri_of(place), connect=lambda uri: DyingClient(client_of(uri), before))


def uri_of(place: str | Path) -> str:
    """The tracking URI of a server or a database."""
    return place if isinstance(place, str) else f"sqlite:///{place}"


def client_of(place: str | Path) -> "MlflowClient":
    """MLflow's own view of what was recorded."""
    from mlflow import MlflowClient

    return MlflowClient(uri_of(place), registry_uri=uri_of(place))


def runs_of(place: str | Path, effect_id: str, experiment: str = "mqmk", deleted: bool = False) -> list[Any]:
    """The runs of an effect id."""
    client = client_of(place)
    places = [client.get_experiment_by_name(experiment).experiment_id]
    kinds = 2 if deleted else 1  # ViewType.DELETED_ONLY, ViewType.ACTIVE_ONLY
    return list(client.search_runs(places, f"tags.effect_id = '{effect_id}'", kinds))


def deaths_of(act: Callable[[int, MlflowRegistry], object], database: Path) -> list[str]:
    """Before which calls a process died, dying one call later each time; each time the next process does it again."""
    deaths: list[str] = []
    for number in range(100):
        try:
            act(number, dying(database, number))
        except Killed as death:
            deaths.append(str(death))
        else:
            return deaths
        finally:
            act(number, MlflowRegistry(f"sqlite:///{database}"))
    raise AssertionError("it never ended")


def test_a_training_killed_at_any_call_is_one_whole_run_afterwards(database: Path):
    def act(number: int, registry: MlflowRegistry) -> None:
        registry.record_training(replace(TRAINING, effect_id=f"train:{number}"))

    deaths = deaths_of(act, database)
    assert {"create_run", "log_batch", "log_artifacts", "set_terminated"} <= set(deaths)
    for number in range(len(deaths) + 1):
        assert runs_of(database, f"train:{number}", deleted=True) == []
        (run,) = runs_of(database, f"train:{number}")
        expect_whole(database, run)


def test_a_version_killed_at_any_call_is_one_version_with_one_run_afterwards(
    database: Path, pool: PromptPool, store: PoolStore, again: PoolStore
):
    def act(number: int, registry: MlflowRegistry) -> None:
        registry.record_version(written(pool, store, number + 1))

    deaths = deaths_of(act, database)
    assert {"create_run", "log_artifacts", "set_terminated", "create_model_version"} <= set(deaths)
    registry = MlflowRegistry(f"sqlite:///{database}")
    found = registry.versions()
    assert [each.version for each in found] == [*range(1, len(deaths) + 2)]
    for each in found:
        assert len(runs_of(database, each.effect_id, "mqmk-pools")) == 1
        registry.fetch_pool(each.version, again)


def test_the_first_version_of_all_killed_again_and_again_is_one_version(database: Path, records: list[VersionRecord]):
    steps = ("create_experiment", "create_run", "log_batch", "log_artifacts", "set_terminated")
    for step in (*steps, "create_registered_model", "create_model_version"):
        with pytest.raises(Killed, match=step):
            dying(database, step).record_version(records[0])
    registry = MlflowRegistry(f"sqlite:///{database}")
    registry.record_version(records[0])
    assert [each.version for each in registry.versions()] == [1]
    assert len(runs_of(database, records[0].effect_id, "mqmk-pools")) == 1


def test_a_deletion_killed_at_any_call_is_whole_afterwards(database: Path, records: list[VersionRecord]):
    registry = MlflowRegistry(f"sqlite:///{database}")
    registry.record_training(TRAINING)
    for record in records:
        registry.record_version(record)
    deaths = deaths_of(lambda _, registry: registry.record_deletion("forget:birds", "birds", 3, exact=True), database)
    assert {"set_tag", "set_model_version_tag"} <= set(deaths)
    assert registry.deletions() == [Deletion("forget:birds", "birds", 3, exact=True)]
    assert runs_of(database, TRAINING.effect_id)[0].data.tags["forgotten_in_version"] == "3"


def test_an_erasure_killed_at_any_call_is_whole_afterwards_and_lists_what_there_was(database: Path):
    healthy, layer = MlflowRegistry(f"sqlite:///{database}"), f"{'a' * 64}.safetensors"

    def train(number: int, effect: str, **layers: bytes) -> str:
        training = replace(TRAINING, effect_id=f"{effect}:{number}", layers=layers, tags={"data": f"data-{number}"})
        return healthy.record_training(training)

    runs: dict[int, str] = {}

    def erase(number: int, registry: MlflowRegistry) -> None:
        runs[number] = train(number, "train", **{layer: b"numbers"})
        train(number, "without-layers")
        registry.erase_task(f"data-{number}", [])

    deaths = deaths_of(erase, database)
    assert {"set_tag", "list_artifacts"} <= set(deaths)
    for number, run in runs.items():
        assert healthy.erase_task(f"data-{number}", []) == [f"{run}/layers/{layer}"]
    assert healthy.erased_data() == {f"data-{number}" for number in runs}
    train(0, "again", **{layer: b"numbers"})
    assert healthy.erased_data() == {f"data-{number}" for number in runs} - {"data-0"}, "it was learned again"


def test_a_half_made_run_of_another_content_is_replaced(database: Path):
    with pytest.raises(Killed, match="set_terminated"):
        dying(database, "set_terminated").record_training(TRAINING)
    other = replace(TRAINING, epochs=[{"loss": 0.25}], parameters={"epochs": 1})
    run_id = MlflowRegistry(f"sqlite:///{database}").record_training(other)
    (run,) = runs_of(database, TRAINING.effect_id)
    assert (run.info.run_id, run.data.metrics, run.data.params) == (run_id, {"loss": 0.25}, {"epochs": "1"})
    assert len(runs_of(database, TRAINING.effect_id, deleted=True)) == 1


def test_runs_that_came_twice_through_a_slow_server_become_one(database: Path):
    registry = MlflowRegistry(f"sqlite:///{database}")
    run_id = registry.record_training(TRAINING)
    client = client_of(database)
    client.create_run(client.get_run(run_id).info.experiment_id, 0, {"effect_id": "late"})
    client.create_run(client.get_run(run_id).info.experiment_id, 1, {"effect_id": "late"})
    found = registry.record_training(replace(TRAINING, effect_id="late"))
    assert [run.info.run_id for run in runs_of(database, "late")] == [found]


def test_a_killed_first_start_leaves_nothing_half_made(first_start: FirstStart):
    assert "mlflow.db" not in first_start.left_by_the_killed
    assert first_start.second.returncode == 0
    assert [path.name for path in first_start.database.parent.iterdir()] == ["mlflow.db"]
    assert {path.name for path in first_start.database.parent.parent.iterdir()} == {"state", "log"}


def test_mlflow_prints_nothing_and_warns_of_nothing(first_start: FirstStart):
    assert (first_start.second.stdout, first_start.second.stderr) == ("", "")


# MLflow as it is


def expect_whole(place: str | Path, run: Any) -> None:
    """Everything of TRAINING is there, once."""
    client = client_of(place)
    assert (run.info.status, run.info.run_name) == ("FINISHED", "birds")
    assert run.data.params == {"epochs": "3", "learning rate": "0.01", "matcher": "mqmk", "augment": "True"}
    assert [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, "loss")] == [
        (0, 1.0),
        (1, 0.5),
        (2, 1 / 3),
    ]
    with tempfile.TemporaryDirectory() as folder:
        got = Path(client.download_artifacts(run.info.run_id, "", folder))
        files = {str(path.relative_to(got)): path.read_bytes() for path in got.rglob("*") if path.is_file()}
    assert files == {"TASK.json": MANIFEST, "evaluation/tasks.csv": TRAINING.files["evaluation/tasks.csv"]}


def test_a_person_finds_words_and_tables_in_the_user_interface(database: Path, records: list[VersionRecord]):
    registry = MlflowRegistry(f"sqlite:///{database}")
    run_id = registry.record_training(replace(TRAINING, started=1000.0, ended=1060.5))
    for record in records[:2]:
        registry.record_version(replace(record, run_ids=[run_id]))
    registry.point_serving(2)
    client = client_of(database)
    run = client.get_run(run_id)
    assert (run.info.start_time, run.info.end_time) == (1_000_000, 1_060_500)
    assert "| classes | 2: heron, owl \\| barn |" in run.data.tags["mlflow.note.content"]
    assert "| loss, last epoch | 0.3333 |" in run.data.tags["mlflow.note.content"]
    version = client.get_model_version_by_alias("mqmk", "serving")
    assert version.description.startswith("Learn **birds**, after version 1.")
    assert "| 3 | birds | 2 | 50 |" in version.description
    expected = {"digest": records[1].digest, "parent": "1", "task": "birds", "training_run": run_id, "git": "abc1234"}
    assert expected.items() <= version.tags.items()
    assert client.get_run(version.run_id).data.metrics == {"matching_rate/birds _1_": 0.9}
    registry.record_version(replace(records[2], kind="learn", changed=["birds", "owls"], run_ids=["r1", "r2"]))
    version = client.get_model_version("mqmk", "3")
    assert version.description.startswith("Learn **birds**, **owls**, after version 2.")
    assert {"task": "birds, owls", "training_run": "r1 r2"}.items() <= version.tags.items()
    assert client.get_run(version.run_id).info.run_name == "version 3: learn 2 tasks"


def test_more_parameters_and_epochs_than_mlflow_takes_at_once_are_recorded(database: Path):
    parameters = {f"p{number}": number for number in range(130)}
    epochs = [{"loss": float(step), "rate": 0.5} for step in range(600)]
    registry = MlflowRegistry(f"sqlite:///{database}")
    run_id = registry.record_training(replace(TRAINING, parameters=parameters, epochs=epochs))
    assert len(client_of(database).get_run(run_id).data.params) == 130
    assert len(client_of(database).get_metric_history(run_id, "loss")) == 600


@pytest.mark.parametrize("deleted", [1, 2])
def test_a_number_that_was_deleted_in_mlflow_is_not_given_to_another(
    database: Path, records: list[VersionRecord], deleted: int
):
    registry = MlflowRegistry(f"sqlite:///{database}")
    for record in records[:2]:
        registry.record_version(record)
    client_of(database).delete_model_version("mqmk", str(deleted))
    with pytest.raises(RegistryError, match=f"version {deleted} was deleted in the registry") as refused:
        registry.record_version(records[deleted - 1])
    assert not refused.value.transient
    assert [each.version for each in registry.versions()] == [3 - deleted]


def test_artifacts_that_were_changed_are_not_taken_for_a_pool(
    database: Path, records: list[VersionRecord], again: PoolStore, tmp_path: Path
):
    registry = MlflowRegistry(f"sqlite:///{database}", tmp_path / "artifacts")
    registry.record_version(records[0])
    recorded = [path for path in (tmp_path / "artifacts").rglob("*") if path.is_file()]
    assert len(recorded) == 1 + len(records[0].files)
    for changed in recorded:
        whole = changed.read_bytes()
        changed.write_bytes(whole[:-4] + b"abcd")
        with pytest.raises(PoolError, match="sha256"):
            registry.fetch_pool(1, again)
        assert again.paths() == {}
        changed.write_bytes(whole)
        shutil.rmtree(again.folder, ignore_errors=True)


def record_as_release_0_1(registry: MlflowRegistry, pool: PromptPool, version: int, task: str) -> VersionRecord:
    """A version as a whole, as release 0.1 recorded it."""
    at, files = encode(pool, version, version - 1 or None)
    record = VersionRecord(f"version:{version}:{at.digest}", version, at.digest, at.parent, "learn", [task], [], None)
    artifacts = {f"{POOL_FOLDER}/{TENSORS}": files.tensors, f"{POOL_FOLDER}/{CARD}": files.card}
    draft = RunDraft(record.effect_id, f"version {version}", "", version_tags(record), {}, [], artifacts)
    with registry._session() as client:
        registry._create(client, record, registry._run(client, registry._pools, draft), "")
    return record


def test_pools_that_release_0_1_recorded_as_a_whole_are_fetched_extended_and_erased(
    database: Path, pool: PromptPool, store: PoolStore, again: PoolStore, tmp_path: Path
):
    registry = MlflowRegistry(f"sqlite:///{database}", tmp_path / "artifacts")
    first, later = replace(pool, tasks=pool.tasks[:1]), replace(pool, tasks=(*pool.tasks, random_task("birds", 2)))
    for number, each in enumerate((first, pool), start=1):
        record_as_release_0_1(registry, each, number, each.tasks[-1].name)
        store.write(each, number, number - 1 or None)
    registry.record_version(written(later, store, 3))
    for number, each in enumerate((first, pool, later), start=1):
        found = again.read(registry.fetch_pool(number, again))
        assert [task.name for task in found.tasks] == [task.name for task in each.tasks]
        for one, two in zip(found.tasks, each.tasks, strict=True):
            assert all(torch.equal(tensor, two.tensors()[name]) for name, tensor in one.tensors().items())
    assert files_in(again) == files_in(store), "what the upgrade of the store makes of them"
    gone = registry.erase_task("f" * 64, [1])
    assert [name.rpartition("/")[2] for name in gone] == [TENSORS]
    assert registry.erase_task("f" * 64, [1]) == gone and registry.erase_task("a" * 64, [1]) == []
    with pytest.raises((PoolError, RegistryError)):
        registry.fetch_pool(1, PoolStore(tmp_path / "third"))
    assert [task.name for task in registry.fetch_tasks(1, again)] == [pool.tasks[0].name]
    assert len([*(tmp_path / "artifacts").rglob(TENSORS)]) == 1


def test_a_version_that_release_0_1_recorded_is_not_recorded_again_after_the_upgrade(
    database: Path, pool: PromptPool, store: PoolStore
):
    registry = MlflowRegistry(f"sqlite:///{database}")
    former = record_as_release_0_1(registry, pool, 1, "birds")
    record = written(pool, store, 1)
    with pytest.raises(RegistryError, match="belongs to another pool store"):
        registry.record_version(record)
    registry.record_version(replace(record, former_digest=former.digest))
    assert [each.digest for each in registry.versions()] == [former.digest]
    registry.record_version(written(pool.with_task(random_task("owls", 2)), store, 2))


def test_a_version_of_somebody_else_is_said_to_be_so(database: Path):
    client = client_of(database)
    client.create_registered_model("mqmk")
    client.create_model_version("mqmk", "file:///somewhere")
    with pytest.raises(RegistryError, match="not recorded by mqmk-daemon"):
        MlflowRegistry(f"sqlite:///{database}").versions()


def test_a_server_on_postgresql_keeps_the_same_promises(server: str, records: list[VersionRecord], tmp_path: Path):
    registry = MlflowRegistry(server)
    assert (registry.versions(), registry.serving()) == ([], None)
    run_id = registry.record_training(TRAINING)
    assert registry.record_training(TRAINING) == run_id
    with pytest.raises(RegistryError, match="expected version 1 next, got 2"):
        registry.record_version(records[1])
    with pytest.raises(Killed):
        dying(server, "create_model_version").record_version(records[0])
    for record in (*records, records[0]):
        registry.record_version(record)
    assert [(each.version, each.digest) for each in registry.versions()] == [(r.version, r.digest) for r in records]
    registry.point_serving(3)
    registry.point_serving(2)
    registry.record_deletion("forget:birds", "birds", 3, exact=True)
    assert registry.serving() == 2
    assert registry.deletions() == [Deletion("forget:birds", "birds", 3, exact=True)]
    fetched = PoolStore(tmp_path / "again")
    assert fetched.read(registry.fetch_pool(2, fetched)).tasks
    assert fetched.card_bytes(Pointer(2, records[1].digest)) == records[1].card
    layer = next(iter(records[1].files.items()))
    registry.record_training(replace(TRAINING, effect_id="train:erased", layers=dict([layer]), tags={"data": "d" * 64}))
    (gone,) = registry.erase_task("d" * 64, [])
    assert registry.erase_task("d" * 64, []) == [gone] and registry.erased_data() == {"d" * 64}
    (run,) = runs_of(server, TRAINING.effect_id)
    expect_whole(server, run)
    assert len(runs_of(server, records[0].effect_id, "mqmk-pools")) == 1


# MLflow away


def test_a_database_that_cannot_be_opened_may_be_opened_later(empty_database: Path, tmp_path: Path):
    database = tmp_path / "mlflow.db"
    registry = MlflowRegistry(f"sqlite:///{database}")
    database.mkdir()
    with pytest.raises(RegistryError, match=r"mlflow.db.*unable to open") as away:
        registry.versions()
    assert away.value.transient
    database.rmdir()
    shutil.copy(empty_database, database)
    assert registry.versions() == []


def test_a_server_that_is_not_there_is_said_so_at_once():
    started = time.monotonic()
    with pytest.raises(RegistryError, match=r"127\.0\.0\.1") as away:
        MlflowRegistry(f"http://user:secret@127.0.0.1:{free_port()}").record_training(TRAINING)
    assert time.monotonic() - started < 10
    assert away.value.transient


def test_a_server_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")  # an operator's value is kept
    started = time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(RegistryError) as away:
        MlflowRegistry(f"http://127.0.0.1:{silent.getsockname()[1]}").versions()
    assert time.monotonic() - started < 10
    assert away.value.transient


@pytest.mark.parametrize("uri", ["postgresql://db/mlflow", "sqlite://", "sqlite:///:memory:", "mlruns", ""])
def test_a_tracking_uri_of_another_kind_is_refused(uri: str):
    with pytest.raises(RegistryError, match="expected an MLflow tracking URI"):
        MlflowRegistry(uri)


# Figures


def test_an_evaluation_becomes_tables_and_a_page():
    shares = {0: TaskShare(2, 0.5, 0.25), 1: TaskShare(2, 1.0, 0.75)}
    tally = SampleTally(4, False, 0.75, 0.5, 0.1, 1.0, 1.0, 2.0, shares, {(0, 0): 1, (0, 1): 1, (1, 1): 2})
    files = evaluation_files({"mqmk": tally}, ["mqmk"], ["birds", "<owls>"])
    tasks = files["evaluation/tasks.csv"].decode().splitlines()
    assert tasks[1:] == ["mqmk,birds,2,0.5,0.25", "mqmk,<owls>,2,1,0.75"]
    assert files["evaluation/matchers.csv"].decode().splitlines()[1] == "mqmk,4,0.75,0.5,1,1,2"
    confused = files["evaluation/confusion.csv"].decode().splitlines()
    assert confused[1:] == ["mqmk,<owls>,<owls>,2", "mqmk,birds,birds,1", "mqmk,birds,<owls>,1"]
    page = files["evaluation/evaluation.html"].decode()
    assert "75.0 %" in page
    assert "&lt;owls&gt;" in page
    assert "<owls>" not in page


def test_artifacts_do_not_grow_with_the_number_of_tasks():
    def size(tasks: int) -> int:
        shares = {number: TaskShare(1, 1.0, 1.0) for number in range(tasks)}
        confusion = {(number, other): 1 for number in range(tasks) for other in range(max(0, number - 2), number + 1)}
        tally = SampleTally(tasks, True, 0.75, 0.5, 0.1, 1.0, 1.0, 2.0, shares, confusion)
        files = evaluation_files({"mqmk": tally, "cascade": tally}, ["mqmk"], [f"task-{n:05}" for n in range(tasks)])
        return sum(map(len, files.values()))

    assert size(2000) == pytest.approx(size(200), rel=0.01)
