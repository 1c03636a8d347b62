"""The real command in a separate process, as an operator would run it."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

COMMAND = Path(sys.executable).with_name("mqmk-daemon")


@dataclass
class RunningDaemon:
    """`mqmk-daemon` on one state directory, with the current environment plus what a test sets."""

    folder: Path
    settings: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None

    @property
    def state(self) -> Path:
        return self.folder / "state"

    @property
    def log(self) -> str:
        path = self.folder / "daemon.log"
        return path.read_text() if path.exists() else ""

    def _environ(self) -> dict[str, str]:
        return {**os.environ, "OMP_NUM_THREADS": "1", "MQMK_STATE_DIR": str(self.state), **self.environment}

    def start(self) -> None:
        flags = [part for name, value in self.settings.items() for part in ("--set", f"{name}={value}")]
        with (self.folder / "daemon.log").open("ab") as log:
            self.process = subprocess.Popen(
                [COMMAND, "start", "--state", str(self.state), *flags], stderr=log, stdout=log, env=self._environ()
            )

    def run(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run another command on the same state directory."""
        flags = [part for name, value in self.settings.items() for part in ("--set", f"{name}={value}")]
        command = [str(COMMAND), *words, "--state", str(self.state), *flags]
        done = subprocess.run(command, capture_output=True, text=True, env=self._environ(), timeout=120, check=False)
        assert not check or done.returncode == 0, f"{words}: {done.stdout}{done.stderr}\n{self.log[-3000:]}"
        return done

    def status(self) -> dict[str, Any]:
        done = self.run("status", "--json", check=False)
        return json.loads(done.stdout) if done.stdout else {"tasks": [], "pool_version": None, "state": "none"}

    def states(self) -> dict[str, str]:
        return {task["name"]: task["state"] for task in self.status()["tasks"]}

    def wait_for(self, what: Callable[[], bool], seconds: float, why: str) -> None:
        deadline = time.monotonic() + seconds
        while not what():
            assert self.process is None or self.process.poll() is None, f"the daemon exited:\n{self.log[-4000:]}"
            assert time.monotonic() < deadline, f"{why}: not within {seconds:g} s; {self.states()}\n{self.log[-4000:]}"
            time.sleep(0.3)

    def kill(self) -> None:
        """Send SIGKILL, as the kernel does when memory runs out."""
        assert self.process
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def terminate(self) -> int:
        assert self.process
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=40)

    def end(self) -> None:
        """Stop the daemon and serving, by force if necessary."""
        self.run("stop", check=False)
        if self.process and self.process.poll() is None:
            self.kill()
