"""Which pictures are accepted, and what the backbone sees of them."""

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from mqmk.matcher.errors import ImageError
from mqmk.matcher.images import ImageLimits, decode, prepare
from mqmk.matcher.prompted_vit import BackboneInfo

INFO = BackboneInfo("test", "0" * 64, 32, (0.5, 0.5, 0.5), (0.25, 0.25, 0.25), crop=0.5)


def saved(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    data = io.BytesIO()
    image.save(data, kind, **options)
    return data.getvalue()


def left_red_right_blue(size: tuple[int, int] = (40, 20)) -> Image.Image:
    image = Image.new("RGB", size, "blue")
    image.paste("red", (0, 0, size[0] // 2, size[1]))
    return image


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_the_three_formats_are_read(kind):
    image = decode(saved(left_red_right_blue(), kind))
    assert (image.mode, image.size) == ("RGB", (40, 20))
    red, _, blue = image.getpixel((5, 10))
    assert red > 200
    assert blue < 60


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        (Image.new("L", (4, 4), 100), (100, 100, 100)),
        (Image.new("1", (4, 4), 1), (255, 255, 255)),
        (Image.new("RGBA", (4, 4), (255, 0, 0, 0)), (255, 255, 255)),
        (Image.new("LA", (4, 4), (0, 255)), (0, 0, 0)),
        (Image.new("P", (4, 4), 0), (0, 0, 0)),
        (Image.fromarray(np.full((4, 4), 0x8000, dtype=np.uint16)), (128, 128, 128)),
    ],
    ids=["grey", "bitmap", "transparent", "grey-alpha", "palette", "16-bit"],
)
def test_every_kind_of_pixel_becomes_rgb(image, expected):
    assert decode(saved(image)).getpixel((1, 1)) == expected


def test_cmyk_becomes_rgb():
    red, green, blue = decode(saved(Image.new("CMYK", (4, 4), (0, 255, 255, 0)), "JPEG")).getpixel((1, 1))
    assert red > 200
    assert max(green, blue) < 60


def test_a_photo_taken_sideways_is_turned_upright():
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: show it rotated by 90 degrees clockwise
    image = decode(saved(left_red_right_blue(), "JPEG", exif=exif, quality=95))
    assert image.size == (20, 40)
    assert image.getpixel((10, 5))[0] > 200  # red, once on the left, is now on top


def test_other_formats_and_garbage_are_refused():
    for data in (b"", b"hello", saved(left_red_right_blue(), "GIF"), saved(left_red_right_blue(), "BMP")):
        with pytest.raises(ImageError, match="expected a JPEG, PNG or WebP picture"):
            decode(data)


def test_a_truncated_picture_is_refused():
    with pytest.raises(ImageError, match="unreadable picture"):
        decode(saved(Image.effect_noise((64, 64), 50))[:-500])


def test_a_bomb_is_refused_from_its_header():
    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 9000, 9000, 8, 2, 0, 0, 0))
    bomb = b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")
    with pytest.raises(ImageError, match="expected at most 40,000,000 pixels, got 9000 x 9000"):
        decode(bomb)
    with pytest.raises(ImageError, match="expected at most 10 bytes, got"):
        decode(bomb, ImageLimits(bytes=10))


def test_the_centre_is_cropped_and_normalised():
    image = Image.new("RGB", (128, 64), "white")
    image.paste("black", (48, 16, 80, 48))  # exactly the centre half of the shorter side
    tensor = prepare(image, INFO)
    assert tensor.shape == (3, 32, 32)
    assert tensor.min().item() == pytest.approx(-2.0)
    assert tensor.mean().item() < -1.8
    whole = prepare(Image.new("RGB", (128, 64), "white"), INFO)
    assert whole.unique().tolist() == pytest.approx([2.0])


@pytest.mark.parametrize("size", [(1, 1), (3, 500), (500, 3)])
def test_odd_sizes_still_give_a_full_picture(size):
    assert prepare(Image.new("RGB", size), INFO).shape == (3, 32, 32)
