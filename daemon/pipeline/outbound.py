"""Copies what was published, in its own thread: versions to S3, records to MLflow. The ledger is the queue.

A slow or unresponsive server delays only its own copy: commands, trainings and signals do not wait for it. What was not
copied when the process ended is copied after the next start.
"""

import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable
from typing import Final

from mqmk.daemon.logs import event
from mqmk.daemon.pipeline.s3_mirror import S3Mirror
from mqmk.daemon.registry.recorder import Recorder
from mqmk.matcher.errors import MqmkError

log = logging.getLogger(__name__)
POLL_SECONDS: Final = 0.25
STOP_SECONDS: Final = 3.0
"""How long shutdown waits for a copy in progress."""


class Outbound:
    """All copies; their ledger connection belongs to this thread."""

    def __init__(self, records: Recorder, mirror: S3Mirror | None, clock: Callable[[], float] = time.time) -> None:
        self._records, self._mirror, self._clock = records, mirror, clock

    def catch_up(self) -> None:
        """Copy what has not been copied yet; S3 first, because replicas wait for it."""
        if self._mirror:
            self._mirror.follow(self._clock())
        self._records.catch_up(self._clock())


class OutboundThread:
    """Runs until `stop`; a daemon thread, so it ends with the process in any case."""

    def __init__(self, outbound: Outbound, close: Callable[[], None] = lambda: None) -> None:
        self._outbound, self._close = outbound, close
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="outbound", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def ident(self) -> int | None:
        """Of the thread."""
        return self._thread.ident

    def _run(self) -> None:
        while not self._stop.wait(POLL_SECONDS):
            try:
                self._outbound.catch_up()
            except Exception as error:  # nobody would notice the end of this thread: the loop needs nothing from it
                expected = isinstance(error, OSError | sqlite3.Error | MqmkError)
                log.error(f"copying failed: {error}; retrying", exc_info=None if expected else error,
                          extra=event("outbound.copy_failed"))  # fmt: skip
                self._stop.wait(POLL_SECONDS * 8)

    def stop(self) -> bool:
        """Stop after the current copy; False if that takes too long and is left to the end of the process."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(STOP_SECONDS)
        if not self._thread.is_alive():
            self._close()
        return not self._thread.is_alive()

    def exit_if_stuck(self) -> None:
        """At the very end: a copy in progress, and threads of its client, must not keep the process alive."""
        if self._thread.is_alive():
            logging.shutdown()
            os._exit(0)
