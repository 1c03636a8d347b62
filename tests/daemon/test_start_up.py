"""`start` refuses what cannot work before it starts anything, leaves nothing behind, and says where everything is."""

import logging
import os
import shutil
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from support.daemons.daemon import RELEASED, daemon, drop, small_config

from mqmk.daemon.app import run_daemon
from mqmk.daemon.config.sections import Backbone, Config, Gate, Metrics, Ray, State
from mqmk.daemon.errors import DaemonError, RayError
from mqmk.daemon.host.start_checks import START_CHECKS, check_before_start
from mqmk.daemon.ledger.ledger import Ledger
from mqmk.daemon.ports import free_port
from mqmk.daemon.ray_runtime.head import ensure_head, head_processes
from mqmk.daemon.ray_runtime.head_command import RayHeadSettings
from mqmk.daemon.start_up import Announcement, log_stopped, start_or_undo
from mqmk.daemon.status.snapshot import Snapshot
from mqmk.deploy.serving.settings import ServeSettings
from mqmk.deploy.serving.telemetry.heartbeat import ReplicaStatus, StatusFile
from mqmk.learner.settings import TrainSettings

COMMAND = Path(sys.executable).with_name("mqmk-daemon")


def serving(folder: Path, **sections: object) -> Config:
    """A daemon that would start Ray and serve, at ports that nobody has."""
    config = small_config(folder, ray=Ray(num_cpus=1), serve=ServeSettings(port=free_port()), metrics=Metrics(port=0))
    return replace(config, **sections)  # type: ignore[arg-type]


def test_the_command_refuses_a_wrong_backbone_in_one_line_before_ray_is_started(tmp_path):
    flags = ["backbone.name=vit_tiny_patch16_224", "backbone.weights=/typo.safetensors", f"serve.port={free_port()}",
             "metrics.port=0", f"bucket.url={tmp_path / 'bucket'}"]  # fmt: skip
    options = [part for flag in flags for part in ("--set", flag)]
    command = [COMMAND, "start", "--state", tmp_path / "state", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    last = done.stderr.splitlines()[-1]
    assert (done.returncode, last) == (1, "mqmk-daemon: /typo.safetensors: no such file")
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "state" / "ray").exists() and not (tmp_path / "state" / "ledger.sqlite").exists()


@pytest.mark.parametrize(("name", "section"), [("serve", ServeSettings), ("metrics", Metrics)])
def test_a_taken_port_is_refused_before_ray_is_started_and_the_lock_is_free_again(tmp_path, monkeypatch, name, section):
    monkeypatch.setattr("mqmk.daemon.host.port_checks.ANSWER_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        config = serving(tmp_path, **{name: section(port=port)})
        for _ in range(2):
            with pytest.raises(DaemonError, match=f"another program listens at 127.0.0.1:{port}; choose another port"):
                run_daemon(config)
    assert not config.ray_folder.exists() and not config.ledger_file.exists()


def learned(folder: Path) -> State:
    """A state directory with a version."""
    return State(Path(shutil.copytree(RELEASED, folder / "learned")))


def test_another_backbone_than_the_one_that_was_learned_with_is_refused(tmp_path):
    config = Config(state=learned(tmp_path), serve=ServeSettings(enabled=False), metrics=Metrics(port=0))
    assert check_before_start(config).startswith("embedded, 28 px")
    other = replace(config, backbone=Backbone(name="vit_tiny_patch16_224", weights="random", image_size=32))  # type: ignore[arg-type]
    with pytest.raises(DaemonError, match=r"was trained on .*embedded.*configure the backbone it was trained on"):
        check_before_start(other)


def test_training_settings_that_do_not_fit_the_backbone_are_refused(tmp_path):
    with pytest.raises(DaemonError, match=r"e_layers: .* \(the backbone has 6 blocks\), got 2,50"):
        check_before_start(serving(tmp_path, train=TrainSettings(e_layers=(2, 50))))


def test_a_model_hub_that_never_answers_is_given_up(tmp_path, monkeypatch):
    hangs = threading.Event()
    monkeypatch.setitem(START_CHECKS, "backbone", lambda _: hangs.wait(30))
    with pytest.raises(DaemonError, match=r"no answer within 0\.2 s"):
        check_before_start(serving(tmp_path), timeout=0.2)
    hangs.set()


def test_a_start_that_fails_ends_the_ray_that_it_started(tmp_path):
    config = serving(tmp_path)

    class Failing:
        stopped = False

        def start(self) -> None:
            ensure_head(RayHeadSettings(config.ray_folder, num_cpus=1))
            assert head_processes(config.ray_folder)
            raise RayError("the service does not start")

        def stop(self) -> None:
            self.stopped = True

    ground = Failing()
    with pytest.raises(RayError, match="the service does not start"):
        start_or_undo(ground, config)
    assert ground.stopped and head_processes(config.ray_folder) == []


class Quiet:
    """Nothing to start."""

    started = stopped = 0

    def start(self) -> None:
        self.started += 1

    def stop(self) -> None:
        self.stopped += 1


def test_a_start_that_works_is_left_running(tmp_path):
    ground = Quiet()
    start_or_undo(ground, serving(tmp_path))
    assert (ground.started, ground.stopped) == (1, 0)


def announced(config: Config, caplog: pytest.LogCaptureFixture, **values: object) -> logging.LogRecord:
    with caplog.at_level(logging.INFO, logger="mqmk"):
        over = Announcement(config, "embedded, 28 px", "http://127.0.0.1:9109/metrics", **values).start()  # type: ignore[arg-type]
        for thread in threading.enumerate():
            if thread.name == "announcement":
                thread.join(10)
        over()
    (found,) = (each for each in caplog.records if getattr(each, "event", "") == "daemon.ready")
    return found


def test_once_a_replica_answers_the_log_says_where_everything_is(tmp_path, caplog):
    config = serving(tmp_path)
    Ledger(config.ledger_file).close()
    StatusFile(config.state.dir / "replicas", "r").write(ReplicaStatus("r", os.getpid(), ready=False))
    url = f"http://127.0.0.1:{config.serve.port}"
    found = announced(config, caplog, options=("--state", str(config.state.dir)))
    assert found.getMessage() == f"ready, serving at {url}/"
    assert found.ids == {  # type: ignore[attr-defined]
        "page": f"{url}/", "API": f"{url}/docs", "metrics": "http://127.0.0.1:9109/metrics",
        "bucket": str(tmp_path / "bucket"), "state": str(tmp_path / "state"), "backbone": "embedded, 28 px",
        "next": f"mqmk-daemon pack IMAGES {tmp_path / 'bucket'}/tasks --task NAME",
    }  # fmt: skip


def test_a_terminal_gets_the_same_as_a_block_to_read(tmp_path, caplog, capsys, monkeypatch):
    config = replace(serving(tmp_path), state=learned(tmp_path), serve=ServeSettings(enabled=False))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    announced(config, caplog, options=("--state", "my state"))
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if line]
    assert dict(lines)["backbone"] == "embedded, 28 px"
    assert dict(lines)["next"] == "mqmk-daemon predict IMAGE --state 'my state'"


