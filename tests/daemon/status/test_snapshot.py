"""What `status` says about serving, also when what it would read is damaged."""

import json
import os
import subprocess
import sys
from pathlib import Path

from mqmk.daemon.ledger.ledger import Ledger
from mqmk.deploy.serving.telemetry.heartbeat import ReplicaStatus, StatusFile

COMMAND = Path(sys.executable).with_name("mqmk-daemon")
WHY = "pointer: CURRENT: expected a version and a digest, got '{'"


def status(state: Path, *options: str) -> str:
    environment = os.environ | {"COLUMNS": "200"}
    command = [COMMAND, "status", "--state", str(state), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment).stdout


def test_a_damaged_pointer_and_a_replica_that_waits_for_it_are_said_with_the_reason(tmp_path):
    Ledger(tmp_path / "ledger.sqlite").close()
    (tmp_path / "pools").mkdir()
    (tmp_path / "pools" / "CURRENT").write_text("{")
    StatusFile(tmp_path / "replicas", "new").write(ReplicaStatus("new", os.getpid(), ready=False, last_failure=WHY))
    StatusFile(tmp_path / "replicas", "old").write(
        ReplicaStatus("old", os.getpid(), ready=True, pool_version=3, last_failure=WHY)
    )
    found = json.loads(status(tmp_path, "--json"))
    assert found["pool_version"] is None
    assert [(each["id"], each["ready"], each["last_failure"]) for each in found["serving"]["replicas"]] == [
        ("new", False, WHY),
        ("old", True, WHY),
    ]
    (pools,) = (each for each in found["health"] if each["dependency"] == "pools")
    assert not pools["up"]
    assert "CURRENT: expected a version and a digest" in pools["message"]
    shown = status(tmp_path)
    assert f"replica new is not ready: {WHY}" in shown
    assert f"replica old keeps serving version 3: {WHY}" in shown
    assert "pools unavailable" in shown
