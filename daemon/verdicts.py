"""Try again or give up? One function decides, for every failure of every step."""

import errno
from dataclasses import dataclass
from typing import Final

from mqmk.daemon.config import Retry
from mqmk.daemon.errors import BucketError, WorkerDied
from mqmk.learner.errors import TaskRejected
from mqmk.matcher.errors import MqmkError

MOST_PARTS: Final = 64
_OF_THE_MACHINE: Final = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EMFILE, errno.ENFILE, errno.ESTALE}
)


@dataclass(frozen=True)
class TryAgain:
    """It may pass."""

    seconds: float
    reason: str
    split: int = 1
    """Into how many times as many parts a batch is cut."""
    part: str | None = None
    """What seems to be down."""


@dataclass(frozen=True)
class GiveUp:
    """It will not."""

    code: str
    reason: str


def judge(error: Exception, attempts: int, split: int, retry: Retry) -> TryAgain | GiveUp:
    """What a failure means for its task, which has failed `attempts` times before in this step."""
    pause = min(retry.max_seconds, retry.first_seconds * 2.0 ** min(attempts, 60))  # a bucket may be down for months
    reason = f"{type(error).__name__}: {error}"
    if isinstance(error, TaskRejected):
        return GiveUp(error.code, str(error))
    if isinstance(error, BucketError):  # also what an operator must mend, such as a key that expired: the task is good
        return TryAgain(pause, str(error), part="bucket")
    if trouble := _of_the_machine(error):
        return TryAgain(pause, f"{trouble.strerror}: {trouble.filename or 'the state directory'}", part="disk")
    if attempts + 1 >= retry.attempts:
        return GiveUp("gave-up", f"gave up after {attempts + 1} tries; the last one: {reason}")
    if is_out_of_memory(error) and split < MOST_PARTS:
        return TryAgain(pause, f"out of memory; next with batches cut into {2 * split} parts", split=2)
    if isinstance(error, WorkerDied):
        return TryAgain(pause, str(error))
    if isinstance(error, MqmkError):  # it says itself what is wrong, and the next try would say it again
        return GiveUp("failed", str(error))
    return TryAgain(pause, reason)


def _of_the_machine(error: BaseException | None) -> OSError | None:
    """The disk's or the system's own error behind this one, if there is one: it says nothing about the task."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _OF_THE_MACHINE:
            return error
        error = error.__cause__
    return None


def is_out_of_memory(error: Exception) -> bool:
    """Memory of the machine or of a GPU."""
    return isinstance(error, MemoryError) or "out of memory" in str(error).lower()
