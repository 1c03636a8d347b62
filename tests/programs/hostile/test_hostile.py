"""The hostile run contains what it looks for; tests/daemon/test_security.py runs it and checks the results."""

import json
import subprocess
import sys
from pathlib import Path

from programs.hostile.run import CANARY, CLASSES, drop_evil_task, secret_environment

from mqmk.learner.data.manifest import FILE_NAME, parse_manifest

TESTS = Path(__file__).resolve().parents[2]


def test_every_setting_that_may_be_secret_contains_a_canary(tmp_path: Path) -> None:
    canaries = {name for name, value in secret_environment(tmp_path).items() if CANARY in value}
    assert canaries == {
        "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "MLFLOW_TRACKING_PASSWORD", "MQMK_API_KEY", "MQMK_BUCKET_URL",
        "MQMK_MLFLOW_TRACKING_URI",
    }  # fmt: skip


def test_the_task_has_the_hostile_class_names(tmp_path: Path) -> None:
    drop_evil_task(tmp_path)
    assert parse_manifest((tmp_path / "tasks" / "evil" / FILE_NAME).read_bytes()).classes == CLASSES


def test_unpickling_connecting_and_starting_a_program_are_recorded() -> None:
    script = """
import json, pickle, socket, subprocess
from programs.hostile.run import record_audit_events
events = record_audit_events()
pickle.loads(pickle.dumps(pickle.PickleError))
with socket.socket() as client:
    client.connect_ex(("127.0.0.1", 1))
subprocess.run(["true"])
print(json.dumps(events))
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=TESTS, capture_output=True, text=True, check=True)
    events = dict(json.loads(done.stdout))
    assert events["pickle.find_class"] == "_pickle.PickleError"
    assert events["socket.connect"] == "('127.0.0.1', 1)"
    assert events["subprocess.Popen"] == "true"
