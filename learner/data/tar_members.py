"""Which files does a tar hold? Read once, front to back, with every header checked; only a complete tar is accepted.

Links, folders, devices, odd names, compression, a missing end mark and data after it are TaskRejected with a code and
the place. An OSError of the stream is not: that is the network's fault, not the data's, and may be retried.
"""

import hashlib
import re
import tarfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Protocol, runtime_checkable

from mqmk.learner.errors import TaskRejected

BLOCK: Final = 512  # a tar is made of these
_CHUNK = 2**20
_COMPRESSED = {
    b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ\x00": "xz", b"\x28\xb5\x2f\xfd": "zstd", b"PK\x03\x04": "zip",
    b"\x04\x22\x4d\x18": "lz4", b"\x5d\x00\x00": "lzma",
}  # fmt: skip
_SIZE = re.compile(r"[0-9]{1,15}")


@dataclass(frozen=True)
class Member:
    """One file of a tar; `offset` is that of its header."""

    name: str
    offset: int
    data: bytes


@runtime_checkable
class Readable(Protocol):
    """The least a stream must do; any binary file does."""

    def read(self, count: int, /) -> bytes:
        """Up to `count` bytes, none only at the end."""


class HashingReader:
    """Reads a shard once and forwards only; knows its place and the sha256 of everything that was read."""

    def __init__(
        self, stream: Readable, shard: str, *, max_bytes: int, seconds: float, expected_bytes: int | None = None
    ) -> None:
        """`expected_bytes` is the size that a manifest gives; without one, `max_bytes` is the limit."""
        self._stream, self._shard = stream, shard
        self._max_bytes, self._too_long_code = (
            (max_bytes, "shard-too-big") if expected_bytes is None else (expected_bytes, "wrong-size")
        )
        self._seconds, self._deadline = seconds, time.monotonic() + seconds
        self._hash = hashlib.sha256()
        self.offset = 0

    @property
    def sha256(self) -> str:
        """Of the bytes up to here."""
        return self._hash.hexdigest()

    def read(self, count: int) -> bytes:
        """The next `count` bytes; fewer only at the end of the stream."""
        if time.monotonic() > self._deadline:
            raise self.rejection(
                "too-slow", f"expected to check the shard in {self._seconds:g} s; raise limits.seconds"
            )
        parts = []
        while count and (part := self._stream.read(min(count, _CHUNK))):
            parts.append(part)
            count -= len(part)
        data = b"".join(parts)
        self._hash.update(data)
        self.offset += len(data)
        if self.offset > self._max_bytes:
            raise self.rejection(self._too_long_code, f"expected at most {self._max_bytes:,} bytes, got more")
        return data

    def rejection(
        self, code: str, reason: str, member: Member | None = None, offset: int | None = None
    ) -> TaskRejected:
        """The error for this place, or for a member of the shard."""
        if member is not None:
            return TaskRejected(code, reason, self._shard, member.name, member.offset)
        return TaskRejected(code, reason, self._shard, None, self.offset if offset is None else offset)


def tar_members(source: HashingReader, *, max_files: int, max_file_bytes: int) -> Iterator[Member]:
    """The files of an uncompressed tar that is whole: regular files, plain names, an end mark, nothing after it."""
    count = 0
    while (header := _next_header(source)) is not None:
        info, offset = header
        count += 1
        _check_entry(source, info, offset, max_file_bytes)
        if count > max_files:
            raise source.rejection("too-many-members", f"expected at most {max_files:,} files", offset=offset)
        data = source.read(info.size)
        padding = source.read(-info.size % BLOCK)
        if len(data) + len(padding) < info.size + -info.size % BLOCK:
            reason = f"expected {info.size:,} bytes and padding, the shard ends after {len(data):,}; upload it again"
            raise source.rejection("truncated-tar", reason, Member(info.name, offset, b""))
        yield Member(info.name, offset, data)
    while block := source.read(_CHUNK):
        if block.count(0) != len(block):
            raise source.rejection("data-after-end", "expected nothing after the end mark of the tar, got more data")


