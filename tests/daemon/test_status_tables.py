"""What `status`, `tasks`, `show` and `versions` print can be read on a terminal of 80 columns."""

import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner
from daemon_parts import RELEASED

from mqmk.daemon.cli import cli
from mqmk.daemon.config import Config
from mqmk.daemon.config import State as StateSection
from mqmk.daemon.errors import DaemonError
from mqmk.daemon.ledger import Ledger, State
from mqmk.daemon.lock import DaemonLock
from mqmk.daemon.settled import wait_until_settled

REASON = "shard-000000.tar, member 17.png at byte 1,024: unreadable picture: image file is truncated"


@pytest.fixture
def state(tmp_path: Path) -> Path:
    folder = Path(shutil.copytree(RELEASED, tmp_path / "state"))
    ledger = Ledger(folder / "ledger.sqlite")
    ledger.add_task("more-birds", "tasks/more", "f", State.QUARANTINED, reason=REASON, code="image")
    ledger.close()
    return folder


def said(*words: object) -> str:
    return CliRunner().invoke(cli, [str(word) for word in words], env={"COLUMNS": "80"}).stdout


@pytest.mark.parametrize("command", ["status", "tasks"])
def test_a_reason_is_printed_whole(state, command):
    text = said(command, "--state", state)
    assert f"more-birds: {REASON}" in " ".join(text.split())
    assert "…" not in text


def test_versions_are_printed_whole_with_a_mark_at_the_current_one(state):
    text = said("versions", "--state", state)
    assert "…" not in text
    assert [line.split()[1:3] for line in text.splitlines() if "→" in line] == [["→", "2"]]


def test_show_waits_for_nothing_that_is_settled_and_says_by_its_code_whether_it_is_served(state):
    done = CliRunner().invoke(cli, ["show", "more-birds", "--wait", "60", "--state", str(state)])
    assert (done.exit_code, REASON in done.stdout) == (1, True)


def test_whoever_waits_without_a_daemon_is_told(tmp_path):
    config = Config(state=StateSection(tmp_path / "nobody"))
    with pytest.raises(DaemonError, match="no daemon runs on"):
        wait_until_settled(config, "birds", 60, away_seconds=0.3)
    lock = DaemonLock(tmp_path / "nobody").take()
    wait_until_settled(config, "birds", 0.5, away_seconds=0.3)  # it runs: the time is over first
    lock.release()
