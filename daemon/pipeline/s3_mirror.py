"""Mirrors the local pool store to S3, for replicas that share no folder with the daemon.

The folder in the state directory stays the source of truth: an unavailable store delays replicas and nothing else. Each
step checks what is there already, so it may be killed and repeated: the version's files, then the pointer.
"""

import logging
from typing import TYPE_CHECKING, Final

from mqmk.daemon import failpoints
from mqmk.daemon.ledger.ledger import Ledger
from mqmk.daemon.logs import event
from mqmk.matcher.errors import PoolError
from mqmk.matcher.pointer import Pointer
from mqmk.matcher.pool_cards import named_files
from mqmk.matcher.pool_store import PoolStore

if TYPE_CHECKING:
    from mqmk.deploy.serving.pools.s3_store import RemotePools

log = logging.getLogger(__name__)
PLACE: Final = "s3"
RETRY_SECONDS: Final = 2.0
CHECK_SECONDS: Final = 30.0
"""How often the store is checked while nothing is published: someone else may have written there."""


class S3Mirror:
    """Makes the store on S3 agree with the local CURRENT."""

    def __init__(self, ledger: Ledger, local: PoolStore, remote: "RemotePools") -> None:
        self._ledger, self._local, self._remote = ledger, local, remote
        self._checked = False
        self._mirrored: Pointer | None = None
        self._not_before = 0.0
        self._kept: set[str] | None = None
        """The cards of the local store when the remote one was last cleaned up."""

    def follow(self, now: float) -> None:
        """Copy the current version unless it is there; never raises PoolError, the next call retries."""
        current = self._local.current()
        is_settled = now < self._not_before and self._mirrored in (None, current)
        if current is None or (is_settled and not (self._mirrored and self._ledger.tasks_to_erase(PLACE))):
            return
        try:
            self._copy(current)
            self._remove_dropped()
        except PoolError as error:
            self._mirrored, self._not_before = None, now + RETRY_SECONDS
            if self._ledger.set_health("pools", False, str(error)):
                log.warning(
                    f"pool store {self._remote.name} is down: {error}",
                    extra=event("dependency.failed", dependency="pools"),
                )
        else:
            self._mirrored, self._not_before = current, now + CHECK_SECONDS
            if self._ledger.set_health("pools", True):
                log.info(
                    f"pool store {self._remote.name} is up", extra=event("dependency.recovered", dependency="pools")
                )

    def _copy(self, current: Pointer) -> None:
        if not self._checked:
            self._remote.check_conditions()
            self._checked = True
        if self._remote.current() == current:
            return
        failpoints.hit("mirror.before")
        self._remote.add(current, self._local)
        failpoints.hit("mirror.stored")
        self._remote.point_at(current, self._is_ours)
        failpoints.hit("mirror.pointed")
        log.info(f"copied version {current.version} to {self._remote.name}",
                 extra=event("version.mirrored", version=current.version, place=self._remote.name))  # fmt: skip

    def _remove_dropped(self) -> None:
        """Delete versions of ours that the local store no longer has, then the layers that no other version names."""
        local = {path.name for paths in self._local.paths().values() for path in paths}
        forgotten = self._ledger.tasks_to_erase(PLACE)
        if local == self._kept and not forgotten:
            return
        failpoints.hit("mirror.removing")
        left = set()
        for name in self._remote.versions():
            number, _, digest = name.removesuffix(".json").partition("-")
            if name not in local and number.isdecimal() and self._ledger.is_version(int(number), digest):
                self._remote.remove_version(name)
            else:
                left.add(name)
        removed = self._remove_layers(left) if left <= local else []
        is_complete = left <= local and not self._local.paths().keys() & {*self._ledger.withdrawn_versions()}
        for task in forgotten if is_complete else []:  # else the local store still has a version with the task
            self._ledger.mark_erased(task, PLACE, removed)
        self._kept = local

    def _remove_layers(self, cards: set[str]) -> list[str]:
        names, pages = set[str](), dict[str, frozenset[str]]()
        for card in cards:
            names |= named_files((self._local.versions / card).read_bytes(), self._local.read_layer, pages)
        return self._remote.remove_layers(names.__contains__)

    def _is_ours(self, pointer: Pointer) -> bool:
        return self._ledger.is_version(pointer.version, pointer.digest)
