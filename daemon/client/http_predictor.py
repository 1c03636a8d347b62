"""Predictions of a running service: several requests at a time, one image in each."""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode, urlsplit

from mqmk.daemon.client.http import HttpClient, NoReplyError, Reply
from mqmk.daemon.client.predictor import PredictionResult, PredictOptions
from mqmk.daemon.config.load import API_KEY_VARIABLE
from mqmk.daemon.errors import DaemonError

CONCURRENCY: Final = 8
RETRY_SECONDS: Final = 30.0
"""How long one image is retried while the service is busy or briefly unreachable."""
UNAUTHORIZED: Final = 401
_FIRST_PAGE: Final = "?limit=1000"
_TRIES: Final = 5


@dataclass(frozen=True)
class HttpPredictor:
    """The pool behind a URL."""

    client: HttpClient
    options: PredictOptions = field(default_factory=PredictOptions)
    retry_seconds: float = RETRY_SECONDS

    def __post_init__(self) -> None:
        parts = urlsplit(self.client.url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise DaemonError(f"--url: expected a URL such as http://127.0.0.1:8000, got {self.client.url!r}")

    @property
    def place(self) -> str:
        return self.client.url

    def tasks(self) -> Mapping[str, Sequence[str]]:
        for _ in range(_TRIES):
            pages = [self._pool_page(_FIRST_PAGE)]
            while query := pages[-1].get("next"):  # which an earlier release does not send: it has one page
                pages.append(self._pool_page(query))
            if len({page["digest"] for page in pages}) == 1:
                return {task["name"]: task["classes"] for page in pages for task in page["tasks"]}
        raise DaemonError(f"{self.place}/pool: its pages came from different versions, {_TRIES} times; try again")

    def predict(self, files: Sequence[Path]) -> Iterator[PredictionResult]:
        ready = self._get("/v2/health/ready")
        if ready.status != 200:
            raise DaemonError(f"{self.place} is not ready: {ready.error}")
        with ThreadPoolExecutor(min(CONCURRENCY, len(files) or 1)) as threads:
            yield from threads.map(self.predict_file, files)

    def predict_file(self, file: Path) -> PredictionResult:
        """The result for one file; DaemonError if the service cannot be reached."""
        try:
            image = file.read_bytes()
        except OSError as error:
            return PredictionResult(file, error=str(error.strerror))
        reply = self._post(image)
        if reply.status != 200:
            return PredictionResult(file, error=f"{reply.status}: {reply.error}")
        return PredictionResult(file, answer=reply.document)

    @cached_property
    def _path(self) -> str:
        chosen = {"matcher": self.options.matcher, "top_k": self.options.top_k}
        return "/predict?" + urlencode({name: value for name, value in chosen.items() if value is not None})

    def _pool_page(self, query: str) -> Mapping[str, Any]:
        reply = self._get(f"/pool{query}")
        if reply.status != 200:
            raise DaemonError(f"{self.place}/pool: expected the tasks of the pool, got {reply.status}: {reply.error}")
        return reply.document

    def _get(self, path: str) -> Reply:
        try:
            return self._authorized(self.client.get(path))
        except NoReplyError as error:
            raise _with_advice(error) from error

    def _post(self, image: bytes) -> Reply:
        try:
            return self._authorized(self.client.post(self._path, image, "application/octet-stream", self.retry_seconds))
        except NoReplyError as error:
            raise _with_advice(error) from error

    def _authorized(self, reply: Reply) -> Reply:
        if reply.status == UNAUTHORIZED:
            raise DaemonError(f"{self.place}: {reply.error}; set {API_KEY_VARIABLE} to an API key of the service")
        return reply


def _with_advice(error: NoReplyError) -> DaemonError:
    return DaemonError(
        f"{error}; `mqmk-daemon status` shows whether it is serving, --url chooses another service, and "
        "--local FOLDER uses a pool on disk"
    )
