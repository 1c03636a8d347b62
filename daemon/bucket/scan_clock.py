"""When to scan the bucket next: at its own pace, however busy or idle the rest of the daemon is."""

import math
import time
from collections.abc import Callable


class ScanClock:
    """Every `least` seconds after a find, backing off to `most` while nothing is found."""

    def __init__(
        self, least: float, most: float, reconcile: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._least, self._most, self._reconcile, self._clock = least, most, reconcile, clock
        self._pause = least
        self._next = self._earliest = self._reconciled_at = -math.inf

    def is_due(self, *, changed: bool) -> bool:
        """Whether to scan now: the pause is over, or something changed, except right after a failure."""
        now = self._clock()
        return now >= self._next or (changed and now >= self._earliest)

    @property
    def is_reconcile_due(self) -> bool:
        """Whether the next scan lists everything, however large the bucket is."""
        return self._clock() - self._reconciled_at >= self._reconcile

    def record_scan(self, *, found: bool, reconciled: bool) -> None:
        """Schedule the next scan after one that succeeded."""
        self._pause = self._least if found else self._pause
        self._earliest = -math.inf
        if reconciled:
            self._reconciled_at = self._clock()
        self._back_off()

    def record_failure(self) -> None:
        """Schedule the next scan after one that failed."""
        self._earliest = self._clock() + self._least
        self._back_off()

    def _back_off(self) -> None:
        self._next = self._clock() + self._pause
        self._pause = min(self._pause * 1.5, self._most)
