"""Mutate bytes: flip, truncate, splice and repeat them, insert foreign headers and limit values."""

import random
import struct
from collections.abc import Callable
from typing import Final

Rng = random.Random
HEADERS: Final = (
    b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff\xe0\x00\x10JFIF\x00", b"RIFF\xff\xff\xff\xffWEBPVP8X", b"GIF89a",
    b"PK\x03\x04",
    b"\x1f\x8b\x08\x00", b"ustar\x0000", b"ustar  \x00", b"BZh9", b"\xfd7zXZ\x00", b"II*\x00\x08\x00\x00\x00", b"BM",
    b"\r\n--edge\r\n", b"\r\n\r\n", b"\x80\x04\x95", b"{\"schema\":1}", b"\xef\xbb\xbf", b"\x00" * 512, b"\x00" * 1024,
)  # fmt: skip
"""Magic numbers and separators of common formats."""
LIMITS: Final = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)


def mutate_bytes(data: bytes, rng: Rng) -> bytes:
    """Apply one to four mutations in sequence."""
    for _ in range(rng.choice((1, 1, 1, 2, 3, 4))):
        data = rng.choice(MUTATIONS)(data, rng)
    return data


def flip(data: bytes, rng: Rng) -> bytes:
    """Flip a few single bits."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8)) if changed else 0):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def overwrite(data: bytes, rng: Rng) -> bytes:
    """Overwrite a run with random bytes."""
    at = _pick_offset(data, rng)
    noise = rng.randbytes(rng.choice((1, 2, 4, 16, 200)))
    return data[:at] + noise + data[at + len(noise) :]


def truncate(data: bytes, rng: Rng) -> bytes:
    """Cut off the end, sometimes the beginning."""
    at = _pick_offset(data, rng)
    return data[:at] if rng.random() < 0.8 else data[at:]


def splice(data: bytes, rng: Rng) -> bytes:
    """Copy one run over or into another place."""
    start, end, at = *sorted((_pick_offset(data, rng), _pick_offset(data, rng))), _pick_offset(data, rng)
    return data[:at] + data[start:end] + data[at + (end - start) * rng.randrange(2) :]


def repeat(data: bytes, rng: Rng) -> bytes:
    """Repeat a run several times."""
    start = _pick_offset(data, rng)
    piece = data[start : start + rng.choice((1, 4, 64, 512, 2048))]
    return data[:start] + piece * rng.choice((2, 3, 10, 40)) + data[start:]


def delete_run(data: bytes, rng: Rng) -> bytes:
    """Delete a run."""
    at = _pick_offset(data, rng)
    return data[:at] + data[at + rng.choice((1, 2, 4, 100, 512, 1024)) :]


def borrow_header(data: bytes, rng: Rng) -> bytes:
    """Insert the magic number of another format, or overwrite with it."""
    at = _pick_offset(data, rng) if rng.random() < 0.5 else 0
    mark = rng.choice(HEADERS)
    return data[:at] + mark + data[at + len(mark) * rng.randrange(2) :]


def write_limit_value(data: bytes, rng: Rng) -> bytes:
    """Write a binary integer of one to eight bytes at the limit of its range."""
    form = rng.choice((">B", ">H", "<H", ">I", "<I", ">Q", "<Q"))
    size = struct.calcsize(form)
    number = struct.pack(form, rng.choice(LIMITS) % 256**size)
    at = _pick_offset(data, rng)
    return data[:at] + number + data[at + size :]


def wipe(data: bytes, rng: Rng) -> bytes:
    """Fill a run with one value."""
    at, size = _pick_offset(data, rng), rng.choice((8, 64, 512, 4096))
    return data[:at] + bytes([rng.choice((0, 32, 48, 255))]) * size + data[at + size :]


def _pick_offset(data: bytes, rng: Rng) -> int:
    """Any offset; the first hundred bytes more often, because headers are there."""
    most = len(data) if rng.random() < 0.6 else min(100, len(data))
    return rng.randint(0, most)


Mutation = Callable[[bytes, Rng], bytes]
MUTATIONS: Final[tuple[Mutation, ...]] = (
    flip, overwrite, truncate, splice, repeat, delete_run, borrow_header, write_limit_value, wipe,
)  # fmt: skip
