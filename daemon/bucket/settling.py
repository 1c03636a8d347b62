"""Which folders have stopped changing? Kept in memory: after a restart the wait starts over.

Modification times are not used: copying tools preserve those of the original, so a slow upload of old files would look
finished from the start.
"""

import math
from collections.abc import Callable, Container
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class _FolderState:
    state: str
    since: float
    reported: bool = False


class Settling:
    """Tracks the states of folders that are not complete yet."""

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        self._seconds, self._clock = seconds, clock
        self._folders: dict[str, _FolderState] = {}

    def has_settled(self, folder: str, state: str) -> bool:
        """Whether the folder has been in this state at every scan for long enough."""
        now = self._clock()
        before = self._folders.get(folder)
        if before is None or before.state != state:
            before = _FolderState(state, now)
        settled = now - before.since >= self._seconds
        self._folders[folder] = replace(before, reported=settled)
        return settled

    def __contains__(self, folder: str) -> bool:
        return folder in self._folders

    def forget(self, folder: str) -> None:
        """Stop tracking a folder that is complete, or no task."""
        self._folders.pop(folder, None)

    def forget_all_but(self, present: Container[str]) -> None:
        """Stop tracking folders that were removed."""
        for folder in [folder for folder in self._folders if folder not in present]:
            self.forget(folder)

    @property
    def seconds_left(self) -> float:
        """Until a scan may find another folder settled; infinite if none is tracked."""
        ends = (still.since + self._seconds for still in self._folders.values() if not still.reported)
        return max(0.0, min(ends, default=math.inf) - self._clock())
