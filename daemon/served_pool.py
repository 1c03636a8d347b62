"""What does a running service say about files of pictures? Several requests at a time, one picture in each."""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from http.client import HTTPException
from pathlib import Path
from typing import Any, Final
from urllib.error import HTTPError, URLError
from urllib.parse import urlencode, urlsplit
from urllib.request import OpenerDirector, ProxyHandler, Request, build_opener

from mqmk.daemon.config_sources import KEY_VARIABLE
from mqmk.daemon.errors import DaemonError
from mqmk.daemon.told import Told, Wishes
from mqmk.deploy.settings import is_loopback

AT_ONCE: Final = 8
PATIENCE_SECONDS: Final = 30.0
"""How long one picture is tried again while the service is busy, or away for a moment."""
TIMEOUT_SECONDS: Final = 60.0
BUSY: Final = (429, 502, 503, 504)
REFUSED_KEY: Final = 401


@dataclass(frozen=True)
class Reply:
    """One HTTP answer."""

    status: int
    body: bytes
    retry_after: float

    @property
    def document(self) -> Any:
        """The body as JSON; None if it is none."""
        try:
            return json.loads(self.body)
        except ValueError:
            return None

    @property
    def reason(self) -> str:
        """What an error says."""
        said = self.document
        text = said.get("error") if isinstance(said, dict) else None
        return str(text or self.body[:200].decode(errors="replace").strip() or f"status {self.status}")


@dataclass(frozen=True)
class ServedPool:
    """The pool behind an address."""

    url: str
    key: str | None = None
    wishes: Wishes = field(default_factory=Wishes)
    patience: float = PATIENCE_SECONDS
    pause: Callable[[float], None] = time.sleep

    def __post_init__(self) -> None:
        if urlsplit(self.url).scheme not in ("http", "https") or not urlsplit(self.url).netloc:
            raise DaemonError(f"--url: expected an address such as http://127.0.0.1:8000, got {self.url!r}")

    @property
    def place(self) -> str:
        return self.url

    def tasks(self) -> Mapping[str, Sequence[str]]:
        reply = self._now("/pool")
        if reply.status != 200:
            raise DaemonError(f"{self.url}/pool: expected what was learned, got {reply.status}: {reply.reason}")
        return {task["name"]: task["classes"] for task in reply.document["tasks"]}

    def answers(self, files: Sequence[Path]) -> Iterator[Told]:
        ready = self._now("/v2/health/ready")
        if ready.status != 200:
            raise DaemonError(f"{self.url} is not ready: {ready.reason}")
        with ThreadPoolExecutor(min(AT_ONCE, len(files) or 1)) as threads:
            yield from threads.map(self._told, files)

    def _told(self, file: Path) -> Told:
        try:
            picture = file.read_bytes()
        except OSError as error:
            return Told(file, error=str(error.strerror))
        reply = self._patiently(self._predict, picture)
        if reply.status != 200:
            return Told(file, error=f"{reply.status}: {reply.reason}")
        return Told(file, answer=reply.document)

    @cached_property
    def _predict(self) -> str:
        wanted = {"matcher": self.wishes.matcher, "top_k": self.wishes.top_k}
        return "/predict?" + urlencode({name: value for name, value in wanted.items() if value is not None})

    def _patiently(self, path: str, body: bytes) -> Reply:
        """A question may be asked twice, so whatever may pass is tried again."""
        deadline = time.monotonic() + self.patience
        while True:
            last = time.monotonic() > deadline
            try:
                reply = self._request(path, body)
                if reply.status not in BUSY or last:
                    return reply
                self.pause(reply.retry_after)
            except (OSError, HTTPException) as error:
                if last:
                    raise self._silent(error) from error
                self.pause(0.5)

    def _now(self, path: str) -> Reply:
        try:
            return self._request(path)
        except (OSError, HTTPException) as error:
            raise self._silent(error) from error

    def _request(self, path: str, body: bytes | None = None) -> Reply:
        headers = {"Content-Type": "application/octet-stream"} if body is not None else {}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        try:
            request = Request(self.url.rstrip("/") + path, body, headers)
            with self._opener.open(request, timeout=TIMEOUT_SECONDS) as response:
                reply = Reply(response.status, response.read(), 0.0)
        except HTTPError as error:
            with error:
                reply = Reply(error.code, error.read(), _seconds(error.headers.get("Retry-After")))
        if reply.status == REFUSED_KEY:
            raise DaemonError(f"{self.url}: {reply.reason}; put the key into the variable {KEY_VARIABLE}")
        return reply

    @cached_property
    def _opener(self) -> OpenerDirector:
        """A proxy that is configured for other addresses is not asked about this machine."""
        direct = is_loopback(urlsplit(self.url).hostname or "")
        return build_opener(ProxyHandler({})) if direct else build_opener()

    def _silent(self, error: Exception) -> DaemonError:
        reason = error.reason if isinstance(error, URLError) else error
        return DaemonError(
            f"{self.url} does not answer: {reason}; `mqmk-daemon status` says whether it serves, --url names another "
            "address, and --local FOLDER asks a pool on disk"
        )


def _seconds(text: str | None) -> float:
    return min(10.0, float(text)) if text and text.isdigit() else 1.0
