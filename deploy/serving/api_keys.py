"""API keys, of which only the sha256 is stored. The file is reloaded when it changes."""

import hashlib
import hmac
import logging
import re
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from mqmk.deploy.serving.errors import ServeError

log = logging.getLogger(__name__)
_HASH = re.compile(r"[0-9a-f]{64}")
_TO_DO: Final = "`mqmk-daemon api-key new NAME` makes a key"
CHECK_SECONDS: Final = 1.0
"""How often the file is checked for changes, at most."""

Stamp = tuple[int, int, int]


class AcceptsKeys(Protocol):
    """Accepts or rejects API keys."""

    def accept(self, key: str | None) -> bool:
        """Whether a request with this key is allowed."""


@dataclass(frozen=True)
class ApiKeys:
    """The hashes of the accepted keys; an empty set accepts every request."""

    hashes: tuple[str, ...] = ()

    def accept(self, key: str | None) -> bool:
        """Whether the key is one of them, in constant time."""
        if not self.hashes:
            return True
        own = hash_key(key or "")
        return sum(hmac.compare_digest(own, known) for known in self.hashes) > 0  # all are compared

    @property
    def digest(self) -> str:
        """Changes with the set of keys, not with comments or their order."""
        return hashlib.sha256("\n".join(sorted(set(self.hashes))).encode()).hexdigest()[:16]


@dataclass
class KeyFile:
    """The keys of a file; a change takes effect within `CHECK_SECONDS`.

    A file that becomes missing or malformed changes nothing: the last valid keys stay, and the log says why.
    """

    path: Path
    clock: Callable[[], float] = time.monotonic
    _keys: ApiKeys = field(init=False)
    _stamp: Stamp | None = field(init=False)
    _checked_at: float = field(init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._stamp, self._checked_at = _stamp(self.path), self.clock()
        self._keys = read_keys(self.path)

    def accept(self, key: str | None) -> bool:
        """Whether the key is in the file as it is now."""
        self._follow()
        return self._keys.accept(key)

    def _follow(self) -> None:
        with self._lock:
            now = self.clock()
            if now - self._checked_at < CHECK_SECONDS:
                return
            self._checked_at, stamp = now, _stamp(self.path)
            if stamp != self._stamp:
                self._stamp = stamp
                self._read()

    def _read(self) -> None:
        try:
            self._keys = read_keys(self.path)
        except ServeError as error:
            log.error(f"{error}; keeping the previous keys", extra={"event": "api_keys.rejected"})
        else:
            log.info(f"{self.path}: {len(self._keys.hashes)} API keys", extra={"event": "api_keys.reloaded"})


def hash_key(key: str) -> str:
    """The line of a key in the file. Keys are long and random, so one round is enough."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def new_key() -> str:
    """A key that cannot be guessed."""
    return secrets.token_urlsafe(32)


def read_keys(path: Path | None) -> ApiKeys:
    """The keys of a file: a sha256 per line, the rest is ignored; `#` starts a comment. No file: no key is required."""
    if path is None:
        return ApiKeys()
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ServeError(f"{path}: the API key file cannot be read: {error}; {_TO_DO}") from error
    found = [(number, line.split()[0].lower()) for number, line in enumerate(lines, 1) if is_entry(line)]
    wrong = next((f"line {number} is something else" for number, text in found if not _HASH.fullmatch(text)), None)
    if wrong or not found:
        raise ServeError(f"{path}: expected the sha256 of one API key per line; {wrong or 'there is none'}; {_TO_DO}")
    return ApiKeys(tuple(text for _, text in found))


def open_keys(path: Path | None) -> AcceptsKeys:
    """The keys of a file, reloaded on change; without a file every request is accepted."""
    return ApiKeys() if path is None else KeyFile(path)


def is_entry(line: str) -> bool:
    """Whether a line of the file is neither empty nor a comment."""
    return bool(line.strip()) and not line.startswith("#")


def _stamp(path: Path) -> Stamp | None:
    """Changes with the file; None if there is none. Has the inode, because mounted secrets are swapped by a link.

    Not the modification time: tools that copy set it back, and a file that could not be read keeps it when its mode
    is mended.
    """
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ctime_ns, found.st_ino, found.st_size
