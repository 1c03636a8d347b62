"""Which pictures are meant by the files and folders that somebody typed."""

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from mqmk.daemon.errors import DaemonError

SUFFIXES: Final = frozenset({".jpg", ".jpeg", ".png", ".webp"})


def pictures_of(places: Iterable[Path]) -> list[Path]:
    """Every file as typed, and of every folder the pictures in it and below, sorted; none twice."""
    found = [file for place in places for file in (pictures_below(place) if place.is_dir() else [place])]
    return list(dict.fromkeys(found))


def pictures_below(folder: Path) -> list[Path]:
    """The pictures of a folder; DaemonError if there are none. Hidden files are not meant."""
    found = [path for path in sorted(folder.rglob("*")) if path.suffix.lower() in SUFFIXES and path.is_file()]
    found = [path for path in found if not any(part.startswith(".") for part in path.relative_to(folder).parts)]
    if not found:
        raise DaemonError(f"{folder}: expected pictures ({', '.join(sorted(SUFFIXES))}), found none")
    return found


def class_folders(folder: Path) -> dict[str, list[Path]]:
    """The pictures of each class of `folder/CLASS/*`; DaemonError if there is no such folder, or an empty one."""
    folders = [path for path in sorted(folder.iterdir()) if path.is_dir() and not path.name.startswith(".")]
    if not folders:
        raise DaemonError(f"{folder}: expected a folder for each class with its pictures, {folder.name}/CLASS/*.jpg")
    return {each.name: pictures_below(each) for each in folders}
