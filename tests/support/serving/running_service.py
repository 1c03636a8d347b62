"""The service on its own Ray, in its own process, for tests that send requests, swap versions and kill parts."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mqmk.daemon.ports import free_port
from mqmk.deploy.serving.telemetry.heartbeat import ReplicaStatus, live_replicas

TEMP = os.environ.get("MQMK_TEST_TEMP", "/tmp")  # Ray's sockets need a short path


@dataclass(frozen=True)
class Running:
    """The service under test."""

    url: str
    pools: Path
    temp: Path
    process: subprocess.Popen

    @property
    def reports(self) -> list[ReplicaStatus]:
        return [report for report in live_replicas(self.pools.parent / "replicas") if report.ready]

    @property
    def waiting(self) -> list[str]:
        """Why replicas are not ready."""
        found = live_replicas(self.pools.parent / "replicas")
        return [str(report.last_failure) for report in found if not report.ready]

    def post(self, path: str, body: bytes, **headers: str) -> dict:
        request = urllib.request.Request(self.url + path, body, headers | {"Content-Type": "application/octet-stream"})
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return json.load(answer) | {"status": 200}
        except urllib.error.HTTPError as error:
            with error:
                return json.load(error) | {"status": error.code}

    def say(self, line: str) -> str:
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        answers = (line for line in self.process.stdout if line.startswith("> "))  # Ray says something there, too
        return next(answers).removeprefix("> ").strip()


def until(condition: Callable[[], bool], seconds: float, what: str) -> float:
    """Wait until the condition holds; returns the seconds it took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds, f"not within {seconds} s: {what}"
        time.sleep(0.03)
    return time.monotonic() - began


@contextmanager
def running_service(pools: Path, replicas: int, **settings: object) -> Iterator[Running]:
    """Start it and wait until it answers with that many replicas; `settings` are those of `service_specs.spec_of`."""
    port = free_port()
    temp = Path(tempfile.mkdtemp(prefix="mqs", dir=TEMP))
    given = json.dumps({"port": port, "replicas": replicas} | settings)
    command = [sys.executable, str(Path(__file__).with_name("serve_process.py")), str(pools), str(temp), given]
    log = (pools.parent / "serve.log").open("w+")
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True
    )
    try:
        found = Running(f"http://127.0.0.1:{port}", pools, temp, process)
        said = process.stdout.readline().strip()
        log.seek(0)
        assert said == "ready", log.read()[-3000:]
        until(lambda: len(found.reports) == replicas, 120, f"{replicas} replicas are ready")
        yield found
    finally:
        process.stdin.close()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        process.stdout.close()
        log.close()
        shutil.rmtree(temp, ignore_errors=True)
