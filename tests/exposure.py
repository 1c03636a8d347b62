"""What a stranger on this machine finds of a running daemon: ports that ask for no token, files that are open, secrets.

Ray's services are called without a token as Ray's own processes call them with one; a port that speaks HTTP is asked
for what would run a program there.
"""

import http.client
import stat
from collections.abc import Iterable
from pathlib import Path

import grpc
from listening import family, listening, open_to_all, ports_of

from mqmk.daemon.ray_command import temp_folder
from mqmk.daemon.ray_head import head_processes

CALLS = (
    "/ray.rpc.NodeInfoGcsService/CheckAlive",
    "/ray.rpc.InternalKVGcsService/InternalKVGet",
    "/ray.rpc.NodeManagerService/RequestWorkerLease",
    "/ray.rpc.ObjectManagerService/Pull",
    "/ray.rpc.CoreWorkerService/PushTask",
    "/ray.rpc.ReporterService/GetTraceback",
    "/ray.serve.ASGIService/HandleRequest",
)
"""One of every service that a process of Ray may offer."""
PATHS = ("/get_or_create_runtime_env", "/api/jobs/")
SECRET = ("ledger.sqlite", "ledger.sqlite-wal", "daemon.lock", "ray/token")


def ways_in(state: Path, daemon: int, known: Iterable[int] = ()) -> dict[str, str]:
    """What is open: addresses beyond loopback, and ports of Ray, but the `known` ones, that ask for no token."""
    ray = listening(each.pid for each in head_processes(state / "ray"))
    found = dict.fromkeys(open_to_all(ray | listening(family(daemon))), "open to other machines")
    return found | {f"port {port}": why for port in ports_of(ray) - set(known) if (why := _lets_in(port))}


def open_files(state: Path) -> dict[str, str]:
    """What other users could enter or read; a secret file is closed even in a folder that nobody can enter."""
    paths = [state, state / "ray", *(state / name for name in SECRET)]
    modes = {str(path): path.stat().st_mode for path in paths if path.exists()}
    return {path: stat.filemode(mode) for path, mode in modes.items() if mode & 0o077}


def files_with(secret: str, folder: Path, state: Path) -> list[str]:
    """Files that tell a secret, those of the daemon's Ray included, which are elsewhere where ours have long names."""
    everything = (*folder.rglob("*"), *temp_folder(state / "ray").rglob("*"))
    return [str(path) for path in everything if path.is_file() and secret.encode() in path.read_bytes()]


def _lets_in(port: int) -> str | None:
    """How a stranger gets in; None if there is no way."""
    answers = {call: _grpc(port, call) for call in CALLS}
    if set(answers.values()) != {"UNAVAILABLE"}:
        served = {call: answer for call, answer in answers.items() if answer != "UNIMPLEMENTED"}
        refused = set(served.values()) == {"UNAUTHENTICATED"}
        return None if refused else f"expected UNAUTHENTICATED, got {served or 'no service that is known'}"
    replies = {path: _http(port, path) for path in PATHS}
    refused = all(status in (401, 405) for status, _ in replies.values())  # 405: metrics, which take no POST
    return None if refused else f"expected 401, got {replies}"


def _grpc(port: int, call: str) -> str:
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            channel.unary_unary(call)(b"", timeout=5)
        except grpc.RpcError as error:
            return str(error.code().name)
        return "OK"


def _http(port: int, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("POST", path, b"x")
        reply = connection.getresponse()
        return reply.status, reply.read(100).decode(errors="replace")
    finally:
        connection.close()
