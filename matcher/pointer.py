"""Which version is to be served: `pools/CURRENT`. No heavy imports: the command line and the metrics read it, too."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mqmk.matcher.errors import PoolError

POINTER: Final = "CURRENT"


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
        text = (pools / POINTER).read_text()
    except FileNotFoundError:
        return None
    try:
        fields = json.loads(text)
        return Pointer(int(fields["version"]), str(fields["digest"]))
    except (ValueError, KeyError, TypeError) as error:
        raise PoolError(f"{pools / POINTER}: expected a version and a digest, got {text[:100]!r}") from error
