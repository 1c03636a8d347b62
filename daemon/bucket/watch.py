"""Watches a local folder for changes. The only file that uses watchfiles."""

import logging
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from watchfiles import Change, watch

_log = logging.getLogger(__name__)
_CHECK_MILLISECONDS = 1_000
_RETRY_SECONDS = 5.0


class FolderWatch:
    """Sets an event when something changes below a folder, from its own thread.

    Recovers on its own: a folder that is missing or replaced is watched as soon as it exists. Best effort (the kernel
    may run out of watches): whoever waits for the event must also poll.
    """

    def __init__(self, folder: Path, changed: threading.Event) -> None:
        self._folder, self._changed = folder, changed
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="bucket-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        warned = False
        while not self._stop.is_set():
            try:
                self._watch()
                warned = False
            except (OSError, RuntimeError) as error:  # RuntimeError: from the native part of watchfiles
                if not warned and not isinstance(error, FileNotFoundError):
                    _log.warning("cannot watch %s, new tasks are found by polling: %s", self._folder, error)
                    warned = True
                self._stop.wait(_RETRY_SECONDS if warned else _CHECK_MILLISECONDS / 1000)

    def _watch(self) -> None:
        """Until the folder is replaced, or the watch is closed."""
        watched = self._folder.stat().st_ino
        self._changed.set()  # for changes before this folder existed
        for changes in self._changes():
            if changes:
                self._changed.set()
            with suppress(FileNotFoundError):
                if self._folder.stat().st_ino == watched:
                    continue
            return

    def _changes(self) -> Iterator[object]:
        return watch(
            self._folder,
            watch_filter=self._is_relevant,
            stop_event=self._stop,
            rust_timeout=_CHECK_MILLISECONDS,
            yield_on_timeout=True,
            raise_interrupt=False,
        )

    def _is_relevant(self, change: Change, path: str) -> bool:
        """Ignore hidden names: half-written folders and files of copying tools."""
        with suppress(ValueError):
            return not any(part.startswith(".") for part in Path(path).relative_to(self._folder).parts)
        return True
