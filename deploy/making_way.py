"""How a thread that works beside requests makes way for them."""

import os
import threading
from contextlib import suppress


def make_way(by: int) -> None:
    """Lower the calling thread's priority below that of the process's others; on Linux a thread has its own niceness.

    Relative, because Ray may have lowered the whole process (by 15), and a fixed niceness of 5 would overtake it.
    """
    with suppress(OSError, AttributeError):
        mine = os.getpriority(os.PRIO_PROCESS, 0)
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), min(19, mine + by))
