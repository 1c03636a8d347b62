"""A client process that classifies one image after another: `client.py PORT IMAGES OUT PER_SECOND`.

IMAGES is a folder of `<label>.png`, which may grow. Every request becomes a JSON line of OUT. It ends when its
standard input closes, so it never outlives its parent. No heavy imports: it shares two cores with what it measures.
"""

import http.client
import json
import random
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, unquote

TIMEOUT_SECONDS: Final = 60.0
LOOK_SECONDS: Final = 5.0
"""How often it looks for new images."""


@dataclass(frozen=True)
class Request:
    """What became of one request."""

    began: float
    """Seconds since the epoch."""
    seconds: float
    right: bool = False
    queries: float = 0.0
    error: str | None = None


class Connection:
    """One kept connection to the service, opened again when it breaks."""

    def __init__(self, port: int) -> None:
        self._line = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_SECONDS)

    def ask(self, image: Path) -> Request:
        body, began = image.read_bytes(), time.time()
        clock = time.monotonic()
        try:
            status, data = self.fetch("POST", "/predict", body)
            seconds = time.monotonic() - clock
            if status != 200:
                return Request(began, seconds, error=f"{status}: {data[:200].decode(errors='replace')}")
            answer: dict[str, Any] = json.loads(data)
            return Request(began, seconds, answer["label"] == unquote(image.stem), float(answer["queries"]))
        except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
            self._line.close()
            return Request(began, time.monotonic() - clock, error=repr(error))

    def fetch(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        """Status and body."""
        self._line.request(method, path, body, {"Content-Type": "application/octet-stream"} if body else {})
        reply = self._line.getresponse()
        return reply.status, reply.read()

    def close(self) -> None:
        self._line.close()


@dataclass
class Client:
    """The process, seen from outside."""

    port: int
    images: Path
    out: Path
    per_second: float
    failed: list[str] = field(default_factory=list)
    asked: int = 0
    _process: subprocess.Popen[bytes] | None = None
    _read: int = 0

    def add_image(self, label: str, png: bytes) -> None:
        self.images.mkdir(parents=True, exist_ok=True)
        part = self.images / "part"
        part.write_bytes(png)
        part.rename(self.images / f"{quote(label, safe='')}.png")

    def start(self) -> None:
        self.new_requests()  # those of an earlier run on the same folder count, too
        command = [sys.executable, __file__, str(self.port), str(self.images), str(self.out), str(self.per_second)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE)

    def new_requests(self) -> list[Request]:
        """Those since this was last asked."""
        if not self.out.exists():
            return []
        with self.out.open("rb") as file:
            file.seek(self._read)
            lines = file.read().rpartition(b"\n")[0]
        self._read += len(lines) + bool(lines)
        found = [Request(**json.loads(line)) for line in lines.splitlines()]
        self.asked += len(found)
        self.failed += [f"{time.strftime('%H:%M:%S', time.localtime(r.began))} {r.error}" for r in found if r.error]
        return found

    def stop(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(10)
            self._process.kill()
            self._process.wait()


def main() -> None:
    port, folder, out, per_second = int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), float(sys.argv[4])
    over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
    connection, rng = Connection(port), random.Random(0)
    images: list[Path] = []
    looked = 0.0
    with out.open("a", buffering=1) as file:
        while not over.is_set():
            if not images or time.monotonic() - looked > LOOK_SECONDS:
                images, looked = sorted(folder.glob("*.png")), time.monotonic()
            began = time.monotonic()
            if images:
                file.write(json.dumps(asdict(connection.ask(rng.choice(images)))) + "\n")
            over.wait(max(0.0, 1 / per_second - (time.monotonic() - began)))
    connection.close()


if __name__ == "__main__":
    main()
