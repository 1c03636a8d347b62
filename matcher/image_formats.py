"""Which image format is this, by its first bytes, and what to do if it is not accepted. No heavy imports."""

from collections.abc import Sequence
from typing import Final, Literal, get_args

ExtraFormat = Literal["gif", "bmp", "tiff", "avif"]
ALWAYS: Final = ("jpeg", "png", "webp")
EXTRA: Final = get_args(ExtraFormat)
"""Formats that Pillow also reads, once the configuration allows them; of several frames the first is used."""
SUFFIXES: Final = {
    "jpeg": ("jpg", "jpeg"), "png": ("png",), "webp": ("webp",),
    "gif": ("gif",), "bmp": ("bmp",), "tiff": ("tif", "tiff"), "avif": ("avif",),
}  # fmt: skip
_NAMES = {"jpeg": "JPEG", "png": "PNG", "webp": "WebP", "gif": "GIF", "bmp": "BMP", "tiff": "TIFF", "avif": "AVIF"}
_MAGIC = {
    b"GIF8": "GIF", b"BM": "BMP", b"II*\0": "TIFF", b"MM\0*": "TIFF", b"8BPS": "PSD", b"%PDF": "PDF", b"<svg": "SVG",
    b"\xff\x0a": "JPEG XL", b"\0\0\0\x0cJXL ": "JPEG XL", b"\0\0\0\x0cjP  ": "JPEG 2000",
}  # fmt: skip
_HEIC = frozenset({b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"})
_CONVERT = {
    "HEIC": "convert it to JPEG, e.g. `heif-convert x.heic x.jpg`",
    "GIF": "convert it to PNG, e.g. `magick 'x.gif[0]' x.png`",
    "BMP": "convert it to PNG, e.g. `magick x.bmp x.png`",
    "TIFF": "convert it to PNG, e.g. `magick 'x.tiff[0]' x.png`",
    "AVIF": "convert it to JPEG, e.g. `magick x.avif x.jpg`",
}


def suffixes(formats: Sequence[str]) -> tuple[str, ...]:
    """File name suffixes of the accepted formats, without the dot."""
    return tuple(suffix for name in (*ALWAYS, *formats) for suffix in SUFFIXES[name])


def name_format(data: bytes) -> str | None:
    """The name of a format that is not accepted by default; None if it is not a common one."""
    if data[4:8] == b"ftyp":
        size = min(int.from_bytes(data[:4], "big"), 256)
        return _name_container_format({data[place : place + 4] for place in (8, *range(16, size, 4))})
    return next((name for magic, name in _MAGIC.items() if data.startswith(magic)), None)


def _name_container_format(brands: set[bytes]) -> str:
    """The format of a file in MP4's container."""
    if brands & {b"avif", b"avis"}:
        return "AVIF"
    return "HEIC" if brands & _HEIC else "video"


def explain_refusal(data: bytes, formats: Sequence[str] = ()) -> str:
    """What was expected, what came, and what to do about it."""
    *first, last = (_NAMES[name] for name in (*ALWAYS, *formats))
    expected = f"expected a {', '.join(first)} or {last} image"
    name = name_format(data)
    if name is None or name.lower() in formats:
        return f"{expected}, got {len(data):,} bytes of something else"
    advice = [_CONVERT.get(name, "convert it to JPEG or PNG")]
    advice += ["or allow it with limits.formats"] if name.lower() in EXTRA else []
    return f"{expected}, got {name}: not supported; {', '.join(advice)}"
