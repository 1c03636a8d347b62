"""Small real shards and manifests for tests, good ones and bad ones."""

import dataclasses
import hashlib
import io
import tarfile
from collections.abc import Callable, Iterable
from typing import Any, BinaryIO

import numpy as np
import pytest
from PIL import Image

from mqmk.learner.data.manifest import Manifest, Shard
from mqmk.learner.data.validation import TaskReport, validate_task
from mqmk.learner.errors import TaskRejected

Files = list[tuple[str, bytes]]


def image_bytes(seed: int, *, size: int = 16, kind: str = "PNG") -> bytes:
    """An encoded image; another one for every seed, smooth enough to survive a resize."""
    coarse = np.random.default_rng(seed).integers(0, 256, (6, 6, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(coarse).resize((size, size), Image.Resampling.BICUBIC).save(buffer, kind)
    return buffer.getvalue()


def files(labels: Iterable[str], *, start: int = 0) -> Files:
    """The members of a shard with one image for each label."""
    members: Files = []
    for number, label in enumerate(labels, start):
        members += [(f"{number:04d}.cls", label.encode()), (f"{number:04d}.png", image_bytes(number))]
    return members


def info(name: str, size: int = 0, kind: bytes = tarfile.REGTYPE, linkname: str = "") -> tarfile.TarInfo:
    """A tar header."""
    header = tarfile.TarInfo(name)
    header.size, header.type, header.linkname = size, kind, linkname
    return header


def tar(members: Files, *, extra: Iterable[tarfile.TarInfo] = (), format: int = tarfile.PAX_FORMAT) -> bytes:
    """A real tar of these members, then of headers without data."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:", format=format) as writer:
        for name, data in members:
            writer.addfile(info(name, len(data)), io.BytesIO(data))
        for header in extra:
            writer.addfile(header)
    return buffer.getvalue()


def shard(data: bytes, samples: int, name: str = "birds-000000.tar") -> Shard:
    """What a manifest says about these bytes."""
    return Shard(name, len(data), hashlib.sha256(data).hexdigest(), samples)


def manifest(
    *datas: bytes, samples: int, classes: tuple[str, ...] = ("heron", "owl"), holdout: float = 0.2
) -> Manifest:
    """A manifest that is true for these shards, each with that many samples."""
    shards = tuple(shard(data, samples, f"birds-{number:06d}.tar") for number, data in enumerate(datas))
    return Manifest("birds", classes, shards, "2026-01-01T00:00:00Z", "manifest", holdout)


def opener(*datas: bytes) -> Callable[[str], BinaryIO]:
    """Opens birds-000000.tar and so on from memory."""
    shards = {f"birds-{number:06d}.tar": data for number, data in enumerate(datas)}

    def open_shard(name: str) -> BinaryIO:
        if name not in shards:
            raise FileNotFoundError(name)
        return io.BytesIO(shards[name])

    return open_shard


def assert_refused(data: bytes, code: str, member: str | None) -> TaskRejected:
    """Validation of a task with this shard fails with the code and names the place."""
    promised = (dataclasses.replace(shard(data, 13), bytes=max(1, len(data))),)
    with pytest.raises(TaskRejected) as refused:
        validate_task(dataclasses.replace(manifest(b"any", samples=13), shards=promised), opener(data))
    error = refused.value
    assert (error.code, error.shard, error.member) == (code, "birds-000000.tar", member)
    assert error.offset is not None
    assert error.offset <= len(data)
    assert "expected" in str(error) or "unreadable image" in str(error)
    return error


LABELS = ["heron", "owl"] * 6
GOOD = tar(files(LABELS))
PNG = image_bytes(999)


def validate(*datas: bytes, samples: int = 12, **options: Any) -> TaskReport:
    """Validate shards under a manifest that is true about their bytes."""
    return validate_task(manifest(*datas, samples=samples), opener(*datas), **options)


def with_members(*members: tuple[str, bytes], extra: Iterable[tarfile.TarInfo] = (), **options: Any) -> bytes:
    """A good shard with more at its end."""
    return tar([*files(LABELS), *members], extra=extra, **options)
