"""The daemon of a demo: a real one, with its own process and state directory, stopped when the demo ends."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from mqmk.daemon.config.fields import PREFIX
from mqmk.daemon.config.sections import Config
from mqmk.daemon.errors import DaemonError
from mqmk.daemon.host.lock import lock_owner
from mqmk.daemon.ledger.ledger import Ledger
from mqmk.daemon.ports import free_port, is_free
from mqmk.daemon.ray_runtime.head import stop_head
from mqmk.daemon.status.snapshot import Snapshot

STOP_SECONDS: Final = 15.0
"""How long the daemon may take to stop; after that it is killed, which is safe."""
LOG_LINES: Final = 8
EXIT_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PORTS: Final = range(8100, 9100)


class DemoDaemon:
    """`with DemoDaemon(config, settings) as daemon:` runs `mqmk-daemon start`; the end of the block stops it."""

    def __init__(self, config: Config, settings: Mapping[str, str]) -> None:
        self.config, self._settings = config, settings
        self._log_file = config.state.dir / "daemon.log"

    def __enter__(self) -> Self:
        self.ledger = Ledger(
            self.config.ledger_file
        )  # before the daemon opens it: only one process may create its tables
        with _signals_deferred():
            self._process = self._start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:  # fmt: skip
        with _signals_deferred():
            self.stop()

    def _start(self) -> subprocess.Popen[bytes]:
        """Without the user's own configuration, and out of reach of the terminal's Ctrl-C."""
        given = [part for name, value in self._settings.items() for part in ("--set", f"{name}={value}")]
        command = [sys.executable, "-c", "from mqmk.daemon.cli.main import main; main()", "start", *given]
        with self._log_file.open("ab") as output:
            return subprocess.Popen(
                command, cwd=self.config.state.dir, env=_environment(), start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            )  # fmt: skip

    @property
    def url(self) -> str:
        """Of the page and the API."""
        return f"http://{self.config.serve.host}:{self.config.serve.port}"

    @property
    def metrics_url(self) -> str:
        """Of the daemon's own metrics, if it serves them."""
        owner = lock_owner(self.config.state.dir)
        written = owner.metrics_url if owner else None
        return written or f"http://{self.config.metrics.host}:{self.config.metrics.port}/metrics"

    def status(self) -> dict[str, Any]:
        """As `mqmk-daemon status --json`; DaemonError if the daemon has exited."""
        if self._process.poll() is not None:
            raise DaemonError(
                f"the daemon exited with code {self._process.returncode}; the end of {self._log_file}:\n"
                f"{self.last_lines()}\n`mqmk-daemon doctor` checks what it needs"
            )
        return Snapshot(self.config, self.ledger).status()

    def last_lines(self) -> str:
        """The end of the daemon's log."""
        lines = self._log_file.read_text(errors="replace").strip().splitlines()
        return "\n".join(f"  {line[:300]}" for line in lines[-LOG_LINES:])

    def stop(self) -> None:
        """Stop the daemon, then its Ray with everything that serves, in whatever state they are."""
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        stop_head(self.config.ray_folder)
        self.ledger.close()


@contextmanager
def _signals_deferred() -> Iterator[None]:
    """Exit signals are delivered after the block: what it starts is known, what it stops is gone."""
    received: list[int] = []
    before = [(number, signal.signal(number, lambda number, _: received.append(number))) for number in EXIT_SIGNALS]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)
        if received:
            signal.raise_signal(received[0])


def _environment() -> dict[str, str]:
    """Without MQMK_ variables, which are meant for another daemon."""
    return {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}


def choose_port(wanted: int | None = None, *taken: int) -> int:
    """The wanted port, which must be free, or a free one outside the ranges of the kernel and of Ray."""
    if wanted is None:
        return free_port(PORTS, taken)
    if wanted in taken or not is_free(wanted):
        raise DaemonError(f"port {wanted} is already in use; choose another one, or omit it to get a free one")
    return wanted


def command_name(program: str) -> str:
    """How to type a program installed beside this one: after `make demo`, neither is on the shell's path."""
    own, found = Path(sys.executable).with_name(program), shutil.which(program)
    if found and Path(found).resolve() == own.resolve():
        return program
    return str(own.relative_to(Path.cwd())) if own.is_relative_to(Path.cwd()) else str(own)


def create_state_folder(parent: Path, name: str) -> Path:
    """Create a folder that did not exist before."""
    for number in range(1, 1000):
        folder = parent / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder
    raise DaemonError(f"{parent} is full of demos; remove some")
