"""A process counts as gone when nothing of it is left, and not a moment before."""

import os
import signal
import subprocess
import sys

from ports import HOLDING_A_PORT, take

from mqmk.daemon.processes import is_alive, process


def test_the_ports_of_a_process_that_is_gone_are_free():
    for _ in range(5):
        with subprocess.Popen([sys.executable, "-c", HOLDING_A_PORT], stdout=subprocess.PIPE, text=True) as child:
            port = int(child.stdout.readline())
            found = process(child.pid)
            os.kill(child.pid, signal.SIGKILL)
            while is_alive(found):  # its first thread is a zombie while others still end
                pass
            take(port)
        assert process(child.pid) is None
