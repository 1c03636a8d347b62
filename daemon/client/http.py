"""A small HTTP client for the service: JSON replies, and retries with backoff that honour Retry-After."""

import json
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cached_property
from http.client import HTTPException
from typing import Any, Final
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import OpenerDirector, ProxyHandler, Request, build_opener

from mqmk.daemon.errors import DaemonError
from mqmk.deploy.serving.settings import is_loopback

TIMEOUT_SECONDS: Final = 60.0
BUSY: Final = (429, 502, 503, 504)
FIRST_BACKOFF, MAX_BACKOFF = 0.25, 2.0
MAX_RETRY_AFTER: Final = 10.0


class NoReplyError(DaemonError):
    """The service cannot be reached, or its reply is not HTTP."""


@dataclass(frozen=True)
class Reply:
    """An HTTP response."""

    status: int
    body: bytes
    retry_after: float | None = None

    @property
    def document(self) -> Any:
        """The body as JSON; None if it is not JSON."""
        try:
            return json.loads(self.body)
        except ValueError:
            return None

    @property
    def error(self) -> str:
        """The error message in the body, or the start of the body."""
        document = self.document
        text = document.get("error") if isinstance(document, dict) else None
        return str(text or self.body[:200].decode(errors="replace").strip() or f"status {self.status}")


@dataclass(frozen=True)
class HttpClient:
    """Requests to one service."""

    url: str
    api_key: str | None = None
    timeout: float = TIMEOUT_SECONDS
    use_proxy: bool = True
    """The proxy of the environment; never for loopback."""
    sleep: Callable[[float], None] = time.sleep

    def get(self, path: str) -> Reply:
        """One request; NoReplyError if there is no reply."""
        return self._request(path)

    def post(
        self,
        path: str,
        body: bytes,
        content_type: str,
        retry_seconds: float,
        retry_on: Collection[int] = BUSY,
    ) -> Reply:
        """POST, and retry for a while after no reply or one of these statuses; the last reply, or NoReplyError.

        For requests that may be sent twice.
        """
        deadline, backoff = time.monotonic() + retry_seconds, FIRST_BACKOFF
        while True:
            is_last = time.monotonic() > deadline
            pause = backoff
            try:
                reply = self._request(path, body, content_type)
                if reply.status not in retry_on or is_last:
                    return reply
                pause = backoff if reply.retry_after is None else reply.retry_after
            except NoReplyError:
                if is_last:
                    raise
            self.sleep(pause)
            backoff = min(2 * backoff, MAX_BACKOFF)

    def _request(self, path: str, body: bytes | None = None, content_type: str | None = None) -> Reply:
        headers = {"Content-Type": content_type} if content_type else {}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        try:
            request = Request(self.url.rstrip("/") + path, body, headers)
            with self._opener.open(request, timeout=self.timeout) as response:
                return Reply(response.status, response.read())
        except HTTPError as error:
            with error:
                return Reply(error.code, error.read(), _seconds(error.headers.get("Retry-After")))
        except (OSError, HTTPException) as error:
            reason = error.reason if isinstance(error, URLError) else error
            raise NoReplyError(f"{self.url} does not answer: {reason}") from error

    @cached_property
    def _opener(self) -> OpenerDirector:
        direct = not self.use_proxy or is_loopback(urlsplit(self.url).hostname or "")
        return build_opener(ProxyHandler({})) if direct else build_opener()


def _seconds(text: str | None) -> float | None:
    return min(MAX_RETRY_AFTER, float(text)) if text and text.isdigit() else None
