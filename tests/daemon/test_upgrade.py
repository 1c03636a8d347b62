"""A newer release opens what an older one wrote, and goes on from there.

`releases/<version>/` holds a state directory of each release: two tasks of sketches, made by
`PYTHONPATH=tests python tests/daemon/test_upgrade.py`.
"""

import errno
import os
import shutil
import signal
import sqlite3
import tempfile
from contextlib import closing
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from support.daemons.daemon import daemon, drop, small_config
from support.daemons.invariants import problems

from mqmk.daemon import failpoints
from mqmk.daemon.config.sections import Config, Evaluate, Gate, State
from mqmk.daemon.errors import LedgerError
from mqmk.daemon.host.backup import back_up
from mqmk.daemon.ledger.ledger import Ledger
from mqmk.daemon.ledger.schema import MIGRATIONS
from mqmk.daemon.pipeline.store_upgrade import upgrade_store
from mqmk.daemon.state_dir import StateDir
from mqmk.learner.settings import TrainSettings
from mqmk.matcher.errors import PoolError
from mqmk.matcher.pool import PromptPool
from mqmk.matcher.pool_files import read_pool
from mqmk.matcher.pool_store import Pointer, PoolStore

RELEASES = Path(__file__).parent / "releases"


def config_of(folder: Path) -> Config:
    return small_config(
        folder,
        train=TrainSettings(epochs=2, batch=16, e_length=2, g_length=1),
        gate=Gate(accuracy_floor=0.0, fresh_process=False),
        evaluate=Evaluate(matchers=("mqmk-ei",)),
    )


def make(release: Path) -> None:
    """Write down what this release writes."""
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(Path(folder))
        for task in ("sea", "birds"):
            drop(Path(folder) / "bucket", task, per_class=4)
        parts = daemon(config)
        parts.run()
        parts.close()
        back_up(config, release)
        shutil.rmtree(release / "work")
        shutil.rmtree(release / "evaluations", ignore_errors=True)
        (release / "SHA256SUMS").unlink()


