"""A process counts as gone when nothing of it is left, and not a moment before."""

import os
import signal
import subprocess
import sys

from support.servers.ports import HOLD_PORT_PROGRAM, bind_port

from mqmk.daemon.ray_runtime.processes import is_alive, process


def test_the_ports_of_a_process_that_is_gone_are_free():
    for _ in range(5):
        with subprocess.Popen([sys.executable, "-c", HOLD_PORT_PROGRAM], stdout=subprocess.PIPE, text=True) as child:
            port = int(child.stdout.readline())
            found = process(child.pid)
            os.kill(child.pid, signal.SIGKILL)
            while is_alive(found):  # its first thread is a zombie while others still end
                pass
            bind_port(port)
        assert process(child.pid) is None
