"""A random crop of an image as it was before any resizing: what published training sees of a photograph."""

import math
import random
from typing import Final

from PIL import Image

TRIES: Final = 10
MAX_RATIO: Final = 4 / 3


def random_crop(image: Image.Image, size: int, least_area: float, rng: random.Random) -> Image.Image:
    """A crop of `least_area` to all of the image, 3:4 to 4:3, resized to a square: torchvision's RandomResizedCrop."""
    return image.crop(_choose_box(image.width, image.height, least_area, rng)).resize(
        (size, size), Image.Resampling.BILINEAR
    )


def _choose_box(width: int, height: int, least_area: float, rng: random.Random) -> tuple[int, int, int, int]:
    for _ in range(TRIES):
        area = width * height * rng.uniform(least_area, 1.0)
        ratio = math.exp(rng.uniform(-math.log(MAX_RATIO), math.log(MAX_RATIO)))
        across, down = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < across <= width and 0 < down <= height:
            left, top = rng.randint(0, width - across), rng.randint(0, height - down)
            return left, top, left + across, top + down
    across, down = min(width, round(height * MAX_RATIO)), min(height, round(width * MAX_RATIO))
    left, top = (width - across) // 2, (height - down) // 2  # the largest centre crop of an allowed shape
    return left, top, left + across, top + down
