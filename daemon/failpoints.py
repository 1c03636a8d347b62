"""Failpoints: named places before and after every durable step where a test can kill the daemon. Off in production.

`MQMK_CRASH_AT=publish.stored` (or `publish.stored:3`, the third time) ends the process there as `kill -9` would.
"""

import os
import signal
from collections import Counter
from typing import Final

VARIABLE: Final = "MQMK_CRASH_AT"
POINTS: Final = (
    "discover.before", "discover.after",
    "validate.before", "validate.after",
    "train.before", "train.after",
    "checkpoint.before", "checkpoint.after",
    "learned.before", "learned.held_out", "learned.prompt", "learned.after",
    "build.before", "build.candidate",
    "publish.before", "publish.planned", "publish.stored", "publish.pointed", "publish.after",
    "hold.before", "hold.after",
    "mirror.before", "mirror.stored", "mirror.pointed", "mirror.removing",
    "record.before", "record.training", "record.version", "record.after", "record.alias",
    "drop.before", "drop.after", "collect.before", "collect.after",
    "upgrade.before", "upgrade.written", "upgrade.recorded", "upgrade.pointed", "upgrade.after",
    "cleanup.before", "cleanup.done", "cleanup.after",
    "command.before", "command.pointed", "command.acted", "command.after",
    "forget.before", "forget.purged",
)  # fmt: skip
_hits: Counter[str] = Counter()


def hit(point: str) -> None:
    """Kill the process here if a test asks for it."""
    wanted = os.environ.get(VARIABLE)
    if not wanted:
        return
    assert point in POINTS, point
    _hits[point] += 1
    name, _, times = wanted.partition(":")
    if name == point and _hits[point] == int(times or 1):
        os.kill(os.getpid(), signal.SIGKILL)
