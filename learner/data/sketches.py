"""Which human sketches the demo learns, and how they are read from the package.

Fifty classes of Google's Quick, Draw! data set (CC BY 4.0, see NOTICE), 100 drawings each, that the embedded backbone
never saw. Each class is one greyscale PNG: a contact sheet of 10 x 10 drawings of 28 px, dark ink on white paper.
Drawings 0-79 are for training, 80-99 are held out.
"""

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import numpy as np
from jaxtyping import UInt8
from PIL import Image

SIZE, SHEET, TRAINING = 28, 10, 80

TASKS: dict[str, tuple[str, ...]] = {
    "birds": ("flamingo", "owl", "parrot", "penguin", "swan"),
    "sea": ("crab", "octopus", "sea turtle", "shark", "whale"),
    "fruit": ("apple", "banana", "grapes", "pineapple", "strawberry"),
    "travel": ("bicycle", "helicopter", "hot air balloon", "sailboat", "school bus"),
    "music": ("drums", "guitar", "harp", "piano", "trumpet"),
    "kitchen": ("fork", "frying pan", "teapot", "toaster", "wine glass"),
    "clothes": ("eyeglasses", "hat", "shoe", "sock", "t-shirt"),
    "landmarks": ("The Eiffel Tower", "castle", "lighthouse", "tent", "windmill"),
    "tools": ("hammer", "key", "saw", "scissors", "umbrella"),
    "animals": ("cat", "elephant", "giraffe", "hedgehog", "rabbit"),
}
CLASSES: tuple[str, ...] = tuple(name for classes in TASKS.values() for name in classes)


@dataclass(frozen=True)
class Sketches:
    """The drawings of one class, in their fixed split."""

    training: UInt8[np.ndarray, "80 28 28"]
    held_out: UInt8[np.ndarray, "20 28 28"]


def read(name: str) -> Sketches:
    """The drawings of one demo class."""
    with files(__package__).joinpath("sketch_sheets", f"{name}.png").open("rb") as file:
        sheet = np.asarray(Image.open(file, formats=("PNG",)))
    drawings = sheet.reshape(SHEET, SIZE, SHEET, SIZE).swapaxes(1, 2).reshape(-1, SIZE, SIZE)
    return Sketches(training=drawings[:TRAINING], held_out=drawings[TRAINING:])


def as_sheet(drawings: UInt8[np.ndarray, "100 28 28"]) -> Image.Image:
    """The contact sheet that `read` reads."""
    grid = drawings.reshape(SHEET, SHEET, SIZE, SIZE).swapaxes(1, 2)
    return Image.fromarray(grid.reshape(SHEET * SIZE, SHEET * SIZE))


def write_class_folders(task: str, folder: Path, per_class: int = SHEET * SHEET) -> Path:
    """The drawings of one demo task as `folder/CLASS/<number>.png`, ready to be packed."""
    for name in TASKS[task]:
        drawn = read(name)
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number, drawing in enumerate(np.concatenate([drawn.training, drawn.held_out])[:per_class]):
            Image.fromarray(drawing).save(folder / name / f"{number:03}.png")
    return folder
