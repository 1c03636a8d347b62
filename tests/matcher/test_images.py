"""Which images are accepted, and what the backbone sees of them."""

import io
import random
import struct
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from mqmk.matcher.errors import ImageError
from mqmk.matcher.image_formats import EXTRA
from mqmk.matcher.images import ImageLimits, decode, pixel_count, prepare
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
        with pytest.raises(ImageError, match="expected a JPEG, PNG or WebP image"):
            decode(data)


HEIC = b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(50)
NAMED = {
    "HEIC": HEIC, "HEIC of a burst": HEIC.replace(b"ftypheic", b"ftypmsf1"), "video": HEIC[:8] + b"isom" + bytes(60),
    "GIF": saved(left_red_right_blue(), "GIF"), "BMP": saved(left_red_right_blue(), "BMP"),
    "TIFF": saved(left_red_right_blue(), "TIFF"), "AVIF": saved(left_red_right_blue(), "AVIF"),
    "JPEG XL": b"\xff\x0a" + bytes(20), "PDF": b"%PDF-1.7", "SVG": b"<svg xmlns=",
}  # fmt: skip


@pytest.mark.parametrize("what", NAMED)
def test_a_format_that_is_not_accepted_is_named_with_what_to_do(what):
    name = what.split(" of ")[0]
    with pytest.raises(ImageError, match=f"WebP image, got {name}: not supported; convert it to ") as caught:
        decode(NAMED[what])
    assert ("limits.formats" in str(caught.value)) is (name.lower() in EXTRA)


@pytest.mark.parametrize("kind", EXTRA)
def test_other_formats_are_read_where_they_are_allowed(kind):
    allowed = ImageLimits(formats=(kind,))
    image = decode(saved(left_red_right_blue(), kind.upper()), allowed)
    assert (image.mode, image.size) == ("RGB", (40, 20))
    assert image.getpixel((5, 10))[0] > 200
    assert pixel_count(saved(left_red_right_blue(), kind.upper()), (kind,)) == 800
    with pytest.raises(ImageError, match=r"expected a JPEG, PNG, WebP or \w+ image, got HEIC: not supported"):
        decode(HEIC, allowed)
    with pytest.raises(ImageError, match="expected at most 10 pixels"):
        decode(saved(left_red_right_blue(), kind.upper()), ImageLimits(pixels=10, formats=(kind,)))


def test_of_a_moving_image_the_first_frame_counts():
    frames = saved(Image.new("RGB", (9, 9), "red"), "GIF", save_all=True, append_images=[Image.new("RGB", (9, 9))])
    assert decode(frames, ImageLimits(formats=("gif",))).getpixel((4, 4)) == (255, 0, 0)


def test_a_tile_larger_than_any_image_is_never_allocated():
    tags = {256: 16, 257: 16, 258: 8, 259: 5, 262: 1, 277: 1, 322: 60_000, 323: 60_000, 324: 8, 325: 8}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    data = b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + bytes(4)
    with pytest.raises(ImageError, match="expected tiles of at most 40,000,000 pixels, got 3,600,000,000"):
        decode(data, ImageLimits(formats=("tiff",)))


def test_a_truncated_image_is_refused():
    with pytest.raises(ImageError, match="unreadable image"):
        decode(saved(Image.effect_noise((64, 64), 50))[:-500])


