"""What becomes of tasks that are dropped into the bucket."""

import time
from dataclasses import replace
from pathlib import Path

import pytest
from daemon_parts import daemon, drop, small_config

from mqmk.daemon.config import Gate
from mqmk.daemon.errors import WorkerDied
from mqmk.daemon.ledger import State
from mqmk.daemon.orchestrator import Replica
from mqmk.daemon.registry_memory import MemoryRegistry
from mqmk.learner.pack import pack


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A state directory with three tasks in three versions."""
    folder = tmp_path_factory.mktemp("learned")
    for task in ("sea", "birds", "fruit"):
        drop(folder / "bucket", task)
    parts = daemon(small_config(folder))
    parts.run()
    assert parts.states == {"birds": "PUBLISHED", "fruit": "PUBLISHED", "sea": "PUBLISHED"}
    return folder


def test_every_task_becomes_one_version_recorded_and_current(learned: Path) -> None:
    registry = MemoryRegistry()
    parts = daemon(small_config(learned), registry=registry)
    versions = parts.ledger.versions()
    assert [(row.version, row.parent, row.step) for row in versions] == [
        (1, None, "PUBLISHED"), (2, 1, "PUBLISHED"), (3, 2, "PUBLISHED"),
    ]  # fmt: skip
    current = parts.files.store.current()
    assert current and current.version == 3
    pool = parts.files.store.read(current)
    assert [task.name for task in pool.tasks] == [parts.ledger.task(row.task or 0).name for row in versions]
    assert [*parts.files.store.folders()] == [1, 2, 3]
    assert pool.matching["matchers"].keys() == set(parts.config.evaluate.matchers)
    for task in parts.ledger.tasks():
        assert 0 <= task.metrics["matching_rate"] <= 1 and task.metrics["accuracy_given_task"] > 0.3
