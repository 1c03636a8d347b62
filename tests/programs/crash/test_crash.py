"""Killed anywhere, the daemon reaches the same published state; and the checker detects violations."""

import hashlib
import json
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from support.daemons.daemon import daemon, drop, small_config
from support.daemons.invariants import problems

from mqmk.daemon.config.sections import Gate
from mqmk.daemon.registry.mlflow_registry import MlflowRegistry

TESTS = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(900)
def test_sixty_kills_at_every_durable_step_and_at_random_lose_and_double_nothing() -> None:
    command = [sys.executable, "-m", "programs.crash.run", "60"]
    done = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert "60 kills" in done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound")
    config = small_config(folder, gate=Gate(accuracy_floor=0.0, fresh_process=False))
    drop(folder / "bucket", "sea", per_class=6)
    drop(folder / "bucket", "birds", per_class=6)
    registry = MlflowRegistry(config.tracking_uri, config.artifacts_folder)
    daemon(config, registry=registry).run()
    registry.close()
    assert not problems(folder / "state", folder / "bucket", _database(folder))
    return folder


def _database(folder: Path) -> Path:
    return Path(small_config(folder).tracking_uri.removeprefix("sqlite:///"))


def _ledger(folder: Path, sql: str) -> None:
    with closing(sqlite3.connect(folder / "state" / "ledger.sqlite")) as db, db:
        db.execute(sql)


def _lose_a_version(folder: Path) -> None:
    next((folder / "state" / "pools" / "versions").glob("1-*")).unlink()


def _damage_a_layer(folder: Path) -> None:
    layer = next((folder / "state" / "pools" / "layers").glob("*.safetensors"))
    layer.write_bytes(layer.read_bytes()[:-1] + b"x")


def _lose_a_layer(folder: Path) -> None:
    next((folder / "state" / "pools" / "layers").glob("*.safetensors")).unlink()


def _leave_a_layer(folder: Path) -> None:
    (folder / "state" / "pools" / "layers" / f"{hashlib.sha256(b'').hexdigest()}.safetensors").write_bytes(b"")


def _point_elsewhere(folder: Path) -> None:
    pools = folder / "state" / "pools"
    digest = hashlib.sha256(next((pools / "versions").glob("1-*")).read_bytes()).hexdigest()
    (pools / "CURRENT").write_text(json.dumps({"version": 1, "digest": digest}))


DAMAGE = {
    "a version is lost": _lose_a_version,
    "a layer is left": _leave_a_layer,
    "the pointer is elsewhere": _point_elsewhere,
    "a task is stuck": lambda folder: _ledger(folder, "UPDATE tasks SET state = 'TRAINING' WHERE id = 1"),
    "a task is served that no pool has": lambda folder: _ledger(
        folder,
        "INSERT INTO tasks (name, folder, fingerprint, state, discovered_at, updated_at) "
        "VALUES ('x', 'x', '', 'SERVING', 0, 0)",
    ),
    "a version number is skipped": lambda folder: _ledger(folder, "UPDATE versions SET version = 3 WHERE version = 2"),
    "a command is forgotten": lambda folder: _ledger(
        folder, "INSERT INTO commands (at, kind, subject, state) VALUES (0, 'forget', 'sea', 'PENDING')"
    ),
    "a task in the bucket was never seen": lambda folder: drop(folder / "bucket", "fruit", per_class=6),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_the_checker_notices_when(what: str, sound: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(sound, copy)
    DAMAGE[what](copy)
    assert problems(copy / "state", copy / "bucket", _database(copy))


@pytest.mark.parametrize("damage", [_damage_a_layer, _lose_a_layer])
def test_the_checker_notices_a_layer_that_is_not_what_its_name_says(damage, sound: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(sound, copy)
    damage(copy)
    with pytest.raises((AssertionError, FileNotFoundError)):
        problems(copy / "state", copy / "bucket", _database(copy))


def test_the_checker_notices_a_version_that_mlflow_lacks(sound: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(sound, copy)
    with closing(sqlite3.connect(_database(copy))) as db, db:
        db.execute("DELETE FROM model_versions WHERE version = 2")
    assert problems(copy / "state", copy / "bucket", _database(copy))
