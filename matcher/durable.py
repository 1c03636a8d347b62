"""How a file or a folder is made to survive a power cut."""

import os
from pathlib import Path


def write_file(path: Path, data: bytes) -> None:
    """Write a new file; its content is on disk when this returns, its name after `sync_folder`."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Names that were added to the folder or renamed in it are on disk when this returns."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, data: bytes) -> None:
    """Write or overwrite a file: a reader sees the old content or the new one, and the new one is on disk after."""
    part = path.with_name(f".{path.name}.part")  # one writer at a time; a leftover of a killed one is replaced
    part.unlink(missing_ok=True)
    write_file(part, data)
    part.replace(path)
    sync_folder(path.parent)
