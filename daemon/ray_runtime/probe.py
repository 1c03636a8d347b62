"""Does something answer at this port? Cheap probes with a timeout, without Ray."""

import socket
from typing import Final

from mqmk.daemon.ports import LOOPBACK

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""The HTTP/2 connection preface (RFC 9113, 3.4) with empty settings; gRPC servers answer with their own settings."""
SETTINGS_FRAME: Final = 4


def speaks_grpc(port: int, timeout: float, host: str = LOOPBACK) -> bool:
    """Whether a gRPC server answers; the kernel accepts connections even for a stopped process."""
    answer = _exchange(host, port, PREFACE, timeout)
    return len(answer) >= 4 and answer[3] == SETTINGS_FRAME


def speaks_http(host: str, port: int, timeout: float, path: str = "/-/healthz") -> bool:
    """Whether an HTTP server answers 200; Serve's proxies answer the default path themselves."""
    name = f"[{host}]" if ":" in host else host
    request = f"GET {path} HTTP/1.1\r\nHost: {name}\r\nConnection: close\r\n\r\n"
    return _exchange(host, port, request.encode(), timeout).split(b" ", 2)[1:2] == [b"200"]


def refuses_connections(host: str, port: int, timeout: float) -> bool:
    """Whether nothing listens there; a slow listener does not count."""
    try:
        socket.create_connection((host, port), timeout=timeout).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False


def _exchange(host: str, port: int, request: bytes, timeout: float) -> bytes:
    try:
        with socket.create_connection((host, port), timeout=timeout) as connection:
            connection.sendall(request)
            return connection.recv(64)
    except OSError:
        return b""
