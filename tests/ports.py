"""Ports for servers that tests start."""

import socket


def free_port() -> int:
    """A port that nobody has at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


HOLDING_A_PORT = """
import socket, threading, time
server = socket.create_server(("127.0.0.1", 0))
for _ in range(60):
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
print(server.getsockname()[1], flush=True)
time.sleep(600)
"""
"""A program with many threads, which let go of its port only when the last of them is gone."""


def take(port: int) -> None:
    """OSError if somebody still has it."""
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", port))
