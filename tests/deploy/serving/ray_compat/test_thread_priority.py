"""A thread that works beside requests has a lower priority than they, whatever the process's own is."""

import os
import subprocess
import sys

import pytest

CODE = """
import os, threading
from mqmk.deploy.serving.ray_compat.thread_priority import lower_thread_priority
os.nice({own})
found = []
thread = threading.Thread(target=lambda: (lower_thread_priority(5), found.append(os.getpriority(os.PRIO_PROCESS, 0))))
thread.start()
thread.join()
print(found[0], os.getpriority(os.PRIO_PROCESS, 0))
"""


@pytest.mark.parametrize("own", [0, 15, 19])
def test_only_the_thread_that_asks_makes_way_and_never_the_other_way_round(own):
    mine = os.getpriority(os.PRIO_PROCESS, 0)
    done = subprocess.run([sys.executable, "-c", CODE.format(own=own)], capture_output=True, text=True, check=True)
    process = min(19, mine + own)
    assert done.stdout.split() == [str(min(19, process + 5)), str(process)]
