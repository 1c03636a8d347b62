"""Mutate images: absurd sizes, odd chunks with valid checksums, decompression bombs."""

import io
import struct
import zlib
from collections.abc import Callable
from functools import cache
from typing import Any, Final

from PIL import Image
from programs.fuzz.mutate_bytes import Rng, mutate_bytes
from support.shards import image_bytes

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


def mutate_image(rng: Rng) -> bytes:
    """A damaged image, or a valid but unusual one."""
    if rng.random() < 0.35:
        return mutate_bytes(pick_valid(rng), rng)
    return rng.choice(MUTATIONS)(rng)


def pick_valid(rng: Rng) -> bytes:
    """One of a few dozen valid images."""
    return rng.choice(_corpus())


@cache
def _corpus() -> tuple[bytes, ...]:
    found = [image_bytes(seed, kind=kind) for seed in range(3) for kind in KINDS]
    found += [_encode(Image.new(mode, (20, 30)), "PNG") for mode in MODES]
    grey = Image.radial_gradient("L").resize((40, 24))
    found += [_encode(grey, "JPEG", progressive=True), _encode(grey.convert("CMYK"), "JPEG")]
    found += [_encode(grey, "JPEG", exif=_exif(number)) for number in (1, 6, 8, 9, 65535)]
    found += [_encode(grey.convert("RGBA"), "WEBP", lossless=True), _encode(grey, "WEBP", exif=_exif(3))]
    moving = [grey.convert("RGB"), Image.new("RGB", grey.size, "red")]
    found += [_encode(moving[0], kind, save_all=True, append_images=moving[1:]) for kind in ("PNG", "WEBP", "GIF")]
    return tuple(found)


def _encode(image: Image.Image, kind: str, **options: Any) -> bytes:
    data = io.BytesIO()
    image.save(data, kind, **options)
    return data.getvalue()


def _exif(orientation: int) -> bytes:
    return b"Exif\0\0MM\0*\0\0\0\x08" + struct.pack(">HHHIHHI", 1, 0x0112, 3, 1, orientation, 0, 0)


def split_chunks(data: bytes) -> Chunks:
    """Split a PNG into its chunks."""
    found, at = [], len(SIGNATURE)
    while at + 8 <= len(data):
        (size,) = struct.unpack_from(">I", data, at)
        found.append((data[at + 4 : at + 8], data[at + 8 : at + 8 + size]))
        at += size + 12
    return found


def join_chunks(parts: Chunks) -> bytes:
    """A PNG of these chunks, with valid lengths and checksums."""
    rows = (
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in parts
    )
    return SIGNATURE + b"".join(rows)


def _mutate_png_header(rng: Rng) -> bytes:
    """A header whose size, depth, colour type or interlacing does not match the data."""
    parts = split_chunks(_corpus()[0])
    width, height = (rng.choice(SIZES) if rng.random() < 0.7 else 16 for _ in range(2))
    depth, colour, lace = (
        rng.choice((8, 8, 1, 2, 4, 16, 3, 0)),
        rng.choice((2, 2, 0, 3, 4, 6, 1, 255)),
        rng.randrange(3),
    )
    parts[0] = (b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, lace))
    return join_chunks(parts)


def _mutate_png_chunks(rng: Rng) -> bytes:
    """Insert, repeat, delete or damage chunks."""
    parts = split_chunks(rng.choice([data for data in _corpus() if data.startswith(SIGNATURE)]))
    for _ in range(rng.choice((1, 1, 2, 3))):
        at = rng.randint(0, len(parts))
        step = rng.randrange(4)
        if step == 0:
            parts[at:at] = [(rng.choice(ODD_CHUNKS), rng.choice((b"", b"x", rng.randbytes(20), _bomb(rng))))]
        elif step == 1:
            parts[at:at] = parts[at : at + 1] * rng.choice((1, 5))
        elif step == 2:
            del parts[at : at + 1]
        else:
            parts[at : at + 1] = [(kind, mutate_bytes(body, rng)) for kind, body in parts[at : at + 1]]
    return join_chunks(parts)


ODD_CHUNKS: Final = (
    b"tRNS", b"PLTE", b"iCCP", b"zTXt", b"iTXt", b"tEXt", b"eXIf", b"gAMA", b"cHRM", b"sRGB", b"pHYs", b"acTL",
    b"fcTL", b"fdAT",
    b"IDAT", b"IEND", b"IHDR", b"abcd", b"\xff\xff\xff\xff",
)  # fmt: skip


@cache
def _zeros(size: int) -> bytes:
    return zlib.compress(b"\0" * size, 9)


def _bomb(rng: Rng) -> bytes:
    """A text or profile that decompresses to a large size."""
    return rng.choice((b"a\0\0", b"icc\0\0", b"a\0\1\0\0\0")) + _zeros(rng.choice((1000, 2**26)))


def _oversized_data(rng: Rng) -> bytes:
    """A small image whose data inflate to many times its size."""
    parts = split_chunks(_corpus()[0])
    return join_chunks([parts[0], (b"IDAT", _zeros(2 ** rng.choice((20, 27)))), (b"IEND", b"")])


def _narrow_image(rng: Rng) -> bytes:
    """A valid image that is one to three pixels wide and up to the longest allowed."""
    thin, long = rng.choice((1, 2, 3)), rng.choice((1000, 16_383, 65_500, 1_000_000, 13_000_000))
    kinds = [kind for kind, most in (("JPEG", 65_500), ("WEBP", 16_383)) if long <= most]
    size = (thin, long) if rng.random() < 0.5 else (long, thin)
    return plain_image(size, rng.choice([*kinds, "PNG"]))


@cache
def plain_image(size: tuple[int, int], kind: str) -> bytes:
    """A blank image of that size."""
    return _encode(Image.new("L" if kind == "PNG" else "RGB", size, "white"), kind)


def _large_image(rng: Rng) -> bytes:
    """A valid image at the pixel limit, or just above it."""
    return plain_image(rng.choice(((6324, 6324), (6325, 6325), (5000, 4000))), "PNG")


def _mutate_jpeg_size(rng: Rng) -> bytes:
    """A wrong size in the frame header."""
    data = bytearray(image_bytes(0, kind="JPEG"))
    at = data.index(b"\xff\xc0")
    data[at + 5 : at + 9] = struct.pack(">HH", *(rng.choice(SIZES) & 0xFFFF for _ in range(2)))
    if rng.random() < 0.3:
        data[at + 9] = rng.randrange(256)  # components
    return bytes(data)


def _mutate_webp_size(rng: Rng) -> bytes:
    """A canvas of another size around unchanged frames."""
    moving = next(data for data in _corpus() if b"VP8X" in data)
    at = moving.index(b"VP8X") + 12
    sizes = b"".join(struct.pack("<I", rng.choice(SIZES) & 0xFFFFFF)[:3] for _ in range(2))
    return moving[: at - 4] + bytes([rng.randrange(256)]) + moving[at - 3 : at] + sizes + moving[at + 6 :]


MUTATIONS: Final[tuple[Callable[[Rng], bytes], ...]] = (
    *(_mutate_png_header,) * 6,
    *(_mutate_png_chunks,) * 8,
    *(_mutate_jpeg_size,) * 4,
    *(_mutate_webp_size,) * 4,
    *(_narrow_image,) * 2,
    _large_image,
    _oversized_data,
)
