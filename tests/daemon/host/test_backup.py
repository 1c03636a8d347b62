"""A state directory copied while its daemon works, and a daemon that goes on from the copy."""

import hashlib
import shutil
import sqlite3
import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.daemons.daemon import Parts, daemon, drop, small_config
from support.daemons.invariants import problems

from mqmk.daemon import failpoints
from mqmk.daemon.cli.backup import backup
from mqmk.daemon.config.sections import Config, Evaluate, Gate, Mlflow, State
from mqmk.daemon.errors import DaemonError, LedgerError
from mqmk.daemon.host import backup as backup_module
from mqmk.daemon.host.backup import BackupSummary, back_up
from mqmk.daemon.registry.mlflow_registry import MlflowRegistry
from mqmk.learner.settings import TrainSettings


def config_of(folder: Path) -> Config:
    return small_config(
        folder,
        train=TrainSettings(epochs=2, batch=16, e_length=4, g_length=2),
        gate=Gate(accuracy_floor=0.0, fresh_process=False),
        evaluate=Evaluate(matchers=("mqmk-ei",)),
    )


def restored(config: Config, copy: Path) -> Config:
    """The same daemon on the copy; the bucket stays where it is."""
    return replace(config, state=State(copy))


def gone_on(config: Config, copy: Path) -> Parts:
    """A daemon that started from the copy and did what was left to do."""
    parts = daemon(restored(config, copy))
    parts.run()
    return parts


def test_a_copy_made_at_any_durable_step_goes_on_to_the_same_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, copies = config_of(tmp_path), tmp_path / "copies"
    drop(tmp_path / "bucket", "sea", per_class=4)
    parts = daemon(config)
    parts.run()
    taken: list[str] = []

    def copied(point: str) -> None:
        if point not in taken:
            taken.append(point)
            back_up(config, copies / point, timeout=0.0)

    monkeypatch.setattr(failpoints, "hit", copied)
    drop(tmp_path / "bucket", "birds", per_class=4)
    parts.run()
    monkeypatch.undo()
    parts.close()
    steps = {"discover", "validate", "train", "checkpoint", "learned", "build", "publish", "record"}
    assert {point for point in failpoints.POINTS if point.split(".")[0] in steps} <= set(taken)
    for point in taken:
        again = gone_on(config, copies / point)
        assert again.states == {"sea": "PUBLISHED", "birds": "PUBLISHED"}, point
        assert problems(copies / point, tmp_path / "bucket") == [], point
        again.close()


