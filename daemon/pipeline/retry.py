"""Retry or quarantine? One function decides, for every failure of every step."""

import errno
import sqlite3
from dataclasses import dataclass
from typing import Final

from mqmk.daemon.config.sections import Retry
from mqmk.daemon.errors import BucketError, WorkerDied
from mqmk.learner.errors import TaskRejected
from mqmk.matcher.errors import BackboneError, MqmkError

MOST_PARTS: Final = 64
_INFRASTRUCTURE_ERRNOS: Final = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EMFILE, errno.ENFILE, errno.ESTALE}
)


@dataclass(frozen=True)
class RetryLater:
    """The failure may be transient."""

    seconds: float
    reason: str
    split: int = 1
    """Factor by which the number of parts of a batch grows."""
    dependency: str | None = None
    """What seems to be down."""


@dataclass(frozen=True)
class Quarantine:
    """The failure is permanent."""

    code: str
    reason: str


def decide(error: Exception, attempts: int, split: int, retry: Retry) -> RetryLater | Quarantine:
    """What to do after a failure of a task that has failed `attempts` times before in this step."""
    pause = min(retry.max_seconds, retry.first_seconds * 2.0 ** min(attempts, 60))  # a bucket may be down for months
    reason = f"{type(error).__name__}: {error}"
    if isinstance(error, TaskRejected):
        return Quarantine(error.code, str(error))
    if isinstance(error, BucketError):  # also what an operator must fix, such as an expired key: the task is good
        return RetryLater(pause, str(error), dependency="bucket")
    if isinstance(error, BackboneError):  # a wrong setting or an unavailable model hub, never the task
        return RetryLater(pause, str(error), dependency="backbone")
    if cause := _find_infrastructure_error(error):
        return RetryLater(pause, f"{cause.strerror}: {cause.filename or 'the state directory'}", dependency="disk")
    if attempts + 1 >= retry.attempts:
        return Quarantine("gave-up", f"gave up after {attempts + 1} attempts; the last error: {reason}")
    if is_out_of_memory(error) and split < MOST_PARTS:
        return RetryLater(pause, f"out of memory; retrying with batches split into {2 * split} parts", split=2)
    if isinstance(error, WorkerDied):
        return RetryLater(pause, str(error))
    if isinstance(error, MqmkError):  # permanent: a retry would fail the same way
        return Quarantine("failed", str(error))
    return RetryLater(pause, reason)


def _find_infrastructure_error(error: BaseException | None) -> OSError | None:
    """The error of the disk or the system that caused this one, if any: not the task's fault."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _INFRASTRUCTURE_ERRNOS:
            return error
        error = error.__cause__
    return None


def is_infrastructure_error(error: Exception) -> bool:
    """Whether the machine is at fault, such as a full disk, and not the task or command."""
    return _find_infrastructure_error(error) is not None or isinstance(error, sqlite3.OperationalError)


def is_out_of_memory(error: Exception) -> bool:
    """Whether the machine or a GPU ran out of memory."""
    return isinstance(error, MemoryError) or "out of memory" in str(error).lower()
