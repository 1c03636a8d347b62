"""The daemon of a demo: a real one, in a process and a state directory of its own, and gone when the demo is."""

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from mqmk.daemon.config import Config
from mqmk.daemon.config_keys import PREFIX
from mqmk.daemon.errors import DaemonError
from mqmk.daemon.ledger import Ledger
from mqmk.daemon.lock import holder_of
from mqmk.daemon.overview import Overview
from mqmk.daemon.ray_head import stop_head

END_SECONDS: Final = 15.0
"""What the daemon gets to end by itself; after that it is killed, which it is made to survive."""
LOG_LINES: Final = 8
LEAVE: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PORTS: Final = range(8100, 9100)


class DemoDaemon:
    """`with DemoDaemon(config, settings) as daemon:` runs `mqmk-daemon start`; leaving ends it and its Ray."""

    def __init__(self, config: Config, settings: Mapping[str, str]) -> None:
        self.config, self._settings = config, settings
        self._log_file = config.state.dir / "daemon.log"

    def __enter__(self) -> Self:
        self.ledger = Ledger(self.config.ledger_file)  # before the daemon opens it: only one may make its tables
        with _undisturbed():
            self._process = self._started()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:  # fmt: skip
        with _undisturbed():
            self.end()

    def _started(self) -> subprocess.Popen[bytes]:
        """With nothing of the user's own configuration, and out of reach of the terminal's Ctrl-C."""
        given = [part for name, value in self._settings.items() for part in ("--set", f"{name}={value}")]
        command = [sys.executable, "-c", "from mqmk.daemon.cli import main; main()", "start", *given]
        with self._log_file.open("ab") as output:
            return subprocess.Popen(
                command, cwd=self.config.state.dir, env=_environment(), start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            )  # fmt: skip

    @property
    def url(self) -> str:
        """Of the page; the API is below it."""
        return f"http://{self.config.serve.host}:{self.config.serve.port}"

    @property
    def metrics_url(self) -> str:
        """Where the daemon's own metrics are, if it offers them."""
        holder = holder_of(self.config.state.dir)
        said = holder.metrics_url if holder else None
        return said or f"http://{self.config.metrics.host}:{self.config.metrics.port}/metrics"

    def status(self) -> dict[str, Any]:
        """As `mqmk-daemon status --json`; DaemonError if the daemon has ended by itself."""
        if self._process.poll() is not None:
            raise DaemonError(
                f"the daemon ended with exit code {self._process.returncode}; the end of {self._log_file}:\n"
                f"{self.last_lines()}\n`mqmk-daemon doctor` checks what it needs"
            )
        return Overview(self.config, self.ledger).status()

    def last_lines(self) -> str:
        """What the daemon said last."""
        lines = self._log_file.read_text(errors="replace").strip().splitlines()
        return "\n".join(f"  {line[:300]}" for line in lines[-LOG_LINES:])

    def end(self) -> None:
        """End the daemon, then its Ray with everything that serves; whatever state they are in."""
        self._process.terminate()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        stop_head(self.config.ray_folder)
        self.ledger.close()


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Signals that ask us to leave wait until the block is done: what it starts is known, what it ends is gone."""
    came: list[int] = []
    before = [(number, signal.signal(number, lambda number, _: came.append(number))) for number in LEAVE]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])


def _environment() -> dict[str, str]:
    """A user's MQMK_ variables are for another daemon."""
    return {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}


def free_port(wanted: int | None = None, *taken: int) -> int:
    """The wanted port, or one away from those that the kernel and Ray give to others; nobody listens at it."""
    candidates = [wanted] if wanted else random.sample(PORTS, len(PORTS))
    for port in candidates:
        with closing(socket.socket()) as probe:
            if port not in taken and probe.connect_ex(("127.0.0.1", port)) != 0:
                return port
    if wanted:
        raise DaemonError(f"port {wanted} is taken already; choose another one, or leave it out and get a free one")
    raise DaemonError(f"no free port between {PORTS.start} and {PORTS.stop}: choose with --port and --metrics-port")


def typed(program: str) -> str:
    """What to type for a program that is installed beside this one: `make demo` puts neither on the shell's path."""
    own, found = Path(sys.executable).with_name(program), shutil.which(program)
    if found and Path(found).resolve() == own.resolve():
        return program
    return str(own.relative_to(Path.cwd())) if own.is_relative_to(Path.cwd()) else str(own)


def new_state_folder(parent: Path, name: str) -> Path:
    """A folder that was not there before."""
    for number in range(1, 1000):
        folder = parent / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder
    raise DaemonError(f"{parent} is full of demos; remove some")
