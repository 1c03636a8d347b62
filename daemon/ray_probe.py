"""Does something answer at this port? Cheap questions with a time limit, asked without Ray."""

import socket
from typing import Final

from mqmk.daemon.ray_command import LOOPBACK

GREETING: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""How an HTTP/2 client begins (RFC 9113, 3.4), with empty settings; gRPC servers answer with their own settings."""
SETTINGS_FRAME: Final = 4


def speaks_grpc(port: int, timeout: float, host: str = LOOPBACK) -> bool:
    """Whether a gRPC server answers; a connection alone proves nothing, the kernel takes it for a stopped process."""
    answer = _ask(host, port, GREETING, timeout)
    return len(answer) >= 4 and answer[3] == SETTINGS_FRAME


def speaks_http(port: int, timeout: float, path: str = "/-/healthz", host: str = LOOPBACK) -> bool:
    """Whether an HTTP server says 200; the path is the one that Serve's proxies answer by themselves."""
    question = f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
    return _ask(host, port, question.encode(), timeout).split(b" ", 2)[1:2] == [b"200"]


def _ask(host: str, port: int, question: bytes, timeout: float) -> bytes:
    try:
        with socket.create_connection((host, port), timeout=timeout) as connection:
            connection.sendall(question)
            return connection.recv(64)
    except OSError:
        return b""
