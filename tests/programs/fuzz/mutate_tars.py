"""Mutate shards: headers with valid checksums, odd members, odd images."""

import tarfile
from collections.abc import Callable
from typing import Final

from programs.fuzz.mutate_bytes import Rng, mutate_bytes
from programs.fuzz.mutate_images import mutate_image
from programs.fuzz.mutate_json import ODD_VALUES, mutate_json
from support.shards import GOOD, Files, files, image_bytes, info, tar

BLOCK: Final = 512
LABELS: Final = ("heron", "owl") * 6
FIELDS: Final = {
    "name": (0, 100), "mode": (100, 8), "uid": (108, 8), "gid": (116, 8), "size": (124, 12), "mtime": (136, 12),
    "type": (156, 1), "linkname": (157, 100), "magic": (257, 8), "uname": (265, 32), "major": (329, 8),
    "prefix": (345, 155),
}  # fmt: skip
NUMBERS: Final = (
    b"00000000000\0", b"77777777777\0", b"7777777777777777", b"-0000000001\0", b"99999999999\0", b"           \0",
    b"\x80" + b"\x00" * 10 + b"\x05", b"\x80" + b"\xff" * 11, b"\xff" * 12, b"\xff" + b"\x00" * 11, b"0x10\0", b"1_0\0",
    b"00000001000\0", b"00000100000\0", b"00100000000\0", b"00200000000\0",
)  # fmt: skip
TEXTS: Final = (
    b"../up.png", b"/etc/passwd", b"a\\b.png", b"0000.png", b"0000.PNG", b"0001.cls", b"\xff\xfe.png", b"a\nb.png",
    b".png",
    b"a", b"a.b.png", b"dir/", b"__meta__.json", b"x/__y__/z.png", b"0000.pyd", b"0000.pth", b"a//b.png", b"./0000.png",
    b"\xe2\x80\xae.png", b"x" * 99, b" .png", b"0000.jpeg", b"0000.webp", b"0000.txt", b"0000.json", b"pipe:id.png",
)  # fmt: skip
TYPES: Final = b"012345678xgLKSDVMNX\0\xff"
PAX: Final = (
    b"12 path=a.b\n", b"20 path=../../x.png\n", b"9 size=5\n", b"10 size=-5\n", b"28 size=9999999999999999999\n",
    b"11 size=1e3\n", b"99999999999999999999 path=a\n", b"-5 path=a\n", b"0 \n", b"5 a=\n", b"no length=1\n",
    b"6 a=\xff\n",
    b"22 GNU.sparse.major=1\n", b"13 path=a\0b.c\n", b"30 hdrcharset=BINARY\n", b"9" * 5000 + b" a=b\n",
    b"4_0 path=a\n",
    b"19 path=0000.png\n\n",
)  # fmt: skip
Mutation = Callable[[Rng], bytes]


def mutate_tar(rng: Rng) -> bytes:
    """A valid shard with one kind of mutation."""
    if rng.random() < 0.25:
        return mutate_bytes(GOOD, rng)
    return rng.choice(MUTATIONS)(rng)


def _mutate_headers(rng: Rng) -> bytes:
    """Change fields of some headers and update their checksums."""
    data = bytearray(GOOD)
    places = [at for at in range(0, len(data), BLOCK) if data[at + 257 : at + 262] == b"ustar"]
    for at in rng.sample(places, rng.choice((1, 1, 2, 5))):
        name, (start, size) = rng.choice(list(FIELDS.items()))
        value = {"type": _pick_type, "size": _pick_number, "mtime": _pick_number, "uid": _pick_number}.get(
            name, _pick_text
        )(rng)
        data[at + start : at + start + size] = value[:size].ljust(size, b"\0")
        write_checksum(data, at)
    return bytes(data)


def write_checksum(data: bytearray, at: int) -> None:
    """Update the checksum of the header at that offset."""
    data[at + 148 : at + 156] = b" " * 8
    data[at + 148 : at + 156] = b"%06o\0 " % sum(data[at : at + BLOCK])


def _pick_type(rng: Rng) -> bytes:
    return bytes([rng.choice(TYPES)])


def _pick_number(rng: Rng) -> bytes:
    return rng.choice(NUMBERS)


