"""A thread that repeats one thing, and does it at once when asked."""

import threading
from collections.abc import Callable

from mqmk.deploy.serving.ray_compat.thread_priority import lower_thread_priority


class RepeatingThread:
    """Calls `action` every `seconds`; `action` must not raise."""

    def __init__(self, name: str, action: Callable[[], object], seconds: float, lower_priority: int = 0) -> None:
        self._action, self._seconds, self._lower_priority = action, seconds, lower_priority
        self._wake, self._end = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def run_now(self) -> None:
        """Act without waiting."""
        self._wake.set()

    def stop(self) -> None:
        """Stop the thread."""
        self._end.set()
        self._wake.set()
        self._thread.join()

    def _run(self) -> None:
        if self._lower_priority:
            lower_thread_priority(self._lower_priority)
        while not self._end.is_set():
            self._wake.clear()  # before acting: what is asked for meanwhile is done next
            self._action()
            self._wake.wait(self._seconds)
