"""Servers for tests of the registry: PostgreSQL and `mlflow server`, each stopped with its `with` block."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from mqmk.daemon.ports import free_port

POSTGRES = Path("/usr/lib/postgresql/15/bin")


class Process:
    """A server in its own process group, killed at the end."""

    def __init__(self, command: list[str | Path], log: Path, **options: Any) -> None:
        self.log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True, **options)

    def wait_for(self, ready: Callable[[], bool], seconds: float = 120) -> None:
        """Wait until it is ready; a failed start shows its log."""
        end = time.monotonic() + seconds
        while not ready():
            assert self._process.poll() is None, self.log.read_text()
            assert time.monotonic() < end, self.log.read_text()
            time.sleep(0.1)

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@contextmanager
def postgres(home: Path) -> Iterator[int]:
    """PostgreSQL with its own data folder; yields its port."""
    shutil.chown(home, "postgres")
    home.chmod(0o755)
    data, port = home / "data", free_port()
    command = [POSTGRES / "initdb", "-D", data, "-U", "postgres", "-A", "trust", "--no-sync"]
    subprocess.run(command, user="postgres", cwd=home, check=True, capture_output=True)
    serve = [POSTGRES / "postgres", "-D", data, "-p", str(port), "-h", "127.0.0.1", "-k", home, "-F"]
    with Process(serve, home / "postgres.log", user="postgres", cwd=home) as process:
        process.wait_for(lambda: is_listening(port))
        yield port


@contextmanager
def mlflow_server(home: Path, backend: str) -> Iterator[str]:
    """An `mlflow server` that stores the artifacts itself; yields its URL."""
    port = free_port()
    command: list[str | Path] = [Path(sys.executable).with_name("mlflow"), "server", "--workers", "1"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--backend-store-uri", backend]
    command += ["--artifacts-destination", str(home / "artifacts")]
    environment = os.environ | {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with Process(command, home / "mlflow.log", env=environment, cwd=home) as process:
        process.wait_for(lambda: is_healthy(f"http://127.0.0.1:{port}/health"))  # it listens long before it is ready
        yield f"http://127.0.0.1:{port}"


def is_listening(port: int) -> bool:
    """Whether a server listens on the port."""
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def is_healthy(url: str) -> bool:
    """Whether the URL responds with 200."""
    try:
        with urlopen(url, timeout=60) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False