def _pick_text(rng: Rng) -> bytes:
    return rng.choice(TEXTS + NUMBERS)


def _add_extended_headers(rng: Rng) -> bytes:
    """Insert one or more pax headers or GNU long names, before a member or at the end."""
    at = rng.choice((0, 2 * BLOCK, len(GOOD) - len(GOOD) % BLOCK))
    blocks = b""
    for _ in range(rng.choice((1, 1, 2, 30))):
        content = rng.choice(PAX) * rng.choice((1, 1, 3)) if rng.random() < 0.7 else rng.choice(TEXTS) + b"\0"
        header = info("././@PaxHeader", rng.choice((len(content), len(content), 0, 2**16, 2**16 + 1, 10**9)))
        header.type = rng.choice((tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, b"g"))
        blocks += header.tobuf(tarfile.GNU_FORMAT) + content.ljust(-(-len(content) // BLOCK) * BLOCK, b"\0")
    return GOOD[:at] + blocks + GOOD[at:]


def _mutate_members(rng: Rng) -> bytes:
    """Remove, repeat, reorder, rename or damage members."""
    members = files(LABELS)
    for _ in range(rng.choice((1, 1, 2, 4))):
        place = rng.randrange(len(members))
        name, data = members[place]
        members[place : place + 1] = rng.choice((
            [], [(name, data)] * 2, [(name, b"")], [(_pick_name(rng), data)], [(name, mutate_bytes(data, rng))],
            [(name, _pick_label(rng)), (name.replace(".cls", ".json"), _pick_label(rng))], [(name.upper(), data)],
        ))  # fmt: skip
    if rng.random() < 0.2:
        rng.shuffle(members)
    return tar(members, format=rng.choice((tarfile.PAX_FORMAT, tarfile.GNU_FORMAT)))


def _pick_name(rng: Rng) -> str:
    return rng.choice(TEXTS).decode("utf-8", "replace").replace("\0", "") or "x"


def _pick_label(rng: Rng) -> bytes:
    """JSON, an index or arbitrary bytes instead of a class name."""
    odd_labels: tuple[bytes, ...] = (
        b'{"label": "owl"}', b'{"label": 1}', b'{"label": 2}', b'{"label": -1}', b'{"label": true}', b"1", b"2", b"-1",
        b"9" * 9, b"9" * 10, b" owl \n", b"OWL", b"\xff", b"\xef\xbb\xbfowl", b"", b"o\0wl", b'{"label": 1e0}',
    )  # fmt: skip
    if rng.random() < 0.5:
        return rng.choice(odd_labels)
    return (
        mutate_json({"label": "owl"}, rng) if rng.random() < 0.5 else b'{"label": %s}' % rng.choice(ODD_VALUES).encode()
    )


def _mutate_images(rng: Rng) -> bytes:
    """Intact members that contain mutated images."""
    members: Files = []
    for number, label in enumerate(LABELS):
        data = mutate_image(rng) if rng.random() < 0.15 else image_bytes(number)
        members += [(f"{number:04d}.cls", label.encode()), (f"{number:04d}.{rng.choice(('png', 'jpg'))}", data)]
    return tar(members)


def _mutate_end(rng: Rng) -> bytes:
    """Change what follows the last member."""
    whole = GOOD.rstrip(b"\0")
    whole = whole.ljust(-(-len(whole) // BLOCK) * BLOCK, b"\0")
    ends = (b"", b"\0" * 512, b"\0" * 1024, b"\0" * 1025, b"\0" * 1024 + b"x", b"\0" * 512 + GOOD, b"\0" * 1024 + GOOD)
    return whole + rng.choice((*ends, b"\0" * 2**20, b"\0" * 700))


def _concatenate_shards(rng: Rng) -> bytes:
    """Two shards in sequence, with or without an end marker between them."""
    return GOOD[: rng.choice((len(GOOD), GOOD.rindex(b"ustar") - 257))] + tar(files(LABELS[:2], start=50))


MUTATIONS: Final[tuple[Mutation, ...]] = (
    _mutate_headers,
    _mutate_headers,
    _add_extended_headers,
    _mutate_members,
    _mutate_members,
    _mutate_images,
    _mutate_end,
    _concatenate_shards,
)
