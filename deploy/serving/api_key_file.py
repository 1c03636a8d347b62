"""Editing the API key file: a line `sha256  name  date` per key; comments are kept.

A new file is readable by its owner only. An existing one keeps owner and mode: a container may read it as another user.
"""

import os
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from mqmk.deploy.serving.api_keys import hash_key, is_entry, new_key, read_keys
from mqmk.deploy.serving.errors import ServeError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_SHORTEST = 8  # hex digits of a hash that stand for it


@dataclass(frozen=True)
class KeyEntry:
    """One line of the file."""

    hash: str
    name: str
    """`-` where the line has none."""
    created: str

    @classmethod
    def parse(cls, line: str) -> "KeyEntry":
        """The parts of a line; what is missing is `-`, as `sha256sum` writes it."""
        found, name, created, *_ = [*line.split(), "-", "-"]
        return cls(found.lower(), name, created)

    def matches(self, text: str) -> bool:
        """Whether the text is this key's name, or the beginning of its hash."""
        return text == self.name != "-" or (len(text) >= _SHORTEST and self.hash.startswith(text.lower()))


def list_keys(path: Path) -> list[KeyEntry]:
    """The keys of the file; ServeError where it is missing or malformed."""
    read_keys(path)
    return [KeyEntry.parse(line) for line in _lines(path) if is_entry(line)]


def add_key(path: Path, name: str) -> str:
    """Create a key, store its hash under the name, and return the key, which is stored nowhere."""
    if not _NAME.fullmatch(name):
        raise ServeError(f"expected a name of up to 64 letters, digits and . _ @ -, got {name!r}")
    known = list_keys(path) if path.exists() else []
    if any(entry.name == name for entry in known):
        raise ServeError(f"{path}: there is a key named {name}; choose another name, or revoke that one first")
    key = new_key()
    lines = _lines(path) if path.exists() else []
    _write(path, [*lines, f"{hash_key(key)}  {name}  {datetime.now(UTC):%Y-%m-%d}"])
    return key


def revoke_key(path: Path, text: str) -> KeyEntry:
    """Remove the one key that the text names: by name, or by at least 8 digits of its hash."""
    known = list_keys(path)
    meant = [entry for entry in known if entry.matches(text)]
    if len(meant) != 1:
        found = f"{len(meant)} keys are" if meant else "no key is"
        raise ServeError(f"{path}: {found} named {text!r}; `mqmk-daemon api-key list` shows names and hashes")
    if len(known) == 1:
        raise ServeError(f"{path}: {text} is the only key; create another one with `mqmk-daemon api-key new` first")
    _write(path, [line for line in _lines(path) if not (is_entry(line) and KeyEntry.parse(line) == meant[0])])
    return meant[0]


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


def _write(path: Path, lines: Iterable[str]) -> None:
    """Replace the file; readers see the old or the new one."""
    part = path.with_name(f".{path.name}.part")
    try:
        part.unlink(missing_ok=True)
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write("".join(f"{line}\n" for line in lines))
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            before = path.stat()
            with suppress(PermissionError):  # only root may give a file away
                os.chown(part, before.st_uid, before.st_gid)
            part.chmod(before.st_mode & 0o777)
        part.replace(path)
    except OSError as error:
        raise ServeError(f"{path}: the API key file cannot be written: {error.strerror}") from error
