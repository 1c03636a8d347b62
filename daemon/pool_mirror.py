"""How a published version gets to replicas that share no folder with the daemon: S3 follows the local pool store.

The folder in the state directory stays the daemon's own truth: a store that is away delays replicas and nothing else.
Each step looks first at what is there already and may be killed and run again: the version's files, then the pointer.
"""

import logging
from typing import TYPE_CHECKING, Final

from mqmk.daemon import crash_points
from mqmk.daemon.errors import LedgerError
from mqmk.daemon.ledger import Ledger
from mqmk.daemon.logs import event
from mqmk.matcher.errors import PoolError
from mqmk.matcher.pointer import Pointer
from mqmk.matcher.pool_store import PoolStore

if TYPE_CHECKING:
    from mqmk.deploy.remote_pools import RemotePools

log = logging.getLogger(__name__)
RETRY_SECONDS: Final = 2.0
LOOK_SECONDS: Final = 30.0
"""How often the store is looked at while nothing is published: somebody else may have written there."""


class PoolMirror:
    """Brings the store on S3 to what the local CURRENT says."""

    def __init__(self, ledger: Ledger, local: PoolStore, remote: "RemotePools") -> None:
        self._ledger, self._local, self._remote = ledger, local, remote
        self._checked = False
        self._there: Pointer | None = None
        self._not_before = 0.0

    def follow(self, now: float) -> None:
        """Publish the current version there unless it is; PoolError never leaves, the next pass tries again."""
        current = self._local.current()
        if current is None or (now < self._not_before and self._there in (None, current)):
            return
        try:
            self._bring(current)
        except PoolError as error:
            self._there, self._not_before = None, now + RETRY_SECONDS
            if self._ledger.set_health("pools", False, str(error)):
                log.warning(f"the pool store does not work: {error}", extra=event("health.down", part="pools"))
        else:
            self._there, self._not_before = current, now + LOOK_SECONDS
            if self._ledger.set_health("pools", True):
                log.info(f"the pool store {self._remote.name} works", extra=event("health.up", part="pools"))

    def _bring(self, current: Pointer) -> None:
        if not self._checked:
            self._remote.check_conditions()
            self._checked = True
        if self._remote.current() == current:
            return
        crash_points.reached("mirror.before")
        self._remote.add(current, self._local.folder / current.folder)
        crash_points.reached("mirror.stored")
        self._remote.point_at(current, self._is_ours)
        crash_points.reached("mirror.pointed")
        said = event("version.mirrored", version=current.version, place=self._remote.name)
        log.info(f"version {current.version} is at {self._remote.name}", extra=said)

    def _is_ours(self, pointer: Pointer) -> bool:
        try:
            return self._ledger.version(pointer.version).digest == pointer.digest
        except LedgerError:
            return False
