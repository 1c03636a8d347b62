"""Which version to serve: `pools/CURRENT`. No heavy imports: the command line and the metrics read it, too."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mqmk.matcher.errors import PoolError

POINTER: Final = "CURRENT"
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Pointer:
    """The version to serve."""

    version: int
    digest: str

    @property
    def card(self) -> str:
        """The name of its card under `pools/versions/`."""
        return card_name(self.version, self.digest)


def version_name(version: int, digest: str) -> str:
    """The short name of a version: its number and the first 12 digits of its digest."""
    return f"{version}-{digest[:12]}"


def card_name(version: int, digest: str) -> str:
    """The name of a version's card under `pools/versions/`."""
    return f"{version_name(version, digest)}.json"


def read_pointer(pools: Path) -> Pointer | None:
    """What CURRENT says; None before the first version."""
    try:
        return parse_pointer((pools / POINTER).read_bytes(), str(pools / POINTER))
    except FileNotFoundError:
        return None


def parse_pointer(data: bytes, name: str) -> Pointer:
    """What the content of CURRENT says."""
    try:
        fields = json.loads(data)
        found = Pointer(int(fields["version"]), str(fields["digest"]))
        if not _DIGEST.fullmatch(found.digest):  # part of it becomes the name of a folder
            raise ValueError(found.digest)
        return found
    except (ValueError, KeyError, TypeError) as error:
        shown = data[:100].decode(errors="replace")
        raise PoolError(f"{name}: expected a version and a digest, got {shown!r}") from error


def encode_pointer(version: int, digest: str) -> bytes:
    """The content of CURRENT."""
    return (json.dumps({"version": version, "digest": digest}) + "\n").encode()
