"""What a Ray head is told at its start: ports that last, a short private folder, nobody else's variables."""

import fcntl
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from mqmk.daemon.errors import RayError
from mqmk.daemon.ray_runtime.head import LAUNCH
from mqmk.daemon.ray_runtime.head_command import (
    LONGEST_TEMP_FOLDER,
    PORTS,
    Ports,
    RayHeadSettings,
    choose_ports,
    environment,
    make_temp_folder,
    temp_folder,
)


def test_ports_are_kept_over_a_restart_where_they_are_free(tmp_path):
    settings = RayHeadSettings(tmp_path)
    first = choose_ports(settings, None)
    assert {first.gcs, first.raylet, first.metrics} <= set(PORTS)
    assert choose_ports(settings, first) == first
    with socket.create_server(("127.0.0.1", first.gcs)):
        again = choose_ports(settings, first)
    assert again.gcs != first.gcs
    assert again.raylet == first.raylet
    assert choose_ports(RayHeadSettings(tmp_path, metrics_port=21_212), first) == Ports(first.gcs, first.raylet, 21_212)


def test_the_temporary_folder_has_a_short_path_and_belongs_to_one_state_folder(tmp_path):
    deep = tmp_path / ("d" * 60)
    assert len(str(temp_folder(deep))) <= LONGEST_TEMP_FOLDER
    assert temp_folder(deep) != temp_folder(deep / "other")
    assert temp_folder(Path("/srv/mqmk/ray")) == Path("/srv/mqmk/ray/private/ray")


def test_variables_for_another_ray_do_not_reach_the_head(monkeypatch, tmp_path):
    monkeypatch.setenv("RAY_ADDRESS", "elsewhere:1")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "another")
    given = environment(RayHeadSettings(tmp_path, environment={"RAY_SERVE_X": "1"}), tmp_path / "t")
    assert "RAY_ADDRESS" not in given
    assert "RAY_AUTH_TOKEN" not in given
    assert given["RAY_SERVE_X"] == "1"
    assert given["PATH"] == os.environ["PATH"]


def test_a_temporary_folder_that_others_can_enter_is_refused(tmp_path):
    settings = RayHeadSettings(tmp_path / ("d" * 60))
    prepared = temp_folder(settings.folder).parent
    prepared.mkdir()
    prepared.chmod(0o777)
    try:
        with pytest.raises(RayError, match="only you can enter"):
            make_temp_folder(settings)
    finally:
        prepared.rmdir()


def is_locked(folder: Path) -> bool:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def test_whoever_tidies_temporary_files_leaves_those_of_a_running_head_alone(tmp_path):
    private, other = tmp_path / "tmp" / "ours", tmp_path / "tmp" / "stale"
    for folder in (private / "ray" / "session", other):
        folder.mkdir(parents=True)
        (folder / "socket").touch()
    launch = ["/bin/sh", "-c", LAUNCH, "sh", str(private), str(tmp_path / "log"), "sleep", "60"]
    head = int(subprocess.run(launch, stdout=subprocess.PIPE, text=True, check=True).stdout)
    try:
        assert is_locked(private)
        if shutil.which("systemd-tmpfiles"):
            (tmp_path / "tidy.conf").write_text(f"d {tmp_path}/tmp - - - 0\n")
            subprocess.run(["systemd-tmpfiles", "--clean", str(tmp_path / "tidy.conf")], check=True)
            assert (private / "ray" / "session" / "socket").exists()
            assert not (other / "socket").exists(), "it does remove what nobody has locked"
    finally:
        os.kill(head, signal.SIGKILL)
    deadline = time.monotonic() + 5
    while is_locked(private) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not is_locked(private), "the lock ends with the head"
