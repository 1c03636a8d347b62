"""How is a picture changed so that a decoder must look twice: absurd sizes, odd chunks with true checksums, bombs."""

import io
import struct
import zlib
from collections.abc import Callable
from functools import cache
from typing import Any, Final

from mutated_bytes import Dice, damaged
from PIL import Image
from tars import picture

SIZES: Final = (
    0,
    1,
    2,
    16,
    255,
    256,
    5000,
    6324,
    6325,
    16383,
    16384,
    65535,
    65536,
    2**20,
    40_000_000,
    2**31 - 1,
    2**32 - 1,
)
KINDS: Final = ("PNG", "JPEG", "WEBP", "GIF", "TIFF", "BMP")
MODES: Final = ("L", "1", "RGB", "RGBA", "LA", "P", "I;16")
SIGNATURE: Final = b"\x89PNG\r\n\x1a\n"
Chunks = list[tuple[bytes, bytes]]


def changed(dice: Dice) -> bytes:
    """A picture that was good once, or is good and odd."""
    if dice.random() < 0.35:
        return damaged(good(dice), dice)
    return dice.choice(CHANGES)(dice)


def good(dice: Dice) -> bytes:
    """One of a few dozen."""
    return dice.choice(_some())


@cache
def _some() -> tuple[bytes, ...]:
    found = [picture(seed, kind=kind) for seed in range(3) for kind in KINDS]
    found += [_saved(Image.new(mode, (20, 30)), "PNG") for mode in MODES]
    grey = Image.radial_gradient("L").resize((40, 24))
    found += [_saved(grey, "JPEG", progressive=True), _saved(grey.convert("CMYK"), "JPEG")]
    found += [_saved(grey, "JPEG", exif=_exif(number)) for number in (1, 6, 8, 9, 65535)]
    found += [_saved(grey.convert("RGBA"), "WEBP", lossless=True), _saved(grey, "WEBP", exif=_exif(3))]
    moving = [grey.convert("RGB"), Image.new("RGB", grey.size, "red")]
    found += [_saved(moving[0], kind, save_all=True, append_images=moving[1:]) for kind in ("PNG", "WEBP", "GIF")]
    return tuple(found)


def _saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    data = io.BytesIO()
    image.save(data, kind, **options)
    return data.getvalue()


def _exif(orientation: int) -> bytes:
    return b"Exif\0\0MM\0*\0\0\0\x08" + struct.pack(">HHHIHHI", 1, 0x0112, 3, 1, orientation, 0, 0)


def chunks(data: bytes) -> Chunks:
    """The chunks of a PNG."""
    found, at = [], len(SIGNATURE)
    while at + 8 <= len(data):
        (size,) = struct.unpack_from(">I", data, at)
        found.append((data[at + 4 : at + 8], data[at + 8 : at + 8 + size]))
        at += size + 12
    return found


def png(parts: Chunks) -> bytes:
    """A PNG of these chunks, with true lengths and checksums."""
    rows = (
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in parts
    )
    return SIGNATURE + b"".join(rows)


def _png_header(dice: Dice) -> bytes:
    """Another size, depth, kind of colour or interlace than the data have."""
    parts = chunks(_some()[0])
    width, height = (dice.choice(SIZES) if dice.random() < 0.7 else 16 for _ in range(2))
    depth, colour, lace = (
        dice.choice((8, 8, 1, 2, 4, 16, 3, 0)),
        dice.choice((2, 2, 0, 3, 4, 6, 1, 255)),
        dice.randrange(3),
    )
    parts[0] = (b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, lace))
    return png(parts)


def _png_chunks(dice: Dice) -> bytes:
    """Chunks more, less, twice or in another order."""
    parts = chunks(dice.choice([data for data in _some() if data.startswith(SIGNATURE)]))
    for _ in range(dice.choice((1, 1, 2, 3))):
        at = dice.randint(0, len(parts))
        step = dice.randrange(4)
        if step == 0:
            parts[at:at] = [(dice.choice(ODD_CHUNKS), dice.choice((b"", b"x", dice.randbytes(20), _bomb(dice))))]
        elif step == 1:
            parts[at:at] = parts[at : at + 1] * dice.choice((1, 5))
        elif step == 2:
            del parts[at : at + 1]
        else:
            parts[at : at + 1] = [(kind, damaged(body, dice)) for kind, body in parts[at : at + 1]]
    return png(parts)


ODD_CHUNKS: Final = (
    b"tRNS", b"PLTE", b"iCCP", b"zTXt", b"iTXt", b"tEXt", b"eXIf", b"gAMA", b"cHRM", b"sRGB", b"pHYs", b"acTL",
    b"fcTL", b"fdAT",
    b"IDAT", b"IEND", b"IHDR", b"abcd", b"\xff\xff\xff\xff",
)  # fmt: skip


@cache
def _zeros(size: int) -> bytes:
    return zlib.compress(b"\0" * size, 9)


def _bomb(dice: Dice) -> bytes:
    """A text or profile that becomes large."""
    return dice.choice((b"a\0\0", b"icc\0\0", b"a\0\1\0\0\0")) + _zeros(dice.choice((1000, 2**26)))


def _much_data(dice: Dice) -> bytes:
    """A small picture whose data inflate to many times what it needs."""
    parts = chunks(_some()[0])
    return png([parts[0], (b"IDAT", _zeros(2 ** dice.choice((20, 27)))), (b"IEND", b"")])


def _strip(dice: Dice) -> bytes:
    """A sound picture that is one to a few pixels wide and as long as may be."""
    thin, long = dice.choice((1, 2, 3)), dice.choice((1000, 16_383, 65_500, 1_000_000, 13_000_000))
    kinds = [kind for kind, most in (("JPEG", 65_500), ("WEBP", 16_383)) if long <= most]
    size = (thin, long) if dice.random() < 0.5 else (long, thin)
    return strip(size, dice.choice([*kinds, "PNG"]))


@cache
def strip(size: tuple[int, int], kind: str) -> bytes:
    """A plain picture of that size."""
    return _saved(Image.new("L" if kind == "PNG" else "RGB", size, "white"), kind)


def _large(dice: Dice) -> bytes:
    """A sound picture of as many pixels as are allowed, or a few more."""
    return strip(dice.choice(((6324, 6324), (6325, 6325), (5000, 4000))), "PNG")


def _jpeg_size(dice: Dice) -> bytes:
    """Another size in the frame header."""
    data = bytearray(picture(0, kind="JPEG"))
    at = data.index(b"\xff\xc0")
    data[at + 5 : at + 9] = struct.pack(">HH", *(dice.choice(SIZES) & 0xFFFF for _ in range(2)))
    if dice.random() < 0.3:
        data[at + 9] = dice.randrange(256)  # components
    return bytes(data)


def _webp_size(dice: Dice) -> bytes:
    """A canvas of another size; the frames in it stay as they were."""
    moving = next(data for data in _some() if b"VP8X" in data)
    at = moving.index(b"VP8X") + 12
    sizes = b"".join(struct.pack("<I", dice.choice(SIZES) & 0xFFFFFF)[:3] for _ in range(2))
    return moving[: at - 4] + bytes([dice.randrange(256)]) + moving[at - 3 : at] + sizes + moving[at + 6 :]


CHANGES: Final[tuple[Callable[[Dice], bytes], ...]] = (
    *(_png_header,) * 6, *(_png_chunks,) * 8, *(_jpeg_size,) * 4, *(_webp_size,) * 4, *(_strip,) * 2, _large,
    _much_data,
)  # fmt: skip
