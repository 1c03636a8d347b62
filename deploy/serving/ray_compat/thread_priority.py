"""Lower priority for threads that work beside requests."""

import os
import threading
from contextlib import suppress


def lower_thread_priority(by: int) -> None:
    """Raise the niceness of the calling thread; on Linux every thread has its own.

    Relative, because Ray may have niced the whole process (by 15), and a fixed niceness of 5 would be above that.
    """
    with suppress(OSError, AttributeError):
        mine = os.getpriority(os.PRIO_PROCESS, 0)
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), min(19, mine + by))
