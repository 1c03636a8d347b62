"""A state directory that lost its pools or its ledger is put together again from MLflow."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from daemon_parts import daemon, drop, small_config
from outside_checker import problems

from mqmk.daemon.config import Config, Gate
from mqmk.daemon.errors import LedgerError
from mqmk.daemon.ledger import Ledger
from mqmk.daemon.rebuild import rebuild
from mqmk.daemon.registry import MlflowRegistry
from mqmk.daemon.registry_memory import MemoryRegistry
from mqmk.daemon.state_files import StateFiles


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
    last = parts.ledger.task(parts.ledger.version(3).task or 0).name
    parts.ledger.ask("forget", last)
    parts.run()
    before = {row.version: row.digest for row in parts.ledger.versions()}
    states = parts.states
    parts.close()
    for lost in ("pools", "work"):
        shutil.rmtree(config.state.dir / lost)
    for file in config.state.dir.glob("ledger.sqlite*"):
        file.unlink()

    files = StateFiles(config.state.dir)
    done = rebuild(files, config.ledger_file, registry)
    assert done.fetched == (1, 2, 3, 4) and done.ledger and done.current == 4
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


def test_a_version_that_nobody_has_keeps_no_other_from_being_fetched(tmp_path: Path) -> None:
    config, registry = config_of(tmp_path), MemoryRegistry()
    for task in ("sea", "birds", "fruit"):
        drop(tmp_path / "bucket", task, per_class=6)
    parts = daemon(config, registry=registry)
    parts.run()
    parts.close()
    record, _ = registry.recorded[1]
    registry.recorded[1] = (record, None)
    shutil.rmtree(config.state.dir / "pools")
    files = StateFiles(config.state.dir)
    done = rebuild(files, config.ledger_file, registry)
    assert (done.fetched, done.lost, done.ledger, done.current) == ((2, 3), (1,), False, 3)
    for file in config.state.dir.glob("ledger.sqlite*"):
        file.unlink()
    with pytest.raises(LedgerError, match="version 1 would be missing in it"):
        rebuild(files, config.ledger_file, registry)
    assert not config.ledger_file.exists()
    record, _ = registry.recorded[3]
    registry.recorded[3] = (record, None)
    shutil.rmtree(next(files.store.folder.glob("3-*")))
    with pytest.raises(LedgerError, match="version 3 is the current one, and nobody has its files"):
        rebuild(files, config.ledger_file, registry)


def test_an_empty_registry_is_no_source(tmp_path: Path) -> None:
    config = replace(config_of(tmp_path))
    with pytest.raises(LedgerError, match="no version to rebuild from"):
        rebuild(StateFiles(config.state.dir), config.ledger_file, MemoryRegistry())
