"""How is a shard changed so that a reader must look twice: headers with true checksums, odd members and pictures."""

import tarfile
from collections.abc import Callable
from typing import Final

from mutated_bytes import Dice, damaged
from mutated_images import changed as changed_image
from mutated_json import ODD
from mutated_json import changed as changed_json
from tars import GOOD, Files, files, info, picture, tar

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
Change = Callable[[Dice], bytes]


def changed(dice: Dice) -> bytes:
    """A shard that was good once."""
    if dice.random() < 0.25:
        return damaged(GOOD, dice)
    return dice.choice(CHANGES)(dice)


def _headers(dice: Dice) -> bytes:
    """Fields of some headers, with checksums that are true for them."""
    data = bytearray(GOOD)
    places = [at for at in range(0, len(data), BLOCK) if data[at + 257 : at + 262] == b"ustar"]
    for at in dice.sample(places, dice.choice((1, 1, 2, 5))):
        name, (start, size) = dice.choice(list(FIELDS.items()))
        value = {"type": _type, "size": _number, "mtime": _number, "uid": _number}.get(name, _words)(dice)
        data[at + start : at + start + size] = value[:size].ljust(size, b"\0")
        seal(data, at)
    return bytes(data)


def seal(data: bytearray, at: int) -> None:
    """Write the checksum of the header at that place."""
    data[at + 148 : at + 156] = b" " * 8
    data[at + 148 : at + 156] = b"%06o\0 " % sum(data[at : at + BLOCK])


def _type(dice: Dice) -> bytes:
    return bytes([dice.choice(TYPES)])


def _number(dice: Dice) -> bytes:
    return dice.choice(NUMBERS)


def _words(dice: Dice) -> bytes:
    return dice.choice(TEXTS + NUMBERS)


def _extended(dice: Dice) -> bytes:
    """A pax header, a GNU long name or link, or several, before a member; or before nothing."""
    at = dice.choice((0, 2 * BLOCK, len(GOOD) - len(GOOD) % BLOCK))
    blocks = b""
    for _ in range(dice.choice((1, 1, 2, 30))):
        content = dice.choice(PAX) * dice.choice((1, 1, 3)) if dice.random() < 0.7 else dice.choice(TEXTS) + b"\0"
        header = info("././@PaxHeader", dice.choice((len(content), len(content), 0, 2**16, 2**16 + 1, 10**9)))
        header.type = dice.choice((tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, b"g"))
        blocks += header.tobuf(tarfile.GNU_FORMAT) + content.ljust(-(-len(content) // BLOCK) * BLOCK, b"\0")
    return GOOD[:at] + blocks + GOOD[at:]


def _members(dice: Dice) -> bytes:
    """Members more, less, twice, in another order, with other names or contents."""
    members = files(LABELS)
    for _ in range(dice.choice((1, 1, 2, 4))):
        place = dice.randrange(len(members))
        name, data = members[place]
        members[place : place + 1] = dice.choice((
            [], [(name, data)] * 2, [(name, b"")], [(_name(dice), data)], [(name, damaged(data, dice))],
            [(name, _label(dice)), (name.replace(".cls", ".json"), _label(dice))], [(name.upper(), data)],
        ))  # fmt: skip
    if dice.random() < 0.2:
        dice.shuffle(members)
    return tar(members, format=dice.choice((tarfile.PAX_FORMAT, tarfile.GNU_FORMAT)))


def _name(dice: Dice) -> str:
    return dice.choice(TEXTS).decode("utf-8", "replace").replace("\0", "") or "x"


def _label(dice: Dice) -> bytes:
    """Instead of a class name: JSON, an index, or anything."""
    written: tuple[bytes, ...] = (
        b'{"label": "owl"}', b'{"label": 1}', b'{"label": 2}', b'{"label": -1}', b'{"label": true}', b"1", b"2", b"-1",
        b"9" * 9, b"9" * 10, b" owl \n", b"OWL", b"\xff", b"\xef\xbb\xbfowl", b"", b"o\0wl", b'{"label": 1e0}',
    )  # fmt: skip
    if dice.random() < 0.5:
        return dice.choice(written)
    return changed_json({"label": "owl"}, dice) if dice.random() < 0.5 else b'{"label": %s}' % dice.choice(ODD).encode()


def _pictures(dice: Dice) -> bytes:
    """Whole members, but pictures that a decoder must look at twice."""
    members: Files = []
    for number, label in enumerate(LABELS):
        data = changed_image(dice) if dice.random() < 0.15 else picture(number)
        members += [(f"{number:04d}.cls", label.encode()), (f"{number:04d}.{dice.choice(('png', 'jpg'))}", data)]
    return tar(members)


def _end(dice: Dice) -> bytes:
    """What stands after the last member."""
    whole = GOOD.rstrip(b"\0")
    whole = whole.ljust(-(-len(whole) // BLOCK) * BLOCK, b"\0")
    ends = (b"", b"\0" * 512, b"\0" * 1024, b"\0" * 1025, b"\0" * 1024 + b"x", b"\0" * 512 + GOOD, b"\0" * 1024 + GOOD)
    return whole + dice.choice((*ends, b"\0" * 2**20, b"\0" * 700))


def _twice(dice: Dice) -> bytes:
    """Two shards, one after the other, with or without an end mark between them."""
    return GOOD[: dice.choice((len(GOOD), GOOD.rindex(b"ustar") - 257))] + tar(files(LABELS[:2], start=50))


CHANGES: Final[tuple[Change, ...]] = (_headers, _headers, _extended, _members, _members, _pictures, _end, _twice)
