"""Which version is to be served: `pools/CURRENT`. No heavy imports: the command line and the metrics read it, too."""

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
    """The version that is to be served."""

    version: int
    digest: str

    @property
    def folder(self) -> str:
        """The name of its folder in the store."""
        return folder_name(self.version, self.digest)


def folder_name(version: int, digest: str) -> str:
    """How the folder of a version is called under `pools/`."""
    return f"{version}-{digest[:12]}"


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


def written_pointer(version: int, digest: str) -> bytes:
    """The content of CURRENT."""
    return (json.dumps({"version": version, "digest": digest}) + "\n").encode()
