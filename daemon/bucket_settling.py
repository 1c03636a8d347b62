"""Which folder has stopped changing? Remembered in memory: after a restart the waiting begins anew.

Modification times are not asked: copying tools bring the times of the original along, and a slow upload of old files
would look finished from its first second.
"""

import math
from collections.abc import Callable, Container
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class _Stillness:
    state: str
    since: float
    told: bool = False


class Settling:
    """Watches the states of folders that are not complete yet."""

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        self._seconds, self._clock = seconds, clock
        self._folders: dict[str, _Stillness] = {}

    def is_over(self, folder: str, state: str) -> bool:
        """Whether the folder has been in this state at every look for long enough."""
        now = self._clock()
        before = self._folders.get(folder)
        if before is None or before.state != state:
            before = _Stillness(state, now)
        over = now - before.since >= self._seconds
        self._folders[folder] = replace(before, told=over)
        return over

    def __contains__(self, folder: str) -> bool:
        return folder in self._folders

    def forget(self, folder: str) -> None:
        """It is complete, or no task."""
        self._folders.pop(folder, None)

    def forget_all_but(self, present: Container[str]) -> None:
        """The others were removed."""
        for folder in [folder for folder in self._folders if folder not in present]:
            self.forget(folder)

    @property
    def seconds_left(self) -> float:
        """Until a look may find another folder settled; infinite if none is awaited."""
        ends = (still.since + self._seconds for still in self._folders.values() if not still.told)
        return max(0.0, min(ends, default=math.inf) - self._clock())
