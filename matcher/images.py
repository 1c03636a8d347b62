"""From a picture to the tensor the backbone expects: JPEG, PNG or WebP only, with limits checked before decoding."""

import io
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, UInt8
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from mqmk.matcher.errors import ImageError
from mqmk.matcher.prompted_vit import BackboneInfo

FORMATS = ("JPEG", "PNG", "WEBP")
MOST_SIDE = 65_535
"""JPEG's own limit. A PNG of one pixel by millions costs gigabytes of row tables and minutes of resizing."""
LONGEST = 16
"""Times as long as wide: of a longer picture only the middle is resized. A strip of one pixel by a million would become
gigabytes while its shorter side is made as large as the backbone's input, and nearly all of them would be cut off."""
_BAND = 2**20  # pixels
_PILLOW = r"PIL\."
_filters = threading.Lock()


@dataclass(frozen=True)
class ImageLimits:
    """What a picture may cost."""

    bytes: int = 16 * 2**20
    pixels: int = 40_000_000  # the largest phone cameras; checked from the header, so a bomb is never inflated


def decode(data: bytes, limits: ImageLimits | None = None) -> Image.Image:
    """The picture as RGB, upright. Transparent parts become white paper; 16 bit grey is scaled.

    Whatever a decoder may do with a stranger's bytes is ImageError; a MemoryError is not: it is the machine's.
    """
    limits = limits or ImageLimits()
    if len(data) > limits.bytes:
        raise ImageError(f"expected at most {limits.bytes:,} bytes, got {len(data):,}")
    with _only_image_errors(data), Image.open(io.BytesIO(data), formats=FORMATS) as image:
        if image.width * image.height > limits.pixels:
            raise ImageError(f"expected at most {limits.pixels:,} pixels, got {image.width} x {image.height}")
        if max(image.size) > MOST_SIDE:
            raise ImageError(f"expected at most {MOST_SIDE:,} pixels on a side, got {image.width} x {image.height}")
        image.load()
        return _as_rgb(ImageOps.exif_transpose(image))


def pixel_count(data: bytes) -> int:
    """From the header only; 0 if it is unreadable; more than any limit for a side that is too long."""
    with suppress(ImageError), _only_image_errors(data):
        try:
            with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                return image.width * image.height if max(image.size) <= MOST_SIDE else sys.maxsize
        except Image.DecompressionBombError:
            return sys.maxsize
    return 0


@contextmanager
def _only_image_errors(data: bytes) -> Iterator[None]:
    _pass_over_remarks()
    try:
        yield
    except (ImageError, MemoryError):
        raise
    except UnidentifiedImageError as error:
        expected = "expected a JPEG, PNG or WebP picture"
        raise ImageError(f"{expected}, got {len(data):,} bytes of something else") from error
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ImageError(f"unreadable picture: {error}") from error
    except Exception as error:  # damaged metadata ends in KeyError, struct.error, ZeroDivisionError and others
        raise ImageError(f"unreadable picture: {type(error).__name__}: {error}") from error


def _pass_over_remarks() -> None:
    """Ignore Pillow's remarks on odd metadata and large sizes, whatever the filters say; a fault is raised.

    `warnings.catch_warnings` swaps the filters of the whole process: two threads that leave it in another order than
    they came would leave everybody's warnings off. This adds one filter, for Pillow only, and never takes one away.
    """
    with _filters:
        first = warnings.filters[0] if warnings.filters else None
        if not (first and first[0] == "ignore" and getattr(first[3], "pattern", None) == _PILLOW):
            warnings.filterwarnings("ignore", module=_PILLOW)


def _as_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):  # 16 bit grey: Pillow's own conversion would clip to white
        return image.convert("I").point([grey >> 8 for grey in range(2**16)], "L").convert("RGB")
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        return _on_white_paper(image)
    return image.convert("RGB")


def _on_white_paper(image: Image.Image) -> Image.Image:
    """Band by band: in one go, a picture of 40 million pixels would be held five times over."""
    paper = Image.new("RGB", image.size)
    height = max(1, _BAND // image.width)
    for top in range(0, image.height, height):
        seen = image.crop((0, top, image.width, min(image.height, top + height))).convert("RGBA")
        paper.paste(Image.alpha_composite(Image.new("RGBA", seen.size, "white"), seen).convert("RGB"), (0, top))
    return paper


def crop_to_size(image: Image.Image, info: BackboneInfo) -> Image.Image:
    """Resize the shorter side and cut out the centre, at the backbone's size."""
    image, size = _middle(image), info.image_size
    scale = round(size / info.crop) / min(image.size)
    wanted = (max(size, round(image.width * scale)), max(size, round(image.height * scale)))
    resized = image if image.size == wanted else image.resize(wanted, Image.Resampling.BICUBIC)
    left, top = (resized.width - size) // 2, (resized.height - size) // 2
    return resized.crop((left, top, left + size, top + size))


def _middle(image: Image.Image) -> Image.Image:
    most = LONGEST * min(image.size)
    if max(image.size) <= most:
        return image
    left, top = (max(0, (side - most) // 2) for side in image.size)
    return image.crop((left, top, left + min(image.width, most), top + min(image.height, most)))


def normalise(
    pixels: UInt8[Tensor, "batch 3 height width"], info: BackboneInfo
) -> Float[Tensor, "batch 3 height width"]:
    """The backbone's input."""
    mean, std = (torch.tensor(values, device=pixels.device)[:, None, None] for values in (info.mean, info.std))
    return (pixels.float() / 255 - mean) / std


def prepare(image: Image.Image, info: BackboneInfo) -> Float[Tensor, "3 height width"]:
    """The backbone's input for one picture."""
    pixels = torch.from_numpy(np.array(crop_to_size(image, info)))
    return normalise(pixels.permute(2, 0, 1)[None], info)[0]  # [h, w, 3] -> [3, h, w]
