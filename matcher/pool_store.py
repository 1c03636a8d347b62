"""Where pool versions live and which one is served: `pools/<n>-<digest12>/`, and the pointer `pools/CURRENT`.

Versions are immutable; the pointer is the only thing that moves, by an atomic rename. Absent pointer: nothing has been
learned yet. Everything here may be done twice.
"""

import re
import shutil
from pathlib import Path
from typing import Protocol

from mqmk.matcher.durable import replace_file, sync_folder
from mqmk.matcher.errors import PoolError
from mqmk.matcher.pointer import POINTER, Pointer, read_pointer, written_pointer
from mqmk.matcher.pool import PromptPool
from mqmk.matcher.pool_files import PoolVersion, read_pool, write_pool
from mqmk.matcher.prompted_vit import BackboneInfo

_FOLDER = re.compile(r"([0-9]+)-([0-9a-f]{12})")
_GONE = ".gone-"

__all__ = ["Pointer", "PoolSource", "PoolStore"]


class PoolSource(Protocol):
    """What whoever serves needs of a store, wherever it is. What goes wrong is PoolError."""

    @property
    def name(self) -> str:
        """Where it is, for people."""

    def current(self) -> Pointer | None:
        """What CURRENT says; None before the first version."""

    def read(self, at: PoolVersion | Pointer, backbone: BackboneInfo | None = None) -> PromptPool:
        """The pool of a version, checked against its digest and, if given, its backbone."""


class PoolStore:
    """The folder `pools/` of a state directory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def name(self) -> str:
        """Where it is, for people."""
        return str(self.folder)

    def current(self) -> Pointer | None:
        """What CURRENT says; None before the first version."""
        return read_pointer(self.folder)

    def point_at(self, version: PoolVersion | Pointer) -> None:
        """Move CURRENT; durable when this returns."""
        self.folder.mkdir(parents=True, exist_ok=True)
        replace_file(self.folder / POINTER, written_pointer(version.version, version.digest))

    def write(self, pool: PromptPool, version: int, parent: int | None) -> PoolVersion:
        """Add a version; nothing happens if it is there."""
        return write_pool(pool, self.folder, version, parent)

    def adopt(self, candidate: Path) -> bool:
        """Move a version's folder into the store; False if it is neither here nor there."""
        final = self.folder / candidate.name
        if not final.exists():
            if not candidate.exists():
                return False
            self.folder.mkdir(parents=True, exist_ok=True)
            candidate.rename(final)
            sync_folder(self.folder)
        return True

    def read(self, at: PoolVersion | Pointer, backbone: BackboneInfo | None = None) -> PromptPool:
        """The pool of a version, checked against its digest and, if given, its backbone."""
        found, pool = read_pool(self.folder / at.folder, backbone)
        if (found.version, found.digest) != (at.version, at.digest):
            raise PoolError(f"{self.folder / at.folder}: expected digest {at.digest}, got {found.digest}")
        return pool

    def holds(self, at: PoolVersion | Pointer) -> bool:
        """Whether a version is here and sound."""
        try:
            self.read(at)
        except PoolError:
            return False
        return True

    def remove(self, version: Path) -> None:
        """Take a version's folder out of the store: it is gone at once, as a whole. `sweep` frees its space."""
        version.rename(self.folder / f"{_GONE}{version.name}")
        sync_folder(self.folder)

    def sweep(self) -> None:
        """Delete what is left of removed versions, also by somebody who was killed on the way."""
        for path in self.folder.glob(f"{_GONE}*"):
            shutil.rmtree(path, ignore_errors=True)

    def folders(self) -> dict[int, list[Path]]:
        """Every version's folders, by number, in order; more than one only after damage from outside."""
        found: dict[int, list[Path]] = {}
        for path in sorted(self.folder.iterdir()) if self.folder.is_dir() else []:
            if name := _FOLDER.fullmatch(path.name):
                found.setdefault(int(name[1]), []).append(path)
        return dict(sorted(found.items()))
