"""A state directory that lost its pools or its ledger is put together again from MLflow."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.daemons.daemon import daemon, drop, small_config
from support.daemons.invariants import problems

from mqmk.daemon.config.sections import Config, Gate
from mqmk.daemon.errors import LedgerError
from mqmk.daemon.ledger.ledger import Ledger
from mqmk.daemon.registry.in_memory import MemoryRegistry
from mqmk.daemon.registry.interface import Registry
from mqmk.daemon.registry.mlflow_registry import MlflowRegistry
from mqmk.daemon.registry.rebuild import rebuild
from mqmk.daemon.state_dir import StateDir


def config_of(folder: Path) -> Config:
    return small_config(folder, gate=Gate(accuracy_floor=0.0, fresh_process=False))


def registry_of(config: Config) -> MlflowRegistry:
    return MlflowRegistry(config.tracking_uri, config.artifacts_folder)


def test_pools_and_ledger_come_back_with_their_hashes_and_the_daemon_goes_on(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    for task in ("sea", "birds", "fruit"):
        drop(tmp_path / "bucket", task, per_class=6)
    registry = registry_of(config)
    parts = daemon(config, registry=registry)
    parts.run()
    last = parts.ledger.task(parts.ledger.version(3).tasks[0].task).name
    parts.ledger.enqueue_command("forget", last)
    parts.run()
    before = {row.version: row.digest for row in parts.ledger.versions()}
    states = parts.states
    parts.close()
    for lost in ("pools", "work"):
        shutil.rmtree(config.state.dir / lost)
    for file in config.state.dir.glob("ledger.sqlite*"):
        file.unlink()

    files = StateDir(config.state.dir)
    done = rebuild(files, config.ledger_file, registry)
    assert (done.fetched, done.lost, done.ledger, done.current) == ((1, 2, 4), (3,), True, 4), (
        "3 has the forgotten task"
    )
    ledger = Ledger(config.ledger_file)
    assert {row.version: row.digest for row in ledger.versions()} == before
    assert {task.name: task.state for task in ledger.tasks()} == states
    ledger.close()
    assert rebuild(files, config.ledger_file, registry).fetched == ()

    drop(tmp_path / "bucket", "music", per_class=6)
    parts = daemon(config, registry=registry)
    parts.run()
    assert parts.states == states | {"music": "PUBLISHED"}
    assert [*before, 5] == [row.version for row in parts.ledger.versions()]
    parts.close()
    registry.close()
    database = Path(config.tracking_uri.removeprefix("sqlite:///"))
    assert not problems(config.state.dir, tmp_path / "bucket", database)


@pytest.mark.parametrize("kind", [registry_of, lambda _: MemoryRegistry()], ids=["mlflow", "memory"])
def test_a_task_that_was_forgotten_while_it_was_held_stays_forgotten(
    tmp_path: Path, kind: Callable[[Config], Registry]
) -> None:
    config = config_of(tmp_path)
    registry = kind(config)
    parts = daemon(config, registry=registry)
    for task in ("sea", "birds"):
        drop(tmp_path / "bucket", task, per_class=6)
        parts.run()
    parts.ledger.enqueue_command("rollback", "1")
    parts.run()
    assert parts.states == {"sea": "PUBLISHED", "birds": "HELD"}
    parts.ledger.enqueue_command("forget", "birds")
    parts.run()
    states = parts.states
    assert states == {"sea": "PUBLISHED", "birds": "FORGOTTEN"} and registry.deletions() == []
    parts.close()
    for file in config.state.dir.glob("ledger.sqlite*"):
        file.unlink()
    shutil.rmtree(config.state.dir / "pools")

    files = StateDir(config.state.dir)
    rebuild(files, config.ledger_file, registry)
    ledger = Ledger(config.ledger_file)
    assert {task.name: task.state for task in ledger.tasks()} == states
    (birds,) = ledger.tasks_named("birds")
    assert ledger.withdrawn_versions() == [2] and files.trained_folder(birds.identity or "") is None
    ledger.close()
    registry.close()


def test_all_tasks_of_a_version_come_back_and_so_does_what_was_forgotten_of_it(tmp_path: Path) -> None:
    config, themes = config_of(tmp_path), ("sea", "birds", "fruit", "music")
    for task in themes:
        drop(tmp_path / "bucket", task, per_class=6)
    registry = registry_of(config)
    parts = daemon(config, registry=registry)
    parts.run()
    names = {task.id: task.name for task in parts.ledger.tasks()}
    changed = [[names[each.task] for each in row.tasks] for row in parts.ledger.versions()]
    assert [len(each) for each in changed] == [1, 3], "three were trained while the first was published"
    gone = changed[1][1]
    parts.ledger.enqueue_command("forget", gone)
    parts.run()
    states = parts.states
    assert states == dict.fromkeys(themes, "PUBLISHED") | {gone: "FORGOTTEN"}
    parts.close()
    for lost in ("pools", "work"):
        shutil.rmtree(config.state.dir / lost)
    for file in config.state.dir.glob("ledger.sqlite*"):
        file.unlink()

    done = rebuild(StateDir(config.state.dir), config.ledger_file, registry)
    assert (done.fetched, done.lost, done.current) == ((1, 3), (2,), 3), "2 has the forgotten task"
    parts = daemon(config, registry=registry)
    parts.run()
    names = {task.id: task.name for task in parts.ledger.tasks()}
    found = [[names[each.task] for each in row.tasks] for row in parts.ledger.versions()]
    assert found == [*changed, [gone]] and parts.states == states
    assert parts.ledger.withdrawn_versions() == [2]
    parts.close()
    registry.close()
    database = Path(config.tracking_uri.removeprefix("sqlite:///"))
    assert not problems(config.state.dir, tmp_path / "bucket", database)


def test_a_version_that_nobody_has_keeps_no_other_from_being_fetched(tmp_path: Path) -> None:
    config, registry = config_of(tmp_path), MemoryRegistry()
    for task in ("sea", "birds", "fruit"):
        drop(tmp_path / "bucket", task, per_class=6)
    parts = daemon(config, registry=registry)
    parts.run()
    parts.close()
    registry.recorded[1] = replace(registry.recorded[1], card=None)
    shutil.rmtree(config.state.dir / "pools")
    files = StateDir(config.state.dir)
    done = rebuild(files, config.ledger_file, registry)
    assert (done.fetched, done.lost, done.ledger, done.current) == ((2, 3), (1,), False, 3)
    for file in config.state.dir.glob("ledger.sqlite*"):
        file.unlink()
    with pytest.raises(LedgerError, match="has the files of version 1;"):
        rebuild(files, config.ledger_file, registry)
    assert not config.ledger_file.exists()
    registry.recorded[3] = replace(registry.recorded[3], card=None)
    next(files.store.versions.glob("3-*")).unlink()
    with pytest.raises(LedgerError, match="version 3 is the current one, and its files are lost"):
        rebuild(files, config.ledger_file, registry)


def test_an_empty_registry_is_no_source(tmp_path: Path) -> None:
    config = replace(config_of(tmp_path))
    with pytest.raises(LedgerError, match="no version to rebuild from"):
        rebuild(StateDir(config.state.dir), config.ledger_file, MemoryRegistry())
