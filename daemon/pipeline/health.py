"""Which dependencies of the pipeline work: stored in the ledger, logged when it changes."""

import logging

from mqmk.daemon.ledger.ledger import Ledger
from mqmk.daemon.logs import event

log = logging.getLogger(__name__)


class DependencyHealth:
    """Of the bucket, the backbone, the disk."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def mark_up(self, dependency: str) -> None:
        """Unless a task still waits for it: a bucket that can be listed but not read is still down."""
        if self._ledger.has_task_to_retry(dependency):
            return
        if self._ledger.set_health(dependency, True):
            log.info(f"{dependency} is up", extra=event("dependency.recovered", dependency=dependency))

    def mark_down(self, dependency: str, message: str) -> None:
        """Until `mark_up`."""
        if self._ledger.set_health(dependency, False, message):
            log.warning(f"{dependency} is down: {message}",
                        extra=event("dependency.failed", dependency=dependency))  # fmt: skip
