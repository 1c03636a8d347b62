"""Run the commands of a documentation page in a shell, in a folder with a user's images."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from PIL import Image

from mqmk.daemon.ports import free_port
from mqmk.learner.data import sketches

BIN = Path(sys.executable).parent


def save_sketches(folder: Path, label: str, first: int, last: int) -> None:
    """Save sketches of a class, which the embedded backbone recognizes well."""
    (folder / label).mkdir(parents=True, exist_ok=True)
    for number in range(first, last):
        Image.fromarray(sketches.read(label).training[number]).save(folder / label / f"{number}.png")


@contextmanager
def run_commands(
    commands: str, folder: Path, stop: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> Iterator[str]:
    """Yield the output of all commands. `mqmk-daemon stop` with these arguments runs in any case."""
    port = free_port()
    environ = {
        **os.environ,
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "COLUMNS": "160",
        "MQMK_SERVE_PORT": str(port),
        "MQMK_METRICS_PORT": str(free_port()),
        "MQMK_TRAIN_EPOCHS": "3",
        "MQMK_GATE_FRESH_PROCESS": "false",
        **(environment or {}),
    }
    script = "set -ex\n" + commands.replace("127.0.0.1:8000", f"127.0.0.1:{port}")
    with (folder / "output").open("w") as output:  # not a pipe: a Ray left behind by a failure would keep it open
        done = subprocess.run(
            ["bash", "-c", script], cwd=folder, env=environ, stdout=output, stderr=output, check=False
        )
    try:
        text, log = (folder / "output").read_text(), (folder / "daemon.log").read_text()
        assert done.returncode == 0, f"{text[-4000:]}\n{log[-2000:]}"
        yield text
    finally:
        subprocess.run([BIN / "mqmk-daemon", "stop", *stop], env=environ, capture_output=True, check=False)