def _next_header(source: HashingReader) -> tuple[tarfile.TarInfo, int] | None:
    """The next file's header with the long name and size that headers before it may bring; None at the end mark."""
    extra: dict[str, str] = {}
    while True:
        offset = source.offset
        block = source.read(BLOCK)
        if len(block) == BLOCK and not any(block):
            block = source.read(BLOCK)
            if len(block) == BLOCK and (any(block) or extra):
                raise source.rejection("damaged-header", "expected the second half of the end mark", offset=offset)
            if len(block) == BLOCK:
                return None
        if len(block) < BLOCK:
            raise source.rejection(
                "truncated-tar", "expected a header or the end mark, the shard ends; upload it again"
            )
        info = _parse_header(source, block, offset)
        if info.type in (tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME):
            extra |= _read_extension(source, info, offset)
            continue
        info.name = extra.get("path", info.name)
        info.size = int(extra.get("size", info.size))
        return info, offset


def _parse_header(source: HashingReader, block: bytes, offset: int) -> tarfile.TarInfo:
    kind = next((name for magic, name in _COMPRESSED.items() if block.startswith(magic)), None)
    if kind is not None and offset == 0:
        raise source.rejection("compressed-tar", f"expected a plain tar, got {kind}; unpack it once first", offset=0)
    try:
        return tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except tarfile.HeaderError as error:
        code = "damaged-header" if offset else "not-a-tar"
        raise source.rejection(code, f"expected a tar header, got {block[:16]!r}… ({error})", offset=offset) from error


def _read_extension(source: HashingReader, info: tarfile.TarInfo, offset: int) -> dict[str, str]:
    """What a pax header or GNU long name says about the next file; only its name and size are of interest."""
    if not 0 <= info.size <= 2**16:
        raise source.rejection(
            "damaged-header", f"expected a header of at most 64 KiB, got {info.size:,}", offset=offset
        )
    data = source.read(info.size + -info.size % BLOCK)[: info.size]
    try:
        fields = {"path": data.rstrip(b"\0").decode()} if info.type == tarfile.GNUTYPE_LONGNAME else _parse_pax(data)
        if any(name.startswith("GNU.sparse") for name in fields) or not _SIZE.fullmatch(fields.get("size", "0")):
            raise ValueError("a size that is not the number of bytes that follow")
        return {name: value for name, value in fields.items() if name in ("path", "size")}
    except ValueError as error:
        raise source.rejection("damaged-header", f"expected a pax header, got {error}", offset=offset) from error


def _parse_pax(data: bytes) -> dict[str, str]:
    """The records `<length> <name>=<value>\\n` of a pax header."""
    fields = {}
    while data:
        length = int(data[: data.index(b" ")])
        record, data = data[:length], data[length:]
        if length < 5 or len(record) < length or not record.endswith(b"\n"):
            raise ValueError("a record of another length than it says")
        name, _, value = record[record.index(b" ") + 1 : -1].decode().partition("=")
        fields[name] = value
    return fields


def _check_entry(source: HashingReader, info: tarfile.TarInfo, offset: int, max_file_bytes: int) -> None:
    """Refuse links, folders, devices, odd names and excessive sizes."""
    place = Member(ascii(info.name)[1:-1][:200], offset, b"")
    parts = info.name.split("/")
    if info.type in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.GNUTYPE_LONGLINK):
        raise source.rejection("link", "expected regular files only, got a link; pack the file itself", place)
    if info.type not in (tarfile.REGTYPE, tarfile.AREGTYPE):
        reason = f"expected regular files only, got an entry of type {info.type!r}; use `tar --sort=name -cf x.tar *`"
        raise source.rejection("not-a-file", reason, place)
    if ".." in parts or not parts[0] or "\\" in info.name or not info.name.isprintable() or len(info.name) > 1000:
        raise source.rejection("bad-name", "expected a relative, printable name without `..`", place)
    if not 0 <= info.size <= max_file_bytes:
        raise source.rejection("member-too-big", f"expected 0 to {max_file_bytes:,} bytes, got {info.size:,}", place)