@pytest.fixture(params=sorted(path.name for path in RELEASES.glob("*")))
def older(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of what a release wrote, as `state` of a folder of its own."""
    shutil.copytree(RELEASES / request.param, tmp_path / "state")
    return tmp_path


def test_there_is_a_state_directory_of_every_release() -> None:
    assert version("mqmk-daemon") in {path.name for path in RELEASES.glob("*")}


def test_a_ledger_and_pools_of_an_older_release_are_read_and_learned_on_top_of(older: Path) -> None:
    before = whole_pools(older)
    drop(older / "bucket", "fruit", per_class=4)
    parts = daemon(config_of(older))
    parts.run()
    parts.close()
    assert problems(older / "state", older / "bucket") == []
    store = PoolStore(older / "state" / "pools")
    assert len(before) == 2 and [*store.paths()] == [1, 2, 3]
    for number, pool in before.items():
        assert is_same(store.assemble(*store.cards(number)), pool)
    with closing(sqlite3.connect(older / "state" / "ledger.sqlite")) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (len(MIGRATIONS),)
        assert db.execute("SELECT name, state FROM tasks ORDER BY id").fetchall() == [
            ("birds", "PUBLISHED"), ("sea", "PUBLISHED"), ("fruit", "PUBLISHED"),
        ]  # fmt: skip


def test_the_history_of_an_older_release_is_read_under_the_current_names(older: Path) -> None:
    ledger = Ledger(older / "state" / "ledger.sqlite")
    names = [event.event for event in ledger.events(ledger.tasks_named("sea")[0])]
    ledger.close()
    assert names == ["task.discovered", "task.validated", "task.training_started", "task.epoch_finished",
                     "task.epoch_finished", "task.trained", "version.planned", "task.published"]  # fmt: skip


def test_every_table_is_strict_in_a_new_ledger_and_in_one_of_an_older_release(older: Path) -> None:
    for path in (older / "state" / "ledger.sqlite", older / "new.sqlite"):
        Ledger(path).close()
        with closing(sqlite3.connect(path)) as db:
            tables = {row[1]: row[5] for row in db.execute("PRAGMA table_list") if not row[1].startswith("sqlite_")}
        assert tables == dict.fromkeys(
            ("classes", "commands", "events", "folders", "health", "key_values", "progress", "tasks", "version_tasks",
             "versions"), 1,
        )  # fmt: skip


def test_a_new_ledger_and_one_of_an_older_release_have_the_same_tables_indexes_and_triggers(older: Path) -> None:
    schemas = []
    for path in (older / "state" / "ledger.sqlite", older / "new.sqlite"):
        Ledger(path).close()
        with closing(sqlite3.connect(path)) as db:
            schemas.append(db.execute("SELECT type, name, sql FROM sqlite_master ORDER BY name").fetchall())
    assert schemas[0] == schemas[1]
    assert {"events_are_final", "events_stay", "events_by_task"} <= {name for _, name, _ in schemas[0]}


def test_events_of_an_older_release_keep_their_numbers_and_the_next_one_follows(older: Path) -> None:
    path = older / "state" / "ledger.sqlite"
    asked = "SELECT number, at, task, event, state, detail FROM events ORDER BY number"
    with closing(sqlite3.connect(path)) as db:
        before = db.execute(asked).fetchall()
    ledger = Ledger(path)
    ledger.append_event("daemon.started")
    assert ledger.last_event() == before[-1][0] + 1
    ledger.close()
    with closing(sqlite3.connect(path)) as db:
        assert db.execute(asked).fetchall()[:-1] == before
        with pytest.raises(sqlite3.IntegrityError, match="append-only"):
            db.execute("DELETE FROM events")


def test_a_ledger_of_the_future_is_refused_and_left_as_it_is(older: Path) -> None:
    path = older / "state" / "ledger.sqlite"
    with closing(sqlite3.connect(path)) as db:
        db.execute(f"PRAGMA user_version = {len(MIGRATIONS) + 1}")
    with pytest.raises(LedgerError, match="upgrade mqmk-daemon, or restore the backup made before the upgrade"):
        Ledger(path)
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("SELECT count(*) FROM tasks").fetchone() == (2,)
        assert db.execute("PRAGMA user_version").fetchone() == (len(MIGRATIONS) + 1,)


def test_a_state_directory_of_an_older_release_can_be_backed_up(older: Path) -> None:
    config = replace(config_of(older), state=State(older / "state"))
    assert back_up(config, older / "copy").versions == (1, 2)
    parts = daemon(replace(config, state=State(older / "copy")))
    parts.run()
    parts.close()
    (older / "bucket" / "tasks").mkdir(parents=True, exist_ok=True)
    assert problems(older / "copy", older / "bucket") == [] and [*parts.files.store.paths()] == [1, 2]


# The store of release 0.1 becomes one of layers


def whole_pools(older: Path) -> dict[int, PromptPool]:
    """The versions of a store of release 0.1."""
    found = (read_pool(path) for path in (older / "state" / "pools").glob("*-*") if path.is_dir())
    return dict(sorted((identity.version, pool) for identity, pool in found))


def is_same(one: PromptPool, two: PromptPool) -> bool:
    """Whether two pools answer alike, to the last bit."""
    facts = [
        (pool.backbone, pool.g_layers, pool.e_layers, pool.logit_scale, pool.matching, pool.labels,
         [(task.name, task.classes, task.manifest_sha256, task.samples, task.trained_at) for task in pool.tasks])
        for pool in (one, two)
    ]  # fmt: skip
    tensors = [
        {"g": pool.g_prompt} | {(task.name, name): each for task in pool.tasks for name, each in task.tensors().items()}
        for pool in (one, two)
    ]
    return (
        facts[0] == facts[1]
        and tensors[0].keys() == tensors[1].keys()
        and all(torch.equal(each, tensors[1][name]) for name, each in tensors[0].items())
    )


def upgrade(state: Path, crash_at: str | None = None) -> bool:
    """In a process of its own; whether it came to its end."""
    child = os.fork()
    if child == 0:
        os.environ.pop(failpoints.VARIABLE, None)
        if crash_at:
            os.environ[failpoints.VARIABLE] = crash_at
        try:
            ledger = Ledger(state / "ledger.sqlite")
            upgrade_store(ledger, StateDir(state))
            ledger.close()
            os._exit(0)
        finally:
            os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, -signal.SIGKILL)
    return status == 0


def facts_of(state: Path) -> dict[str, object]:
    """The pool store and what the ledger says about it."""
    with closing(sqlite3.connect(state / "ledger.sqlite")) as db:
        rows = db.execute("SELECT version, digest, former_digest, parent FROM versions ORDER BY version").fetchall()
        facts = db.execute("SELECT * FROM key_values ORDER BY name").fetchall()
    paths = (path for path in (state / "pools").rglob("*") if path.is_file())
    return {str(path.relative_to(state)): path.read_bytes() for path in paths} | {"rows": rows, "facts": facts}


def test_every_version_keeps_its_number_and_its_answers(older: Path) -> None:
    before, digests = whole_pools(older), {}
    for path in (older / "state" / "pools").glob("*-*"):
        identity, _ = read_pool(path)
        digests[identity.version] = identity.digest
        (older / "state" / "evaluations" / identity.digest).mkdir(parents=True)
    current = PoolStore(older / "state" / "pools").current()
    assert current and upgrade(older / "state")
    ledger = Ledger(older / "state" / "ledger.sqlite")
    files = StateDir(older / "state")
    rows = ledger.versions()
    assert [row.version for row in rows] == [*before] == [*files.store.paths()]
    assert {row.version: row.former_digest for row in rows} == digests
    assert not {row.digest for row in rows} & {*digests.values()}
    for row in rows:
        assert is_same(files.store.read(Pointer(row.version, row.digest)), before[row.version])
        assert files.evaluation(row.digest).is_dir()
        assert ledger.is_version(row.version, row.digest) and ledger.is_version(row.version, digests[row.version])
    assert files.store.current() == Pointer(current.version, ledger.version(current.version).digest)
    assert sorted(path.name for path in files.store.folder.iterdir()) == ["CURRENT", "layers", "versions"]
    assert len([*files.store.layers.iterdir()]) == 1 + 2, "the g layer, and a layer for each task"
    ledger.close()


@pytest.mark.parametrize("point", [point for point in failpoints.POINTS if point.startswith("upgrade.")])
def test_an_upgrade_that_was_killed_ends_as_one_that_was_not(older: Path, point: str) -> None:
    whole = shutil.copytree(older / "state", older / "whole")
    assert upgrade(whole)
    before, state = whole_pools(older), older / "state"
    assert not upgrade(state, point), f"{point} is not reached"
    if point != "upgrade.after":
        assert whole_pools(older).keys() == before.keys(), "nothing is deleted before everything is written"
    assert upgrade(state)
    assert facts_of(state) == facts_of(whole)
    assert upgrade(state) and facts_of(state) == facts_of(whole), "once more changes nothing"


def test_a_version_of_release_0_1_that_is_damaged_is_lost_and_no_other(older: Path, caplog) -> None:
    before = whole_pools(older)
    next((older / "state" / "pools").glob("1-*/pool.safetensors")).write_bytes(b"cut")
    ledger, files = Ledger(older / "state" / "ledger.sqlite"), StateDir(older / "state")
    upgrade_store(ledger, files)
    assert [*files.store.paths()] == [2] and is_same(files.store.assemble(*files.store.cards(2)), before[2])
    assert "not upgraded" in caplog.text
    ledger.close()


def test_a_disk_that_fails_during_the_upgrade_loses_no_version(older: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = whole_pools(older)
    ledger, files = Ledger(older / "state" / "ledger.sqlite"), StateDir(older / "state")
    real = Path.read_bytes

    def broken(path: Path) -> bytes:
        if path.name == "pool.safetensors":
            raise OSError(errno.EIO, "Input/output error", str(path))
        return real(path)

    monkeypatch.setattr(Path, "read_bytes", broken)
    with pytest.raises(PoolError, match="Input/output error"):
        upgrade_store(ledger, files)
    monkeypatch.undo()
    assert whole_pools(older).keys() == before.keys()
    upgrade_store(ledger, files)
    assert [*files.store.paths()] == [*before]
    ledger.close()


if __name__ == "__main__":
    make(RELEASES / version("mqmk-daemon"))
