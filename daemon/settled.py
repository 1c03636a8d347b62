"""Wait until a task is served, or put aside for a reason; also for a daemon that was started a moment ago."""

import time
from typing import Final

from mqmk.daemon.config import Config
from mqmk.daemon.errors import DaemonError
from mqmk.daemon.ledger import Ledger, State
from mqmk.daemon.lock import holder_of

SETTLED: Final = (State.SERVING, State.QUARANTINED, State.CONFLICT, State.HELD, State.FORGOTTEN)
LOOK_SECONDS: Final = 0.2
AWAY_SECONDS: Final = 30.0
"""How long a daemon may take to appear; after that, nobody would ever serve the task."""


def wait_until_settled(config: Config, task: str, seconds: float, away_seconds: float = AWAY_SECONDS) -> None:
    """Return when the task is settled or the time is over; DaemonError if no daemon is there to settle it."""
    begun = seen = time.monotonic()
    while time.monotonic() - begun < seconds and not _is_settled(config, task):
        if holder_of(config.state.dir):
            seen = time.monotonic()
        elif time.monotonic() - seen > away_seconds:
            raise DaemonError(f"no daemon runs on {config.state.dir}, so {task} waits for ever: `mqmk-daemon start`")
        time.sleep(LOOK_SECONDS)


def _is_settled(config: Config, task: str) -> bool:
    if not config.ledger_file.exists():
        return False
    ledger = Ledger(config.ledger_file)
    try:
        rows = ledger.named(task)
    finally:
        ledger.close()
    return bool(rows) and rows[-1].state in SETTLED
