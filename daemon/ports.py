"""Which TCP ports of this machine are free."""

import random
import socket
from collections.abc import Collection, Sequence
from typing import Final

from mqmk.daemon.errors import DaemonError

LOOPBACK: Final = "127.0.0.1"


def free_port(candidates: Sequence[int] = (), taken: Collection[int] = ()) -> int:
    """A port on loopback that nothing listens on: one of the candidates in random order, or the kernel's choice.

    `taken` are ports that were chosen a moment ago and that nothing listens on yet.
    """
    if not candidates:
        with socket.socket() as probe:
            probe.bind((LOOPBACK, 0))
            return int(probe.getsockname()[1])
    for port in random.sample(candidates, len(candidates)):
        if port not in taken and is_free(port):
            return port
    raise DaemonError(f"no free port between {min(candidates)} and {max(candidates)}; `ss -ltn` lists the ports in use")


def is_free(port: int) -> bool:
    """Whether a server could listen on this port of loopback."""
    try:
        try_to_listen(LOOPBACK, port)
    except OSError:
        return False
    return True


def try_to_listen(host: str, port: int) -> None:
    """OSError if no server can listen at this address."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the port of a process that died is free at once
        probe.bind(address)
        probe.listen(1)  # two sockets may bind a port, but only one may listen on it
