"""Where a test may kill the daemon: named points before and after every durable step, and nothing in production.

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
    "learned.before", "learned.held-out", "learned.prompt", "learned.after",
    "build.before", "build.candidate",
    "publish.before", "publish.planned", "publish.stored", "publish.pointed", "publish.after",
    "hold.before", "hold.after",
    "mirror.before", "mirror.stored", "mirror.pointed",
    "record.before", "record.training", "record.version", "record.after", "record.alias",
    "drop.before", "drop.after",
    "tidy.before", "tidy.done", "tidy.after",
    "command.before", "command.pointed", "command.acted", "command.after",
    "forget.before", "forget.purged",
)  # fmt: skip
_passed: Counter[str] = Counter()


def reached(point: str) -> None:
    """Say that the process is here; it dies if a test wants it to."""
    wanted = os.environ.get(VARIABLE)
    if not wanted:
        return
    assert point in POINTS, point
    _passed[point] += 1
    name, _, times = wanted.partition(":")
    if name == point and _passed[point] == int(times or 1):
        os.kill(os.getpid(), signal.SIGKILL)
