"""How are bytes damaged? Flipped, cut, spliced, repeated, with borrowed headers and with numbers at their limits."""

import random
import struct
from collections.abc import Callable
from typing import Final

Dice = random.Random
HEADERS: Final = (
    b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff\xe0\x00\x10JFIF\x00", b"RIFF\xff\xff\xff\xffWEBPVP8X", b"GIF89a",
    b"PK\x03\x04",
    b"\x1f\x8b\x08\x00", b"ustar\x0000", b"ustar  \x00", b"BZh9", b"\xfd7zXZ\x00", b"II*\x00\x08\x00\x00\x00", b"BM",
    b"\r\n--edge\r\n", b"\r\n\r\n", b"\x80\x04\x95", b"{\"schema\":1}", b"\xef\xbb\xbf", b"\x00" * 512, b"\x00" * 1024,
)  # fmt: skip
"""What begins a file of some kind, or ends a part of one."""
LIMITS: Final = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)


def damaged(data: bytes, dice: Dice) -> bytes:
    """One to four injuries, one after the other."""
    for _ in range(dice.choice((1, 1, 1, 2, 3, 4))):
        data = dice.choice(INJURIES)(data, dice)
    return data


def flip(data: bytes, dice: Dice) -> bytes:
    """A few single bits."""
    changed = bytearray(data)
    for _ in range(dice.choice((1, 1, 2, 8)) if changed else 0):
        changed[dice.randrange(len(changed))] ^= 1 << dice.randrange(8)
    return bytes(changed)


def overwrite(data: bytes, dice: Dice) -> bytes:
    """A run of random bytes in place of others."""
    at = _place(data, dice)
    noise = dice.randbytes(dice.choice((1, 2, 4, 16, 200)))
    return data[:at] + noise + data[at + len(noise) :]


def truncate(data: bytes, dice: Dice) -> bytes:
    """The end is missing, at times the beginning."""
    at = _place(data, dice)
    return data[:at] if dice.random() < 0.8 else data[at:]


def splice(data: bytes, dice: Dice) -> bytes:
    """One stretch goes where another was."""
    start, end, at = *sorted((_place(data, dice), _place(data, dice))), _place(data, dice)
    return data[:at] + data[start:end] + data[at + (end - start) * dice.randrange(2) :]


def repeat(data: bytes, dice: Dice) -> bytes:
    """A stretch comes again and again."""
    start = _place(data, dice)
    piece = data[start : start + dice.choice((1, 4, 64, 512, 2048))]
    return data[:start] + piece * dice.choice((2, 3, 10, 40)) + data[start:]


def leave_out(data: bytes, dice: Dice) -> bytes:
    """A stretch is gone."""
    at = _place(data, dice)
    return data[:at] + data[at + dice.choice((1, 2, 4, 100, 512, 1024)) :]


def borrow_header(data: bytes, dice: Dice) -> bytes:
    """The mark of another kind of file, put in or over what was there."""
    at = _place(data, dice) if dice.random() < 0.5 else 0
    mark = dice.choice(HEADERS)
    return data[:at] + mark + data[at + len(mark) * dice.randrange(2) :]


def number_at_a_limit(data: bytes, dice: Dice) -> bytes:
    """A binary number of one, two, four or eight bytes, as large or small as it can be."""
    form = dice.choice((">B", ">H", "<H", ">I", "<I", ">Q", "<Q"))
    size = struct.calcsize(form)
    number = struct.pack(form, dice.choice(LIMITS) % 256**size)
    at = _place(data, dice)
    return data[:at] + number + data[at + size :]


def wipe(data: bytes, dice: Dice) -> bytes:
    """A run of one value."""
    at, size = _place(data, dice), dice.choice((8, 64, 512, 4096))
    return data[:at] + bytes([dice.choice((0, 32, 48, 255))]) * size + data[at + size :]


def _place(data: bytes, dice: Dice) -> int:
    """Any place, the first hundred more often: there are the headers."""
    most = len(data) if dice.random() < 0.6 else min(100, len(data))
    return dice.randint(0, most)


Injury = Callable[[bytes, Dice], bytes]
INJURIES: Final[tuple[Injury, ...]] = (
    flip, overwrite, truncate, splice, repeat, leave_out, borrow_header, number_at_a_limit, wipe,
)  # fmt: skip
