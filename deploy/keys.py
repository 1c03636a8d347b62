"""Who may ask: API keys, of which only the sha256 is kept."""

import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass
from pathlib import Path

from mqmk.deploy.errors import ServeError

_HASH = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class ApiKeys:
    """The hashes of the keys that are accepted; none at all lets everybody in."""

    hashes: tuple[str, ...] = ()

    def accept(self, key: str | None) -> bool:
        """Whether the key is one of them; the time it takes says nothing about how near it was."""
        if not self.hashes:
            return True
        own = hash_key(key or "")
        return sum(hmac.compare_digest(own, known) for known in self.hashes) > 0  # all are compared


def hash_key(key: str) -> str:
    """What the file of keys holds for a key. Keys are long and random, so one round is enough."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def new_key() -> str:
    """A key that cannot be guessed."""
    return secrets.token_urlsafe(32)


def read_keys(path: Path | None) -> ApiKeys:
    """The keys of a file: a sha256 a line, then anything; `#` begins a comment. Without a file nobody is asked."""
    if path is None:
        return ApiKeys()
    try:
        lines = [line.split() for line in path.read_text().splitlines() if line.strip() and not line.startswith("#")]
    except (OSError, UnicodeDecodeError) as error:
        raise ServeError(f"{path}: the file of API keys cannot be read: {error}") from error
    hashes = tuple(line[0].lower() for line in lines)
    if not hashes or not all(_HASH.fullmatch(found) for found in hashes):
        raise ServeError(f"{path}: expected the sha256 of one API key a line, as `printf %s KEY | sha256sum` prints it")
    return ApiKeys(hashes)
