"""What `status`, `tasks`, `show` and `versions` print can be read on a terminal of 80 columns."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from support.daemons.daemon import RELEASED
from support.servers.monitored import move

from mqmk.daemon.cli.main import cli
from mqmk.daemon.cli.wait import wait_until_settled
from mqmk.daemon.config.sections import Config
from mqmk.daemon.config.sections import State as StateSection
from mqmk.daemon.errors import DaemonError
from mqmk.daemon.host.lock import DaemonLock
from mqmk.daemon.ledger.ledger import Ledger, State
from mqmk.deploy.serving.telemetry.heartbeat import ReplicaStatus, StatusFile

REASON = "shard-000000.tar, member 17.png at byte 1,024: unreadable image: image file is truncated"


@pytest.fixture
def state(tmp_path: Path) -> Path:
    folder = Path(shutil.copytree(RELEASED, tmp_path / "state"))
    ledger = Ledger(folder / "ledger.sqlite")
    ledger.add_task("more-birds", "tasks/more", "f", State.QUARANTINED, reason=REASON, code="image")
    ledger.close()
    return folder


def said(*words: object) -> str:
    """What is printed on a terminal of 80 columns."""
    env = {"COLUMNS": "80", "FORCE_COLOR": "1"}
    return re.sub(r"\x1b\[[0-9;]*m", "", CliRunner(env=env).invoke(cli, [str(word) for word in words]).stdout)


def piped(*words: object) -> str:
    return CliRunner().invoke(cli, [str(word) for word in words]).stdout


@pytest.mark.parametrize("command", ["status", "tasks"])
def test_a_reason_is_printed_whole(state, command):
    text = said(command, "--state", state)
    assert f"more-birds: {REASON}" in " ".join(text.split())
    assert "…" not in text


def test_versions_are_printed_whole_with_a_mark_at_the_current_one(state):
    text = said("versions", "--state", state)
    assert "…" not in text
    assert [line.split()[:2] for line in text.splitlines() if "→" in line] == [["→", "2"]]
    assert max(map(len, text.splitlines())) <= 80


def test_a_pipe_gets_whole_lines_of_plain_columns(state):
    ledger = Ledger(state / "ledger.sqlite")
    name = "a task with a very long name " * 5
    ledger.add_task(name.strip(), "tasks/long", "g", State.DISCOVERED)
    ledger.close()
    for command in ("status", "tasks"):
        lines = piped(command, "--state", state).splitlines()
        assert [line for line in lines if name.strip() in line and "DISCOVERED" in line]
        assert f"more-birds: {REASON}" in lines
        assert not [line for line in lines if set(line) & set("│┃─━…")]
    versions = piped("versions", "--state", state).splitlines()
    assert re.split(r"\s{2,}", versions[2].strip())[:2] == ["→ 2", "learn sea"]


def test_show_waits_for_nothing_that_is_settled_and_says_by_its_code_whether_it_is_served(state):
    done = CliRunner().invoke(cli, ["show", "more-birds", "--wait", "60", "--state", str(state)])
    assert (done.exit_code, REASON in done.stdout) == (1, True)


def test_waiting_without_a_daemon_is_reported(tmp_path):
    config = Config(state=StateSection(tmp_path / "nobody"))
    with pytest.raises(DaemonError, match="no daemon runs on"):
        wait_until_settled(config, "birds", 60, start_seconds=0.3)
    lock = DaemonLock(tmp_path / "nobody").take()
    wait_until_settled(config, "birds", 0.5, start_seconds=0.3)  # it runs: the time is over first
    lock.release()


def test_whoever_waits_hears_of_every_state_and_epoch_once(tmp_path):
    config = Config(state=StateSection(tmp_path / "state"))
    ledger = Ledger(config.ledger_file)
    task = move(
        ledger, ledger.add_task("birds", "birds", "f", State.VALIDATED), State.TRAINING, "task.training_started"
    )
    lock, lines = DaemonLock(tmp_path / "state").take(), []
    steps = [
        lambda: ledger.set_progress(task, {"epoch": 1, "epochs": 8}),
        lambda: None,  # nothing new, nothing said
        lambda: ledger.set_progress(task, {"epoch": 2, "epochs": 8}),
        lambda: move(ledger, task, State.HELD, "task.held", reason="weak"),
    ]

    def look_and_go_on(_seconds: float) -> None:
        steps.pop(0)()

    wait_until_settled(config, "birds", 60, notify=lines.append, sleep=look_and_go_on)
    lock.release()
    ledger.close()
    assert [line.partition("birds: ")[2] for line in lines] == [
        "TRAINING", "TRAINING, epoch 1 of 8", "TRAINING, epoch 2 of 8", "HELD, weak",
    ]  # fmt: skip


def test_figures_of_a_task_are_those_of_the_version_that_is_served(state):
    """Not of the last one that was built: after a rollback, tasks that are not in it show none."""
    ledger = Ledger(state / "ledger.sqlite")
    first, second = ledger.versions()
    birds, sea = ledger.tasks_named("birds")[0], ledger.tasks_named("sea")[0]
    ledger.update_task(birds, metrics={"matching_rate": 0.123, "accuracy": 0.123})  # of a version that nobody serves
    ledger.add_task("birds", "birds-too", "h", State.CONFLICT, reason="other content")
    document = json.loads(piped("tasks", "--json", "--state", state))
    shown = {(row["name"], row["state"]): row for row in document}
    measured = second.evaluation["tasks"]["birds"]
    row = shown["birds", str(birds.state)]
    assert (row["accuracy"], row["matching_rate"]) == (measured["accuracy"], measured["matching_rate"])
    assert row["images"] == sum(second.evaluation["confusion"]["birds"].values())
    assert row["accuracy_interval"][0] < row["accuracy"] < row["accuracy_interval"][1]
    assert shown["birds", "CONFLICT"]["accuracy"] is None, "its namesake was measured"
    pointer = {"version": first.version, "digest": first.digest}
    (state / "pools" / "CURRENT").write_text(json.dumps(pointer))
    move(ledger, sea, State.HELD, "task.held", reason="not in version 1")
    ledger.close()
    rows = {row["name"]: row for row in json.loads(piped("tasks", "--json", "--state", state))[:2]}
    assert rows["birds"]["accuracy"] == first.evaluation["tasks"]["birds"]["accuracy"]
    assert rows["sea"]["accuracy"] is None


def test_status_versions_and_report_print_the_same_percentage(state):
    status = json.loads(piped("status", "--json", "--state", state))["matching"]
    version = json.loads(piped("versions", "--json", "--state", state))[-1]
    assert version["current"] and status["accuracy"] == version["accuracy"]
    assert status["matching_rate"] == version["matching_rate"] and status["images"] == version["images"]
    piped("report", "--state", state)
    page = (state / "report.html").read_text()
    assert f"{100 * status['accuracy']:.1f} %" in page and f"{100 * status['matching_rate']:.1f} %" in page
    ledger = Ledger(state / "ledger.sqlite")
    confusion = ledger.versions()[-1].evaluation["confusion"]
    ledger.close()
    right = sum(row.get(name, 0) for name, row in confusion.items())
    assert status["matching_rate"] == pytest.approx(right / sum(sum(row.values()) for row in confusion.values()))


def forget(state: Path, exact: bool | None, answer: str | None) -> None:
    ledger = Ledger(state / "ledger.sqlite")
    sea = ledger.tasks_named("sea")[0]
    row = ledger.plan_version(3, "3" * 64, 2, "forget", [sea], {"held_out": 0, "tasks": {}})
    ledger.finish_version(row, {}, exact=exact, answer=answer)
    ledger.close()


def test_show_and_versions_say_whether_a_task_was_forgotten_exactly(state):
    answer = "sea is forgotten; not exactly: the g-prompt was trained on it"
    forget(state, False, answer)
    assert piped("show", "sea", "--state", state).startswith(f"sea: FORGOTTEN, {answer}\n")
    assert "forget sea, not exactly" in piped("versions", "--state", state)
    assert json.loads(piped("show", "sea", "--json", "--state", state))[0]["forgotten"] == {
        "exact": False, "answer": answer,
    }  # fmt: skip


def test_versions_and_report_say_how_many_tasks_a_version_added_and_the_document_which(state):
    ledger = Ledger(state / "ledger.sqlite")
    rows = [ledger.add_task(name, name, name, State.TRAINED) for name in ("fruit", "music", "tools")]
    plan = ledger.plan_version(3, "3" * 64, 2, "learn", rows, {"held_out": 0, "tasks": {}})
    ledger.finish_version(plan, {})
    ledger.close()
    assert "learn 3 tasks" in piped("versions", "--state", state)
    one, three = json.loads(piped("versions", "--json", "--state", state))[1:]
    assert (one["task"], one["tasks"]) == ("sea", ["sea"])
    assert (three["task"], three["tasks"]) == (None, ["fruit", "music", "tools"])
    piped("report", "--state", state)
    assert "learn 3 tasks" in (state / "report.html").read_text()


def test_a_forget_without_a_written_answer_claims_nothing(state):
    forget(state, None, None)
    assert piped("show", "sea", "--state", state).startswith("sea: FORGOTTEN\n")
    assert json.loads(piped("versions", "--json", "--state", state))[-1]["exact"] is None


def test_commands_to_type_next_can_be_typed(state):
    ledger = Ledger(state / "ledger.sqlite")
    ledger.add_task("my mixed up", "x", "f", State.HELD, reason="weak")
    ledger.close()
    assert "`mqmk-daemon promote 'my mixed up'` serves it" in piped("show", "my mixed up", "--state", state)


def test_a_running_daemon_without_a_replica_is_not_healthy(state):
    lock = DaemonLock(state).take()
    done = CliRunner().invoke(cli, ["status", "--state", str(state)])
    assert (done.exit_code, "no replica is alive" in done.stdout) == (3, True)
    StatusFile(state / "replicas", "r").write(ReplicaStatus("r", os.getpid(), ready=False))
    done = CliRunner().invoke(cli, ["status", "--state", str(state)])
    assert (done.exit_code, "1 replica\n" in done.stdout, "None" in done.stdout) == (0, True, False)
    why = "version 2, tensors: damaged; version 1 is served instead"
    report = ReplicaStatus("r", os.getpid(), ready=True, pool_version=1, last_failure=why)
    StatusFile(state / "replicas", "r").write(report)
    done = CliRunner().invoke(cli, ["status", "--state", str(state)])
    lock.release()
    assert (done.exit_code, why in done.stdout) == (3, True)


def test_a_replica_whose_process_is_gone_is_not_shown(state):
    """Its report stays fresh for seconds after `stop`."""
    gone = subprocess.Popen(["true"])
    gone.wait()
    StatusFile(state / "replicas", "r").write(ReplicaStatus("r", gone.pid, ready=True, pool_version=2))
    found = json.loads(piped("status", "--json", "--state", state))["serving"]
    assert (found["url"], found["replicas"]) == (None, [])


MAY_BE_NEW = {"start", "demo", "doctor", "config"}  # they make it, run_checks it beforehand, or read settings only


def commands_of(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Every command below a group, with the words that it is typed with."""
    for name in sorted(group.list_commands(click.Context(group))):
        found = group.get_command(click.Context(group), name)
        if isinstance(found, click.Group):
            yield from commands_of(found, (*path, name))
        elif found:
            yield (*path, name), found


CHECKED = {
    " ".join(path): command
    for path, command in commands_of(cli)
    if path[0] not in MAY_BE_NEW and any("--state" in p.opts for p in command.params)
}


def test_every_command_that_reads_the_state_directory_is_checked():
    operators = {"retry", "rollback", "promote", "forget", "commands list", "commands cancel", "api-key list"}
    assert set(CHECKED) >= operators | {"status", "tasks", "show", "versions", "stop", "report", "backup", "predict"}


@pytest.mark.parametrize("command", CHECKED)
def test_a_state_directory_where_no_daemon_ran_is_an_error_and_stays_untouched(command, tmp_path):
    found = CHECKED[command]
    places = {"DESTINATION": tmp_path / "copy", "FOLDER": tmp_path, "FILE_OR_FOLDER...": tmp_path, "ID": 1}
    words = [str(places.get(each.make_metavar(click.Context(found)), "x")) for each in found.params if each.required]
    absent = tmp_path / "typo here"
    done = CliRunner().invoke(cli, [*command.split(), *words, "--state", str(absent)])
    with pytest.raises(DaemonError, match=f"no daemon has run in {absent}; `mqmk-daemon start --state '{absent}'`"):
        raise done.exception or AssertionError(command)
    assert not absent.exists()
