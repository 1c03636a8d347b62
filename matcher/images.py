"""From an image to the tensor the backbone expects, with limits checked before decoding.

JPEG, PNG and WebP, and others of image_formats.py where the configuration allows them.
"""

import io
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, UInt8
from PIL import Image, ImageOps, UnidentifiedImageError
from PIL.TiffImagePlugin import TILELENGTH, TILEWIDTH
from torch import Tensor

from mqmk.matcher.errors import ImageError
from mqmk.matcher.image_formats import ALWAYS, explain_refusal
from mqmk.matcher.prompted_vit import BackboneInfo

MAX_SIDE = 65_535
"""JPEG's own limit. A PNG of one pixel by millions costs gigabytes of row tables and minutes of resizing."""
MAX_ASPECT_RATIO = 16
"""Of a longer image only the middle is resized. A strip of one pixel by a million would become gigabytes while its
shorter side is scaled to the backbone's input, and the centre crop would discard nearly all of it."""
_BAND_PIXELS = 2**20
_PILLOW = r"PIL\."
_filters_lock = threading.Lock()


@dataclass(frozen=True)
class ImageLimits:
    """What an image may cost."""

    bytes: int = 16 * 2**20
    pixels: int = 40_000_000  # the largest phone cameras; checked from the header, so a bomb is never inflated
    formats: tuple[str, ...] = ()  # of image_formats.EXTRA, besides those that are always accepted


def decode(data: bytes, limits: ImageLimits | None = None) -> Image.Image:
    """The image as RGB, upright. Transparent parts become white; 16 bit grey is scaled.

    Any failure of a decoder is an ImageError, except MemoryError: that one is not the image's fault.
    """
    limits = limits or ImageLimits()
    if len(data) > limits.bytes:
        raise ImageError(f"expected at most {limits.bytes:,} bytes, got {len(data):,}")
    with _as_image_error(data, limits.formats), _open_image(data, limits.formats) as image:
        if image.width * image.height > limits.pixels:
            raise ImageError(f"expected at most {limits.pixels:,} pixels, got {image.width} x {image.height}")
        if max(image.size) > MAX_SIDE:
            raise ImageError(f"expected at most {MAX_SIDE:,} pixels on a side, got {image.width} x {image.height}")
        if _tile_pixels(image) > limits.pixels:
            raise ImageError(f"expected tiles of at most {limits.pixels:,} pixels, got {_tile_pixels(image):,}")
        image.load()
        return to_rgb(image)


def pixel_count(data: bytes, formats: Sequence[str] = ()) -> int:
    """Width x height from the header; 0 if it is unreadable, `sys.maxsize` if a side is too long."""
    with suppress(ImageError), _as_image_error(data, formats):
        try:
            with _open_image(data, formats) as image:
                return image.width * image.height if max(image.size) <= MAX_SIDE else sys.maxsize
        except Image.DecompressionBombError:
            return sys.maxsize
    return 0


def _open_image(data: bytes, formats: Sequence[str]) -> Image.Image:
    return Image.open(io.BytesIO(data), formats=[name.upper() for name in (*ALWAYS, *formats)])


def _tile_pixels(image: Image.Image) -> int:
    """The size of a TIFF's tile, which its decoder allocates however small the image is; 0 for other formats."""
    tags = getattr(image, "tag_v2", {})
    return int(tags.get(TILEWIDTH, 0)) * int(tags.get(TILELENGTH, 0))


@contextmanager
def _as_image_error(data: bytes, formats: Sequence[str]) -> Iterator[None]:
    _ignore_pillow_warnings()
    try:
        yield
    except (ImageError, MemoryError):
        raise
    except UnidentifiedImageError as error:
        raise ImageError(explain_refusal(data, formats)) from error
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ImageError(f"unreadable image: {error}") from error
    except Exception as error:  # damaged metadata ends in KeyError, struct.error, ZeroDivisionError and others
        raise ImageError(f"unreadable image: {type(error).__name__}: {error}") from error


def _ignore_pillow_warnings() -> None:
    """Ignore Pillow's warnings about odd metadata and large sizes; errors are still raised.

    `warnings.catch_warnings` swaps the filters of the whole process: two threads that leave it in another order than
    they entered would turn off all warnings. This adds one filter, for Pillow only, and never removes one.
    """
    with _filters_lock:
        first = warnings.filters[0] if warnings.filters else None
        if not (first and first[0] == "ignore" and getattr(first[3], "pattern", None) == _PILLOW):
            warnings.filterwarnings("ignore", module=_PILLOW)


def to_rgb(image: Image.Image) -> Image.Image:
    """The image as RGB, upright. Transparent parts become white; 16 bit grey is scaled."""
    return _convert_to_rgb(ImageOps.exif_transpose(image))


def _convert_to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):  # 16 bit grey: Pillow's own conversion would clip to white
        return image.convert("I").point([grey >> 8 for grey in range(2**16)], "L").convert("RGB")
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        return _composite_on_white(image)
    return image.convert("RGB")


def _composite_on_white(image: Image.Image) -> Image.Image:
    """In bands: all at once, five copies of an image of 40 million pixels would be in memory."""
    white = Image.new("RGB", image.size)
    height = max(1, _BAND_PIXELS // image.width)
    for top in range(0, image.height, height):
        seen = image.crop((0, top, image.width, min(image.height, top + height))).convert("RGBA")
        white.paste(Image.alpha_composite(Image.new("RGBA", seen.size, "white"), seen).convert("RGB"), (0, top))
    return white


def crop_to_size(image: Image.Image, info: BackboneInfo) -> Image.Image:
    """Resize the shorter side and cut out the centre, at the backbone's size."""
    image, size = _crop_to_aspect_ratio(image), info.image_size
    scale = round(size / info.crop) / min(image.size)
    wanted = (max(size, round(image.width * scale)), max(size, round(image.height * scale)))
    resized = image if image.size == wanted else image.resize(wanted, Image.Resampling.BICUBIC)
    left, top = (resized.width - size) // 2, (resized.height - size) // 2
    return resized.crop((left, top, left + size, top + size))


def _crop_to_aspect_ratio(image: Image.Image) -> Image.Image:
    longest = MAX_ASPECT_RATIO * min(image.size)
    if max(image.size) <= longest:
        return image
    left, top = (max(0, (side - longest) // 2) for side in image.size)
    return image.crop((left, top, left + min(image.width, longest), top + min(image.height, longest)))


def normalise(
    pixels: UInt8[Tensor, "batch 3 height width"], info: BackboneInfo
) -> Float[Tensor, "batch 3 height width"]:
    """The backbone's input."""
    mean, std = (torch.tensor(values, device=pixels.device)[:, None, None] for values in (info.mean, info.std))
    return (pixels.float() / 255 - mean) / std


def prepare(image: Image.Image, info: BackboneInfo) -> Float[Tensor, "3 height width"]:
    """The backbone's input for one image."""
    pixels = torch.from_numpy(np.array(crop_to_size(image, info)))
    return normalise(pixels.permute(2, 0, 1)[None], info)[0]  # [h, w, 3] -> [3, h, w]