def test_a_service_that_does_not_come_up_is_said_and_not_claimed(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("mqmk.daemon.start_up.READY_SECONDS", 0.0)
    config = serving(tmp_path)
    Ledger(config.ledger_file).close()
    found = announced(config, caplog)
    assert found.getMessage() == "ready" and "no replica is alive" in found.ids["serving"]  # type: ignore[attr-defined]
    assert "page" not in found.ids  # type: ignore[attr-defined]


def test_the_last_line_says_what_goes_on(tmp_path, caplog):
    config = serving(tmp_path)
    ledger = Ledger(config.ledger_file)
    overview = Snapshot(config, ledger)
    with caplog.at_level(logging.INFO, logger="mqmk"):
        log_stopped(overview)
        StatusFile(config.state.dir / "replicas", "r").write(ReplicaStatus("r", os.getpid(), ready=True))
        log_stopped(overview, ("--state", "a b"))
    ledger.close()
    url = f"http://127.0.0.1:{config.serve.port}"
    assert [each.getMessage() for each in caplog.records] == [
        "stopped", f"stopped. Serving continues at {url}; `mqmk-daemon stop --state 'a b'` ends it.",
    ]  # fmt: skip


def test_a_backbone_that_cannot_be_loaded_is_not_blamed_on_the_task(tmp_path):
    """It waits, `status` says what is wrong, and it is learned when the file is there."""
    drop(tmp_path / "bucket", "birds", per_class=6)
    config = small_config(tmp_path, gate=Gate(accuracy_floor=0.0, fresh_process=False))
    wrong = Backbone(name="vit_tiny_patch16_224", weights=tmp_path / "typo.safetensors")
    parts = daemon(replace(config, backbone=wrong))
    parts.run(passes=6)
    row = parts.ledger.tasks_named("birds")[0]
    (health,) = (each for each in parts.ledger.health() if each.dependency == "backbone")
    parts.close()
    assert (str(row.state), row.failures >= config.retry.attempts) == ("TRAINING", True), row.reason
    assert (health.up, "typo.safetensors: no such file" in health.message) == (False, True)
    parts = daemon(config)
    parts.run()
    assert parts.states == {"birds": "PUBLISHED"}
    assert [each.up for each in parts.ledger.health() if each.dependency == "backbone"] == [True]
    parts.close()


def test_the_log_says_when_a_version_is_built_and_how_long_it_took(tmp_path, caplog):
    drop(tmp_path / "bucket", "birds", per_class=6)
    parts = daemon(small_config(tmp_path, gate=Gate(accuracy_floor=0.0, fresh_process=False)))
    with caplog.at_level(logging.INFO, logger="mqmk"):
        parts.run()
    parts.close()
    said = [each for each in caplog.records if getattr(each, "event", "").startswith("version.b")]
    assert [each.getMessage().partition(" in ")[0] for each in said] == [
        "building version 1: learn birds",
        "built version 1",
    ]
    assert said[1].ids["seconds"] >= 0  # type: ignore[attr-defined]
