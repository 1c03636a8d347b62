"""The life of a hostile task in a process of its own, which notes what it unpickles, connects to and starts.

    python audited_life.py FOLDER      FOLDER/noted.json: what Python's audit hooks told; FOLDER/said: what was printed

The environment and the configuration hold canaries: whoever finds one in a file below FOLDER has found a leak.
"""

import io
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import tars
from click.testing import CliRunner
from daemon_parts import daemon, small_config
from ports import free_port

from mqmk.daemon import logs
from mqmk.daemon.config import Config, Gate, Log
from mqmk.daemon.config_sources import load
from mqmk.daemon.registry import MlflowRegistry
from mqmk.learner.manifest import FILE_NAME, Manifest

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
WATCHED = ("pickle.find_class", "socket.connect", "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn")


def watch() -> list[tuple[str, str]]:
    """Filled from now on, for as long as the process lives."""
    noted: list[tuple[str, str]] = []

    def note(name: str, arguments: tuple[Any, ...]) -> None:
        if name in WATCHED:
            what = arguments[1] if name == "socket.connect" else arguments[0]
            noted.append((name, f"{what}.{arguments[1]}" if name == "pickle.find_class" else str(what)))

    sys.addaudithook(note)
    return noted


def drop_evil_task(bucket: Path) -> None:
    """A task that can be learned, whose classes are called what nobody would call them."""
    data = tars.tar(tars.files(CLASSES * 10))
    manifest = Manifest("evil", CLASSES, (tars.shard(data, 10 * len(CLASSES), "evil-000000.tar"),), holdout=0.3)
    folder = bucket / "tasks" / "evil"
    folder.mkdir(parents=True)
    (folder / "evil-000000.tar").write_bytes(data)
    (folder / FILE_NAME).write_bytes(manifest.to_bytes())


def environment(folder: Path) -> dict[str, str]:
    """Secrets in every place that takes one."""
    port = free_port()
    return {
        "AWS_ACCESS_KEY_ID": f"AKID{CANARY}", "AWS_SECRET_ACCESS_KEY": f"aws/{CANARY}",
        "MLFLOW_TRACKING_USERNAME": "me", "MLFLOW_TRACKING_PASSWORD": f"mlflow{CANARY}",
        "MQMK_API_KEY": f"key{CANARY}", "MQMK_STATE_DIR": str(folder / "state"), "MQMK_RAY_ADDRESS": "none",
        "MQMK_BUCKET_URL": f"ftp://me:pass/{CANARY}@127.0.0.1:{port}/x?token={CANARY}",
        "MQMK_MLFLOW_TRACKING_URI": f"http://me:pass{CANARY}@127.0.0.1:{port}",
    }  # fmt: skip


def run(config: Config, tracking_uri: str) -> dict[str, str]:
    """Passes until nothing happens any more."""
    parts = daemon(config, registry=MlflowRegistry(tracking_uri, config.artifacts_folder))
    parts.run()
    states = parts.states
    parts.close()
    return states


def commands(said: Path) -> None:
    """What the commands print, a file each."""
    from mqmk.daemon.cli import cli

    for words in COMMANDS:
        found = CliRunner().invoke(cli, words, terminal_width=500)
        text = f"{found.output}\n{found.exception or ''}"
        (said / "-".join(words).replace("--", "")).write_text(text)


def main(folder: Path) -> None:
    """With MLflow away, then with it, then with the bucket away; then every command that shows something."""
    os.environ |= environment(folder)
    said = folder / "said"
    said.mkdir()
    given = load(folder=folder).config
    config = small_config(folder, gate=Gate(accuracy_floor=0.0))
    drop_evil_task(folder / "bucket")
    log = io.StringIO()
    logs.set_up(Log(format="json"), log)
    noted = watch()
    states = run(config, given.tracking_uri)
    learned = list(noted)
    run(config, config.tracking_uri)
    run(replace(config, bucket=given.bucket), config.tracking_uri)
    (said / "log").write_text(log.getvalue())
    commands(said)
    found = {"states": states, "learning": learned, "everything": noted}
    (folder / "noted.json").write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
