"""What a running daemon exposes to other users and machines: addresses, unauthenticated ports, files, secrets.

Ray's gRPC services are called without a token; HTTP ports are sent the requests that would run a program.
"""

import http.client
import os
import stat
from collections.abc import Iterable
from pathlib import Path

import grpc

from mqmk.daemon.ray_runtime.head import head_processes
from mqmk.daemon.ray_runtime.head_command import temp_folder

CALLS = (
    "/ray.rpc.NodeInfoGcsService/CheckAlive",
    "/ray.rpc.InternalKVGcsService/InternalKVGet",
    "/ray.rpc.NodeManagerService/RequestWorkerLease",
    "/ray.rpc.ObjectManagerService/Pull",
    "/ray.rpc.CoreWorkerService/PushTask",
    "/ray.rpc.ReporterService/GetTraceback",
    "/ray.serve.ASGIService/HandleRequest",
)
"""One method of every service that a Ray process may offer."""
PATHS = ("/get_or_create_runtime_env", "/api/jobs/")
PROC = Path("/proc")
LOOPBACK = ("0100007F:", "0000000000000000FFFF00000100007F:", "00000000000000000000000001000000:")
"""Prefixes of loopback addresses in the kernel's hexadecimal notation."""
SECRET = ("ledger.sqlite", "ledger.sqlite-wal", "daemon.lock", "ray/token")


def find_open_ports(state: Path, daemon: int, known: Iterable[int] = ()) -> dict[str, str]:
    """Addresses beyond loopback, and Ray's ports, except the `known` ones, that require no token."""
    ray = listening_addresses(each.pid for each in head_processes(state / "ray"))
    found = dict.fromkeys(
        beyond_loopback(ray | listening_addresses(process_tree(daemon))), "reachable from other machines"
    )
    return found | {
        f"port {port}": why for port in ports_of(ray) - set(known) if (why := _unauthenticated_access(port))
    }


def find_accessible_files(state: Path) -> dict[str, str]:
    """Paths that other users could access; secret files must be private even inside a private folder."""
    paths = [state, state / "ray", *(state / name for name in SECRET)]
    modes = {str(path): path.stat().st_mode for path in paths if path.exists()}
    return {path: stat.filemode(mode) for path, mode in modes.items() if mode & 0o077}


def find_files_containing(secret: str, folder: Path, state: Path) -> list[str]:
    """Files that contain a secret, including those of the daemon's Ray, which may be in another folder."""
    everything = (*folder.rglob("*"), *temp_folder(state / "ray").rglob("*"))
    return [str(path) for path in everything if path.is_file() and secret.encode() in path.read_bytes()]


def _unauthenticated_access(port: int) -> str | None:
    """How the port can be used without credentials; None if it cannot."""
    answers = {call: _call_grpc(port, call) for call in CALLS}
    if set(answers.values()) != {"UNAVAILABLE"}:
        served = {call: answer for call, answer in answers.items() if answer != "UNIMPLEMENTED"}
        refused = set(served.values()) == {"UNAUTHENTICATED"}
        return None if refused else f"expected UNAUTHENTICATED, got {served or 'no known service'}"
    replies = {path: _post_http(port, path) for path in PATHS}
    refused = all(status in (401, 405) for status, _ in replies.values())  # 405: metrics, which accept no POST
    return None if refused else f"expected 401, got {replies}"


def _call_grpc(port: int, call: str) -> str:
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            channel.unary_unary(call)(b"", timeout=5)
        except grpc.RpcError as error:
            return str(error.code().name)
        return "OK"


def _post_http(port: int, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("POST", path, b"x")
        reply = connection.getresponse()
        return reply.status, reply.read(100).decode(errors="replace")
    finally:
        connection.close()


def listening_addresses(pids: Iterable[int]) -> dict[str, str]:
    """The addresses, in the kernel's hexadecimal notation, that these processes listen on, and the program of each."""
    owners = {}
    for pid in pids:
        program = (PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")[0]
        for descriptor in (PROC / str(pid) / "fd").iterdir():
            try:
                owners[os.readlink(descriptor)] = program
            except FileNotFoundError:
                continue
    lines = [line.split() for name in ("tcp", "tcp6") for line in (PROC / "net" / name).read_text().splitlines()[1:]]
    found = [(line[1], f"socket:[{line[9]}]") for line in lines if line[3] == "0A"]
    return {address: owners[inode] for address, inode in found if inode in owners}


def beyond_loopback(found: dict[str, str]) -> dict[str, str]:
    """Those that other machines can reach."""
    return {address: owner for address, owner in found.items() if not address.startswith(LOOPBACK)}


def ports_of(found: dict[str, str]) -> set[int]:
    return {int(address.rpartition(":")[2], 16) for address in found}


def process_tree(pid: int) -> set[int]:
    """A process with all its descendants."""
    parents = {}
    for entry in PROC.iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
    found, size = {pid}, 0
    while len(found) > size:
        size = len(found)
        found |= {child for child, parent in parents.items() if parent in found}
    return found
