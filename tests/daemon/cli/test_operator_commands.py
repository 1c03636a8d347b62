"""What an operator types is checked before it is queued, and can be listed and taken back until it is applied."""

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from support.daemons.daemon import RELEASED

from mqmk.daemon.cli.main import cli
from mqmk.daemon.cli.operator_commands import STILL_WAITING
from mqmk.daemon.ledger.ledger import Ledger
from mqmk.matcher.errors import MqmkError


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """Versions 1 and 2, tasks birds and sea."""
    return Path(shutil.copytree(RELEASED, tmp_path / "state"))


def run(state: Path, *words: str) -> Result:
    return CliRunner().invoke(cli, [*words, "--state", str(state)])


def queued(state: Path) -> list[tuple[str, str]]:
    ledger = Ledger(state / "ledger.sqlite")
    found = [(command.kind, command.subject) for command in ledger.pending_commands()]
    ledger.close()
    return found


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["rollback", "abc"], "expected the number of a version, got 'abc'"),
        (["rollback", "\u00b2"], "expected the number of a version"),
        (["rollback", "99999999999999999999"], "expected the number of a version"),
        (["rollback", "3"], "there is no version 3"),
        (["promote", "\u0661"], "expected the number of a version"),
        (["promote", "3"], "there is no version 3"),
        (["forget", "nosuch"], "there is no task nosuch"),
        (["retry", ""], "there is no task "),
        (["forget", "\udcff"], r"expected a name, got '\udcff'"),
        (["commands", "cancel", "1"], "there is no command 1"),
        (["commands", "cancel", "99999999999999999999"], "is not in the range"),
    ],
)  # fmt: skip
def test_what_no_daemon_could_ever_apply_is_refused_and_not_queued(state, words, reason):
    done = run(state, *words, *([] if words[0] == "commands" else ["--wait", "0"]))
    assert done.exit_code != 0 and isinstance(done.exception, MqmkError | SystemExit)
    assert reason in (str(done.exception) if isinstance(done.exception, MqmkError) else done.stderr)
    assert queued(state) == []


def test_what_waits_for_the_daemon_is_listed_and_can_be_cancelled(state):
    assert run(state, "commands", "list").stdout == "No commands are queued.\n"
    assert run(state, "rollback", "1", "--wait", "0").exit_code == 0
    told = run(state, "forget", "sea")
    assert told.exit_code == STILL_WAITING, "no daemon runs, so nobody waits for it"
    assert told.stdout == (
        "Queued as command 2. It runs when the daemon starts; `mqmk-daemon commands cancel 2` cancels it.\n"
    )
    listed = json.loads(run(state, "commands", "list", "--json").stdout)
    assert [(row["id"], row["command"], row["state"]) for row in listed] == [
        (1, "rollback 1", "PENDING"), (2, "forget sea", "PENDING"),
    ]  # fmt: skip
    assert run(state, "commands", "cancel", "2").stdout == "Cancelled command 2: forget sea.\n"
    assert queued(state) == [("rollback", "1")]
    assert "forget sea" not in run(state, "commands", "list").stdout
    assert "forget sea  CANCELLED" in run(state, "commands", "list", "--all").stdout
    assert "is CANCELLED: too late" in str(run(state, "commands", "cancel", "2").exception)
