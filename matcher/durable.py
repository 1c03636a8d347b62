"""Files and folders that survive a power cut."""

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path


def write_file(path: Path, data: bytes) -> None:
    """Write a new file; its content is on disk when this returns, its name after `sync_folder`."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Flush names that were added to the folder or renamed in it to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_folder(final: Path, files: Mapping[str, bytes]) -> None:
    """Write a folder of new files atomically, on disk when this returns; an existing folder is left alone."""
    if final.exists():
        return
    final.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=".part-", dir=final.parent))
    try:
        for name, data in files.items():
            write_file(part / name, data)
        sync_folder(part)
        part.chmod(0o755)
        part.rename(final)
        sync_folder(final.parent)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def replace_file(path: Path, data: bytes) -> None:
    """Write or overwrite a file: a reader sees the old content or the new one, and the new one is on disk after."""
    part = path.with_name(f".{path.name}.part")  # one writer at a time; the leftover of a killed one is replaced
    part.unlink(missing_ok=True)
    write_file(part, data)
    part.replace(path)
    sync_folder(path.parent)
