"""A process counts as gone when nothing of it is left, and not a moment before."""

import os
import signal
import socket
import subprocess
import sys

from mqmk.daemon.processes import is_alive, process

MANY_THREADS = """
import socket, threading, time
server = socket.create_server(("127.0.0.1", 0))
for _ in range(60):
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
print(server.getsockname()[1], flush=True)
time.sleep(600)
"""


def test_the_ports_of_a_process_that_is_gone_are_free():
    for _ in range(5):
        with subprocess.Popen([sys.executable, "-c", MANY_THREADS], stdout=subprocess.PIPE, text=True) as child:
            port = int(child.stdout.readline())
            found = process(child.pid)
            os.kill(child.pid, signal.SIGKILL)
            while is_alive(found):  # its first thread is a zombie while others still end
                pass
            with socket.socket() as other:
                other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                other.bind(("127.0.0.1", port))
        assert process(child.pid) is None
