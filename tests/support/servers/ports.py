"""A program that holds a port, and whether the port is free again."""

import socket

HOLD_PORT_PROGRAM = """
import socket, threading, time
server = socket.create_server(("127.0.0.1", 0))
for _ in range(60):
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
print(server.getsockname()[1], flush=True)
time.sleep(600)
"""
"""A program with many threads, which releases its port only when the last of them has exited."""


def bind_port(port: int) -> None:
    """Raise OSError if the port is still in use."""
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", port))
