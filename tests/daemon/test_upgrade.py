"""A newer release opens what an older one wrote, and goes on from there.

`releases/<version>/` holds a state directory of each release: two tasks of sketches, made by
`PYTHONPATH=tests python tests/daemon/test_upgrade.py`.
"""

import shutil
import sqlite3
import tempfile
from contextlib import closing
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
from daemon_parts import daemon, drop, small_config
from outside_checker import problems

from mqmk.daemon.backup import back_up
from mqmk.daemon.config import Config, Evaluate, Gate, State
from mqmk.daemon.errors import LedgerError
from mqmk.daemon.ledger import Ledger
from mqmk.daemon.ledger_schema import MIGRATIONS
from mqmk.learner.settings import TrainSettings
from mqmk.matcher.pool_files import read_pool

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
    before = {path.name: read_pool(path)[0].digest for path in sorted((older / "state" / "pools").glob("*-*"))}
    drop(older / "bucket", "fruit", per_class=4)
    parts = daemon(config_of(older))
    parts.run()
    parts.close()
    assert problems(older / "state", older / "bucket") == []
    assert (
        len(before) == 2
        and before.items()
        <= {path.name: read_pool(path)[0].digest for path in (older / "state" / "pools").glob("*-*")}.items()
    )
    with closing(sqlite3.connect(older / "state" / "ledger.sqlite")) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (len(MIGRATIONS),)
        assert db.execute("SELECT name, state FROM tasks ORDER BY id").fetchall() == [
            ("birds", "PUBLISHED"), ("sea", "PUBLISHED"), ("fruit", "PUBLISHED"),
        ]  # fmt: skip


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


if __name__ == "__main__":
    make(RELEASES / version("mqmk-daemon"))
