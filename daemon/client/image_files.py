"""Which images the files and folders on a command line stand for."""

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from mqmk.daemon.errors import DaemonError

SUFFIXES: Final = frozenset({".jpg", ".jpeg", ".png", ".webp"})


def find_images(places: Iterable[Path]) -> list[Path]:
    """Files as given, and the images in and below each folder, sorted; no duplicates."""
    found = [file for place in places for file in (images_below(place) if place.is_dir() else [place])]
    return list(dict.fromkeys(found))


def images_below(folder: Path) -> list[Path]:
    """The images of a folder, without hidden ones; DaemonError if there are none."""
    found = [path for path in sorted(folder.rglob("*")) if path.suffix.lower() in SUFFIXES and path.is_file()]
    found = [path for path in found if not any(part.startswith(".") for part in path.relative_to(folder).parts)]
    if not found:
        raise DaemonError(f"{folder}: expected images ({', '.join(sorted(SUFFIXES))}), found none")
    return found


def class_folders(folder: Path) -> dict[str, list[Path]]:
    """The images of each class of `folder/CLASS/*`; DaemonError if there is no such folder, or an empty one."""
    folders = [path for path in sorted(folder.iterdir()) if path.is_dir() and not path.name.startswith(".")]
    if not folders:
        raise DaemonError(f"{folder}: expected a folder for each class with its images, {folder.name}/CLASS/*.jpg")
    return {each.name: images_below(each) for each in folders}
