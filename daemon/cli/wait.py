"""Waits until a task is serving or set aside; also for a daemon that is just starting."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from mqmk.daemon.config.sections import Config
from mqmk.daemon.errors import DaemonError
from mqmk.daemon.host.lock import lock_owner
from mqmk.daemon.ledger.ledger import Ledger, State

SETTLED: Final = (State.SERVING, State.QUARANTINED, State.CONFLICT, State.HELD, State.FORGOTTEN)
POLL_SECONDS: Final = 0.2
START_SECONDS: Final = 30.0
"""How long a daemon may take to start; without one, the task would never be served."""


def wait_until_settled(
    config: Config,
    task: str,
    seconds: float,
    start_seconds: float = START_SECONDS,
    notify: Callable[[str], None] = lambda _: None,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Return when the task is settled or the time is up; DaemonError if no daemon is running.

    `notify` gets a line for every change: states, epochs.
    """
    begun = seen = time.monotonic()
    last = ""
    while time.monotonic() - begun < seconds:
        now = _read(config, task)
        if now.what != last:
            last = now.what
            notify(f"{time.monotonic() - begun:6.1f} s  {task}: {last}")
        if now.settled:
            return
        if lock_owner(config.state.dir):
            seen = time.monotonic()
        elif time.monotonic() - seen > start_seconds:
            raise DaemonError(
                f"no daemon runs on {config.state.dir}, so {task} would never be served: `mqmk-daemon start`"
            )
        sleep(POLL_SECONDS)


@dataclass(frozen=True)
class _Progress:
    settled: bool
    what: str


def _read(config: Config, task: str) -> _Progress:
    if not config.ledger_file.exists():
        return _Progress(False, "the daemon is starting")
    ledger = Ledger(config.ledger_file)
    try:
        rows, progress = ledger.tasks_named(task), ledger.progress()
        row = rows[-1] if rows else ledger.task_of_folder(task)
    finally:
        ledger.close()
    if not row:
        return _Progress(False, "not found in the bucket yet")
    what = f"{row.state}{_epoch(progress.get(row.id))}{f', {row.reason}' if row.reason else ''}"
    return _Progress(row.state in SETTLED, what)


def _epoch(progress: Mapping[str, Any] | None) -> str:
    return f", epoch {progress['epoch']} of {progress['epochs']}" if progress else ""