def test_copies_made_while_tasks_are_learned_and_rolled_back_are_whole(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    for task in ("sea", "birds"):
        drop(tmp_path / "bucket", task, per_class=4)
    parts = daemon(config)
    parts.run()
    enough = threading.Event()
    drop(tmp_path / "bucket", "fruit", per_class=4)

    def to_and_fro() -> None:
        while not enough.is_set():
            for number in (1, 2):
                parts.ledger.enqueue_command("rollback", str(number))
                parts.run_pass()

    thread = threading.Thread(target=to_and_fro)
    thread.start()
    made = [tmp_path / f"copy{number}" for number in range(6)]
    try:
        for copy in made:
            back_up(config, copy)
    finally:
        enough.set()
        thread.join()
    parts.run()
    parts.close()
    for copy in (made[0], made[len(made) // 2], made[-1]):
        again = gone_on(config, copy)
        assert problems(copy, tmp_path / "bucket") == []
        again.close()


def test_a_pointer_that_moves_while_the_ledger_is_copied_makes_the_copy_begin_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(tmp_path)
    for task in ("sea", "birds"):
        drop(tmp_path / "bucket", task, per_class=4)
    parts = daemon(config)
    parts.run()
    snapshot, copied = backup_module._snapshot, []

    def rolled_back_meanwhile(source: Path, target: Path) -> None:
        snapshot(source, target)
        if not copied:
            parts.ledger.enqueue_command("rollback", "1")
            parts.run_pass()
        copied.append(source)

    monkeypatch.setattr(backup_module, "_snapshot", rolled_back_meanwhile)
    assert back_up(config, tmp_path / "copy").current == 1 and len(copied) == 2
    parts.close()
    again = gone_on(config, tmp_path / "copy")
    assert sorted(again.states.values()) == ["HELD", "PUBLISHED"]
    assert problems(tmp_path / "copy", tmp_path / "bucket") == []
    again.close()


def test_mlflow_on_the_copy_ends_with_the_versions_of_the_ledger(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    registry = MlflowRegistry(config.tracking_uri, config.artifacts_folder, "mqmk", "mqmk")
    parts = daemon(config, registry=registry)
    for task in ("sea", "birds"):
        drop(tmp_path / "bucket", task, per_class=4)
    parts.run()
    back_up(config, tmp_path / "copy")
    parts.close()
    registry.close()
    again = restored(config, tmp_path / "copy")
    registry = MlflowRegistry(again.tracking_uri, again.artifacts_folder, "mqmk", "mqmk")
    drop(tmp_path / "bucket", "fruit", per_class=4)
    parts = daemon(again, registry=registry)
    parts.run()
    parts.close()
    registry.close()
    found = problems(tmp_path / "copy", tmp_path / "bucket", mlflow=tmp_path / "copy" / "mlflow" / "mlflow.db")
    assert found == [] and parts.config.ledger_file.exists()


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A state directory with two versions."""
    folder = tmp_path_factory.mktemp("learned")
    config = config_of(folder)
    for task in ("sea", "birds"):
        drop(folder / "bucket", task, per_class=4)
    parts = daemon(config)
    parts.run()
    parts.close()
    return config


def test_the_command_says_what_is_in_the_copy_and_every_file_has_its_hash(learned: Config, tmp_path: Path) -> None:
    flags = ["--state", str(learned.state.dir)]
    done = CliRunner().invoke(backup, [str(tmp_path / "copy"), *flags])
    assert done.exit_code == 0, done.output
    assert "2 versions, 2 tasks" in done.output and "current version: 2" in done.output
    lines = (tmp_path / "copy" / "SHA256SUMS").read_text().splitlines()
    sums = dict(reversed(line.split("  ", 1)) for line in lines)
    files = {str(path.relative_to(tmp_path / "copy")) for path in (tmp_path / "copy").rglob("*") if path.is_file()}
    assert files - {"SHA256SUMS", "BACKUP.json"} == sums.keys()
    for name, expected in sums.items():
        assert hashlib.sha256((tmp_path / "copy" / name).read_bytes()).hexdigest() == expected, name
    assert (tmp_path / "copy").stat().st_mode & 0o077 == 0


def test_a_version_that_was_removed_from_the_store_is_named(learned: Config, tmp_path: Path) -> None:
    state = tmp_path / "state"
    shutil.copytree(learned.state.dir, state)
    next(state.glob("pools/versions/1-*")).unlink()
    done = back_up(replace(learned, state=State(state)), tmp_path / "copy")
    assert isinstance(done, BackupSummary) and (done.versions, done.missing, done.current) == ((2,), (1,), 2)


def test_a_damaged_pool_is_not_taken_for_a_backup(learned: Config, tmp_path: Path) -> None:
    state = tmp_path / "state"
    shutil.copytree(learned.state.dir, state)
    files = [next(state.glob("pools/versions/2-*")), *state.glob("pools/layers/*")]
    assert len(files) == 1 + 1 + 2 * 2, "the card, the g layer, a layer and statistics for each task"
    for path in files:
        whole = path.read_bytes()
        path.write_bytes(whole[:-1] + b"x")
        with pytest.raises(DaemonError, match="wrong sha256; the file was changed, damaged or cut short"):
            back_up(replace(learned, state=State(state)), tmp_path / "copy")
        assert not (tmp_path / "copy").exists()
        path.write_bytes(whole)


def test_a_pointer_without_its_files_is_not_taken_for_a_backup(learned: Config, tmp_path: Path) -> None:
    state = tmp_path / "state"
    shutil.copytree(learned.state.dir, state)
    next(state.glob("pools/versions/2-*")).unlink()
    with pytest.raises(DaemonError, match="version 2 is current"):
        back_up(replace(learned, state=State(state)), tmp_path / "copy", timeout=0.0)


def test_nothing_is_overwritten_and_nothing_is_made_of_nothing(learned: Config, tmp_path: Path) -> None:
    with pytest.raises(DaemonError, match="already exists"):
        back_up(learned, tmp_path)
    with pytest.raises(LedgerError, match="nothing to back up"):
        back_up(replace(learned, state=State(tmp_path / "none")), tmp_path / "copy")
    assert not (tmp_path / "none").exists()


def test_what_mlflow_had_is_looked_up_again_and_a_server_keeps_its_own_backups(learned: Config, tmp_path: Path) -> None:
    elsewhere = replace(learned, mlflow=Mlflow(tracking_uri="http://127.0.0.1:9"))
    back_up(elsewhere, tmp_path / "copy")
    assert not (tmp_path / "copy" / "mlflow").exists()
    with closing(sqlite3.connect(tmp_path / "copy" / "ledger.sqlite")) as db:
        assert db.execute("SELECT count(*) FROM versions WHERE recorded").fetchone() == (0,)
        assert db.execute("SELECT count(*) FROM key_values WHERE name = 'mlflow.serving'").fetchone() == (0,)
    with closing(sqlite3.connect(learned.ledger_file)) as db:
        assert db.execute("SELECT count(*) FROM versions WHERE recorded").fetchone() == (2,)
