"""Learn a hostile task in a separate process and record what it unpickles, connects to and starts.

    python -m programs.hostile.run FOLDER      FOLDER/audit.json: Python's audit events; FOLDER/output: logs and output

The environment and the configuration contain canary secrets: one found in a file below FOLDER is a leak.
"""

import io
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from click.testing import CliRunner
from support import shards as tars
from support.daemons.daemon import daemon, small_config

from mqmk.daemon import logs
from mqmk.daemon.config.load import load
from mqmk.daemon.config.sections import Config, Gate, Log
from mqmk.daemon.ports import free_port
from mqmk.daemon.registry.mlflow_registry import MlflowRegistry
from mqmk.learner.data.manifest import FILE_NAME, Manifest

CANARY = "Canary7"
CLASSES = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "../../../../escaped",
    "pipe:touch escaped",
    "http://127.0.0.1:1/escaped",
    "=cmd|' /C escaped'!A0",
)
COMMANDS = (["status", "--json"], ["status"], ["tasks", "--json"], ["show", "evil"], ["show", "evil", "--json"],
            ["versions", "--json"], ["config"], ["config", "--json"], ["doctor", "--json"])  # fmt: skip
AUDITED = ("pickle.find_class", "socket.connect", "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn")


def record_audit_events() -> list[tuple[str, str]]:
    """Start recording audit events; the list grows for the lifetime of the process."""
    events: list[tuple[str, str]] = []

    def note(name: str, arguments: tuple[Any, ...]) -> None:
        if name in AUDITED:
            what = arguments[1] if name == "socket.connect" else arguments[0]
            events.append((name, f"{what}.{arguments[1]}" if name == "pickle.find_class" else str(what)))

    sys.addaudithook(note)
    return events


def drop_evil_task(bucket: Path) -> None:
    """Drop a learnable task with hostile class names."""
    data = tars.tar(tars.files(CLASSES * 10))
    manifest = Manifest("evil", CLASSES, (tars.shard(data, 10 * len(CLASSES), "evil-000000.tar"),), holdout=0.3)
    folder = bucket / "tasks" / "evil"
    folder.mkdir(parents=True)
    (folder / "evil-000000.tar").write_bytes(data)
    (folder / FILE_NAME).write_bytes(manifest.to_bytes())


def secret_environment(folder: Path) -> dict[str, str]:
    """An environment with a canary in every setting that may be secret."""
    port = free_port()
    return {
        "AWS_ACCESS_KEY_ID": f"AKID{CANARY}", "AWS_SECRET_ACCESS_KEY": f"aws/{CANARY}",
        "MLFLOW_TRACKING_USERNAME": "me", "MLFLOW_TRACKING_PASSWORD": f"mlflow{CANARY}",
        "MQMK_API_KEY": f"key{CANARY}", "MQMK_STATE_DIR": str(folder / "state"), "MQMK_RAY_ADDRESS": "none",
        "MQMK_BUCKET_URL": f"ftp://me:pass/{CANARY}@127.0.0.1:{port}/x?token={CANARY}",
        "MQMK_MLFLOW_TRACKING_URI": f"http://me:pass{CANARY}@127.0.0.1:{port}",
    }  # fmt: skip


def run_daemon(config: Config, tracking_uri: str) -> dict[str, str]:
    """Run passes until the daemon is idle."""
    parts = daemon(config, registry=MlflowRegistry(tracking_uri, config.artifacts_folder))
    parts.run()
    states = parts.states
    parts.close()
    return states


def run_commands(output: Path) -> None:
    """Run the commands and save the output of each to a file."""
    from mqmk.daemon.cli.main import cli

    for words in COMMANDS:
        found = CliRunner().invoke(cli, words, terminal_width=500)
        text = f"{found.output}\n{found.exception or ''}"
        (output / "-".join(words).replace("--", "")).write_text(text)


def main(folder: Path) -> None:
    """Run without MLflow, then with it, then without the bucket; then run every command that prints something."""
    os.environ |= secret_environment(folder)
    output = folder / "output"
    output.mkdir()
    given = load(folder=folder).config
    config = small_config(folder, gate=Gate(accuracy_floor=0.0))
    drop_evil_task(folder / "bucket")
    log = io.StringIO()
    logs.configure_logging(Log(format="json"), log)
    events = record_audit_events()
    states = run_daemon(config, given.tracking_uri)
    learned = list(events)
    run_daemon(config, config.tracking_uri)
    run_daemon(replace(config, bucket=given.bucket), config.tracking_uri)
    (output / "log").write_text(log.getvalue())
    run_commands(output)
    found = {"states": states, "learning": learned, "everything": events}
    (folder / "audit.json").write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
