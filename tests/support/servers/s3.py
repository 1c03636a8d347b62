"""An S3 server (SeaweedFS) for tests, and a proxy that counts requests and can be disconnected.

`s3` starts one server per session, on first use; `s3.url()` is an empty prefix in it. The AWS_… environment points to
it during a test that uses `s3_environment` (`s3.environment()` for a subprocess).
"""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from mqmk.daemon.ports import free_port, is_free

WEED = Path(sys.executable).with_name("weed")
KEY, SECRET = "mqmk-test-key", "mqmk-test-secret"
BUCKET = "tests"


def weed_ports(number: int) -> list[int]:
    """Free ports whose neighbours 10,000 above, which SeaweedFS uses for gRPC, are free, too.

    Neither is among those that the kernel gives to connections or Ray to its workers.
    """
    found: list[int] = []
    while len(found) < number:
        port = free_port(range(20_000, 22_700), taken=found)
        found += [port] if is_free(port + 10_000) else []
    return found


@dataclass(frozen=True)
class S3:
    """A running server."""

    endpoint: str
    filer_port: int  # the file system behind it, which requires no signatures

    @property
    def port(self) -> int:
        """Its port on loopback."""
        return int(self.endpoint.rsplit(":", 1)[1])

    def environment(self, endpoint: str | None = None) -> dict[str, str]:
        """The environment that a process needs to reach it."""
        return {
            "AWS_ENDPOINT_URL": endpoint or self.endpoint,
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    @cached_property
    def files(self) -> Any:
        """An s3fs file system with full access, independent of the daemon's own code."""
        import s3fs

        return s3fs.S3FileSystem(
            key=KEY, secret=SECRET, endpoint_url=self.endpoint, use_listings_cache=False, skip_instance_cache=True,
            client_kwargs={"region_name": "us-east-1"},
        )  # fmt: skip

    def put_many(self, objects: dict[str, bytes]) -> None:
        """Upload thousands of objects without the slow signing of requests."""
        paths = ["/buckets/" + url.removeprefix("s3://") for url in objects]
        parts = [list(zip(paths, objects.values(), strict=True))[start::8] for start in range(8)]
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(self._put, parts))

    def _put(self, objects: list[tuple[str, bytes]]) -> None:
        filer = http.client.HTTPConnection("127.0.0.1", self.filer_port)
        for path, data in objects:
            filer.request("PUT", path, data)
            answer = filer.getresponse()
            answer.read()
            assert answer.status == 201, answer.status
        filer.close()

    def url(self) -> str:
        """An empty prefix in a shared bucket, because creating a bucket takes a second."""
        return f"s3://{BUCKET}/prefix-{time.time_ns()}"


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    """One SeaweedFS for the session."""
    with server(tmp_path_factory.mktemp("seaweedfs")) as running:
        yield running


@contextlib.contextmanager
def server(folder: Path, address: str = "127.0.0.1") -> Iterator[S3]:
    """A SeaweedFS, killed at the end because it stops slowly."""
    master, volume, filer, port = weed_ports(4)
    config = folder / "s3.json"
    rights = ["Admin", "Read", "List", "Tagging", "Write"]
    user = {"name": "test", "credentials": [{"accessKey": KEY, "secretKey": SECRET}], "actions": rights}
    config.write_text(json.dumps({"identities": [user]}))
    (folder / "data").mkdir(exist_ok=True)  # what an earlier server left is served again
    command = [
        WEED, "server", f"-dir={folder / 'data'}", f"-ip={address}", f"-ip.bind={address}", "-master.telemetry=false",
        f"-master.port={master}", f"-volume.port={volume}", "-filer", f"-filer.port={filer}", "-s3", f"-s3.port={port}",
        "-s3.port.iceberg=0", "-s3.port.lance=0", f"-s3.config={config}", "-volume.max=0",
        "-master.volumeSizeLimitMB=256",
        "-filer.saveToFilerLimit=1024",  # keeps thousands of small objects out of the volume
    ]  # fmt: skip
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, start_new_session=True)
    try:
        running = S3(f"http://{address}:{port}", filer)
        _wait_until_ready(running, process, folder / "log")
        yield running
    finally:
        with contextlib.suppress(ProcessLookupError):  # it ended
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait_until_ready(server: S3, process: subprocess.Popen[bytes], log: Path) -> None:
    """Ready when a put succeeds."""
    deadline = time.monotonic() + 90
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(Exception):  # any error of a server that is starting
            if not server.files.exists(BUCKET):
                server.files.mkdir(BUCKET)
            server.files.pipe_file(f"{BUCKET}/ready", b"yes")
            return
        time.sleep(0.3)
    pytest.fail(f"SeaweedFS did not start:\n{log.read_text(errors='replace')[-2000:]}")


@pytest.fixture
def s3_environment(s3: S3, monkeypatch: pytest.MonkeyPatch) -> S3:
    """The server, with the environment of this process pointing to it."""
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)
    return s3


class S3Proxy:
    """A TCP proxy on loopback that records requests and can be disconnected or silenced."""

    def __init__(self, port: int) -> None:
        self._target = port
        self.requests: list[str] = []  # "GET /bucket?list-type=2"
        self.is_silent = False  # accepts connections and never answers
        self._sockets: set[socket.socket] = set()
        self._listener: socket.socket | None = None
        self.port = 0
        self.reconnect()

    @property
    def endpoint(self) -> str:
        """The URL for clients."""
        return f"http://127.0.0.1:{self.port}"

    def disconnect(self) -> None:
        """Simulate a stopped server: close connections and refuse new ones."""
        listener, self._listener = self._listener, None
        for one in [listener, *self._sockets]:
            if one is not None:
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
                one.close()
        self._sockets.clear()

    def reconnect(self) -> None:
        """Accept connections again, at the same address."""
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self.port))
        listener.listen(64)
        self.port, self._listener = listener.getsockname()[1], listener
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target))
                self._sockets |= {client, server}
                threading.Thread(target=self._pump, args=(client, server, True), daemon=True).start()
                threading.Thread(target=self._pump, args=(server, client, False), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, from_client: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(2**16):
                if from_client and data.startswith((b"GET ", b"PUT ", b"POST ", b"HEAD ", b"DELETE ")):
                    self.requests.append(b" ".join(data.split(b" ", 2)[:2]).decode())
                if not self.is_silent:
                    target.sendall(data)
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.close()


@pytest.fixture
def s3_proxy(s3: S3) -> Iterator[S3Proxy]:
    """A proxy to the server that a test may disconnect."""
    proxy = S3Proxy(s3.port)
    yield proxy
    proxy.disconnect()
