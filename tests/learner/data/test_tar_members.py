"""Reading tars: every dialect is read, and everything that is not a whole, plain tar is refused with its place."""

import bz2
import gzip
import io
import lzma
import tarfile
import time

import pytest
from support import shards as tars
from support.shards import GOOD, PNG, validate, with_members
from webdataset.tariterators import group_by_keys, tar_file_iterator

from mqmk.learner.data.shards import held_out_samples, survey_shard, training_samples
from mqmk.learner.data.tar_members import HashingReader, Member, tar_members
from mqmk.learner.data.validation import validate_task
from mqmk.learner.errors import TaskRejected
from mqmk.learner.settings import ShardLimits


def with_header_field(data, start, field):
    """The tar with bytes of its first header changed and the checksum made right again."""
    block = bytearray(data[:512])
    block[start : start + len(field)] = field
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block) + data[512:]


def pax(records, then):
    """A pax header with raw records in front of a tar."""
    header = tars.info("pax", len(records), tarfile.XHDTYPE).tobuf(tarfile.USTAR_FORMAT)
    return header + records + b"\0" * (-len(records) % 512) + then


def cut_before(name):
    """A good shard that ends where a member would begin: webdataset reads it without a word."""
    with tarfile.open(fileobj=io.BytesIO(GOOD)) as archive:
        return GOOD[: archive.getmember(name).offset]


def members(data, shard="birds-000000.tar"):
    """What the tar layer alone makes of these bytes."""
    source = HashingReader(io.BytesIO(data), shard, max_bytes=2**30, seconds=60.0)
    return list(tar_members(source, max_files=1000, max_file_bytes=2**24))


# ---- what is accepted


def test_the_files_of_a_tar_come_whole_in_order_and_with_their_place():
    with tarfile.open(fileobj=io.BytesIO(GOOD)) as archive:
        expected = [Member(file.name, file.offset, archive.extractfile(file).read()) for file in archive]
    assert members(GOOD) == expected


def test_the_reader_knows_the_hash_and_the_size_of_what_it_read():
    source = HashingReader(io.BytesIO(GOOD), "birds-000000.tar", max_bytes=len(GOOD), seconds=60.0)
    assert len(list(tar_members(source, max_files=24, max_file_bytes=2**20))) == 24
    assert (source.offset, source.sha256) == (len(GOOD), tars.shard(GOOD, 12).sha256)