def png_of(width: int, height: int) -> bytes:
    """A PNG of a few bytes that claims a size."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def test_a_bomb_is_refused_from_its_header():
    bomb = png_of(9000, 9000)
    with pytest.raises(ImageError, match="expected at most 40,000,000 pixels, got 9000 x 9000"):
        decode(bomb)
    with pytest.raises(ImageError, match="expected at most 10 bytes, got"):
        decode(bomb, ImageLimits(bytes=10))


def test_a_size_that_pillow_warns_of_is_refused_by_our_limit():
    with pytest.raises(ImageError, match="expected at most 40,000,000 pixels, got 11000 x 11000"):
        decode(png_of(11000, 11000))  # warnings are errors here, and Pillow has one for this
    with pytest.raises(ImageError, match="unreadable image"):
        decode(png_of(10**5, 10**5))  # here Pillow raises by itself


def test_pixels_are_counted_from_the_header():
    assert pixel_count(saved(left_red_right_blue((40, 20)))) == 800
    assert pixel_count(png_of(11000, 11000)) == 121_000_000
    assert pixel_count(png_of(10**5, 10**5)) > 10**10
    assert pixel_count(b"hello") == pixel_count(b"") == 0


def with_metadata() -> dict[str, bytes]:
    """Images of every format, plain and with the EXIF that cameras write."""
    exif = Image.Exif()
    exif[0x0112], exif[0x010F], exif[0x011A] = 6, "a camera", 72.0
    exif.get_ifd(0x8769).update({0x829A: 0.01, 0x9003: "2026:01:01 00:00:00"})
    exif.get_ifd(0x8825).update({1: "N", 2: (52.0, 31.0, 0.0)})
    image = left_red_right_blue((12, 8))
    plain = {kind: saved(image, kind) for kind in ("JPEG", "PNG", "WEBP")}
    tagged = {f"{kind} with EXIF": saved(image, kind, exif=exif, dpi=(72, 72)) for kind in plain}
    palette = {"PNG palette": saved(image.convert("P"), transparency=0)}
    moving = {"WEBP frames": saved(image, "WEBP", save_all=True, append_images=[image.rotate(180)])}
    extra = {kind.upper(): saved(image, kind.upper()) for kind in EXTRA}
    return plain | tagged | palette | moving | extra


IMAGES = with_metadata()


def accepted_or_image_error(data: bytes) -> None:
    try:
        image = decode(data, ImageLimits(pixels=10_000, formats=EXTRA))
    except ImageError as error:
        assert str(error)  # noqa: PT017 - it may also be accepted
    else:
        assert image.mode == "RGB"
    assert pixel_count(data) >= 0


@pytest.mark.parametrize("what", IMAGES)
@settings(max_examples=100)
@given(data=st.data())
def test_damaged_images_are_decoded_or_refused_and_nothing_else(what, data):
    broken = bytearray(IMAGES[what])
    for _ in range(data.draw(st.integers(1, 4))):
        broken[data.draw(st.integers(0, len(broken) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.one_of(st.just(len(broken)), st.integers(0, len(broken))))
    accepted_or_image_error(bytes(broken[:cut]))


def repaired(png: bytes) -> bytes:
    """The PNG with the checksums of its chunks made right, so that damage reaches what lies behind them."""
    parts, place = [png[:8]], 8
    while place + 12 <= len(png):
        size = int.from_bytes(png[place : place + 4], "big")
        body = png[place + 4 : place + 8 + size]
        parts += [png[place : place + 4], body, struct.pack(">I", zlib.crc32(body))]
        place += 12 + size
    return b"".join(parts)


@pytest.mark.parametrize("what", [name for name in IMAGES if "EXIF" in name])
def test_damaged_metadata_is_no_reason_for_any_other_error(what):
    chance, whole = random.Random(0), IMAGES[what]
    start = min(place for mark in (b"MM\0*", b"II*\0") if (place := whole.find(mark)) >= 0)  # the EXIF's own header
    end = min(len(whole), start + 220)
    for _ in range(1500):
        broken = bytearray(whole)
        for _ in range(chance.randint(1, 6)):
            broken[chance.randrange(start, end)] = chance.choice((0, 1, 255, chance.randrange(256)))
        accepted_or_image_error(repaired(bytes(broken)) if "PNG" in what else bytes(broken))


def test_odd_metadata_is_passed_over_in_silence(recwarn):
    exif = b"Exif\0\0MM\0*\0\0\0\x08\0\x05\x01\x12"  # promises five entries and ends in the first
    data = saved(left_red_right_blue(), "JPEG", exif=exif)
    with pytest.warns(UserWarning, match="Corrupt EXIF data"):
        Image.open(io.BytesIO(data)).close()  # Pillow has something to say,
    for action in ("error", "always"):
        with warnings.catch_warnings():
            warnings.simplefilter(action)
            assert decode(data).size == (40, 20)  # and it is no reason to refuse the image
    assert not recwarn


def test_many_threads_decode_at_once_and_leave_the_warnings_of_others_alone():
    exif = b"Exif\0\0MM\0*\0\0\0\x08\0\x05\x01\x12"
    odd = saved(left_red_right_blue(), "JPEG", exif=exif)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with ThreadPoolExecutor(8) as threads:
            sizes = set(threads.map(lambda _: decode(odd).size, range(400)))
        assert sizes == {(40, 20)}
        with pytest.raises(UserWarning, match="somebody else's"):
            warnings.warn("somebody else's", UserWarning, stacklevel=1)


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
def test_odd_sizes_still_give_a_full_image(size):
    assert prepare(Image.new("RGB", size), INFO).shape == (3, 32, 32)


@pytest.mark.parametrize("size", [(1, 65_535), (65_535, 1), (3, 50_000)])
def test_of_a_strip_only_the_middle_is_made_larger(size):
    image = Image.new("RGB", size, "red")
    image.paste("white", (size[0] // 2 - 50, size[1] // 2 - 50, size[0] // 2 + 50, size[1] // 2 + 50))
    large = replace(INFO, image_size=224)  # resized as a whole it would be 15 million pixels long: 10 gigabytes
    assert prepare(image, large).unique().tolist() == pytest.approx([2.0], abs=1e-4)


def test_a_side_that_no_camera_has_is_refused():
    data = saved(Image.new("L", (1, 65_536)), "PNG")
    with pytest.raises(ImageError, match="expected at most 65,535 pixels on a side, got 1 x 65536"):
        decode(data)
    assert pixel_count(data) > 10**9


def test_transparency_is_the_same_in_every_band_of_a_large_image():
    paper = Image.new("RGBA", (1200, 1800), (255, 0, 0, 128))  # two bands
    assert decode(saved(paper, "PNG")).getcolors() == [(1200 * 1800, (255, 127, 127))]