@pytest.mark.parametrize("format", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_long_names_are_read_in_every_dialect_of_tar(format):
    key = "folder/" * 12 + "n" * 80
    data = with_members((f"{key}.png", PNG), (f"{key}.cls", b"owl"), format=format)
    keys = {sample.key for sample in both_sides(tars.manifest(data, samples=13), data)}
    assert key in keys


def both_sides(manifest, *datas):
    """Everything, as training and evaluation see it."""
    training = training_samples(manifest, tars.opener(*datas), seed=0, shuffle_buffer=4)
    return [*training, *held_out_samples(manifest, tars.opener(*datas))]


# ---- what is refused, each with its code, shard and member

REFUSED = {
    "no end mark": (cut_before("0006.cls"), "truncated-tar", None),
    "half a member": (GOOD[: 512 * 3 + 40], "truncated-tar", "0000.png"),
    "half a header": (GOOD[: 512 * 2 + 100], "truncated-tar", None),
    "empty file": (b"", "truncated-tar", None),
    "half an end mark": (GOOD[: len(GOOD.rstrip(b"\0")) // 512 * 512 + 1024], "truncated-tar", None),
    "gzip": (gzip.compress(GOOD), "compressed-tar", None),
    "bzip2": (bz2.compress(GOOD), "compressed-tar", None),
    "xz": (lzma.compress(GOOD), "compressed-tar", None),
    "zstd": (b"\x28\xb5\x2f\xfd" + GOOD, "compressed-tar", None),
    "not a tar": (b"hello world " * 100, "not-a-tar", None),
    "damaged second header": (GOOD[:1024] + b"\xff" * 100 + GOOD[1124:], "damaged-header", None),
    "two tars in one": (GOOD + tars.tar([("z.png", PNG), ("z.cls", b"owl")]), "data-after-end", None),
    "a lone empty block": (GOOD[:512 * 4] + b"\0" * 512 + GOOD[512 * 4 :], "damaged-header", None),
    "symbolic link": (with_members(extra=[tars.info("x.png", 0, tarfile.SYMTYPE, "/etc/passwd")]), "link", "x.png"),
    "hard link": (with_members(extra=[tars.info("x.png", 0, tarfile.LNKTYPE, "0000.png")]), "link", "x.png"),
    "folder": (with_members(extra=[tars.info("birds", 0, tarfile.DIRTYPE)]), "not-a-file", "birds"),
    "device": (with_members(extra=[tars.info("x.png", 0, tarfile.CHRTYPE)]), "not-a-file", "x.png"),
    "pipe": (with_members(extra=[tars.info("x.png", 0, tarfile.FIFOTYPE)]), "not-a-file", "x.png"),
    "sparse file": (with_header_field(GOOD, 156, b"S"), "not-a-file", "0000.cls"),
    "sparse file by pax": (pax(b"22 GNU.sparse.major=1\n", GOOD), "damaged-header", None),
    "pax of another length": (pax(b"99 path=x.png\n", GOOD), "damaged-header", None),
    "pax size of many digits": (pax(b"5013 size=" + b"9" * 5002 + b"\n", GOOD), "damaged-header", None),
    "pax header for nobody": (pax(b"14 path=x.png\n", b"\0" * 1024), "damaged-header", None),
    "endless pax header": (with_header_field(pax(b"", GOOD), 124, b"%011o\0" % 2**30), "damaged-header", None),
    "parent folder": (with_members(("a/../../x.png", PNG)), "bad-name", "a/../../x.png"),
    "absolute name": (with_members(("/etc/x.png", PNG)), "bad-name", "/etc/x.png"),
    "odd characters": (with_members(("a\n\x1b[31m.png", PNG)), "bad-name", r"a\n\x1b[31m.png"),
    "negative size": (with_header_field(GOOD, 124, b"\xff" * 11 + b"\0"), "member-too-big", "0000.cls"),
    "huge size": (with_header_field(GOOD, 124, b"%011o\0" % 2**32), "member-too-big", "0000.cls"),
    "huge size by pax": (pax(b"20 size=99999999999\n", GOOD), "member-too-big", "0000.cls"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_bad_data_is_refused_with_a_code_and_its_place(what):
    data, code, member = REFUSED[what]
    error = tars.assert_refused(data, code, member)
    with pytest.raises(TaskRejected) as refused:
        members(data)  # the tar layer needs no manifest to see it
    assert (refused.value.code, refused.value.member, refused.value.offset) == (code, member, error.offset)


def test_a_header_that_claims_a_gigabyte_is_refused_before_it_is_read():
    data = with_header_field(pax(b"", GOOD), 124, b"%011o\0" % 2**30)
    with pytest.raises(TaskRejected, match="at most 64 KiB, got 1,073,741,824"):
        survey_shard("x.tar", lambda _: io.BytesIO(data))


def test_five_of_ten_samples_of_a_truncated_shard_are_not_a_shard():
    cut = cut_before("0005.cls")
    assert len(list(group_by_keys({**f, "__url__": ""} for f in tar_file_iterator(io.BytesIO(cut))))) == 5
    with pytest.raises(TaskRejected, match="truncated-tar"):
        validate(cut, samples=5)  # even though size, hash and count of the manifest agree


def test_a_network_error_is_not_the_datas_fault():
    class Broken(io.BytesIO):
        def read(self, count=-1, /):
            raise ConnectionResetError("peer")

    with pytest.raises(ConnectionResetError):
        validate_task(tars.manifest(GOOD, samples=12), lambda _: Broken())


def test_a_shard_that_takes_too_long_is_given_up():
    class Slow(io.BytesIO):
        def read(self, count=-1, /):
            time.sleep(0.02)
            return super().read(count)

    with pytest.raises(TaskRejected, match="too-slow"):
        validate_task(tars.manifest(GOOD, samples=12), lambda _: Slow(GOOD), ShardLimits(seconds=0.05))
