"""One private Ray head per test session: a test that uses `ray_head` runs in a process attached to it."""

import atexit
import functools
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from mqmk.daemon.ray_runtime.attach import attach, detach
from mqmk.daemon.ray_runtime.head import Head, ensure_head, stop_head
from mqmk.daemon.ray_runtime.head_command import RayHeadSettings
from mqmk.daemon.ray_runtime.processes import process

__all__ = ["ray_head", "small_head"]

PREFIX = "mqmk-tests-"


def small_head(folder: Path, num_cpus: int = 2) -> RayHeadSettings:
    """Few CPUs and the least memory that Ray accepts."""
    return RayHeadSettings(folder, num_cpus=num_cpus, num_gpus=0, object_store_memory=80_000_000)


@pytest.fixture(scope="module")
def ray_head() -> Iterator[Head]:
    """The session's head, reused if an earlier test file started it, with this process attached."""
    head = ensure_head(small_head(_session_folder()))
    attach(head)
    yield head
    detach()  # another file may attach to its own head


@functools.cache
def _session_folder() -> Path:
    """Removed at exit rather than by a fixture: a fixture imported by two files is two fixtures, each removing it."""
    _stop_abandoned_heads()
    folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    atexit.register(stop_head, folder)  # first: the last one registered runs first
    return folder


def _stop_abandoned_heads() -> None:
    """Stop heads that killed test sessions left behind."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        if process(int(folder.name.removeprefix(PREFIX).split("-")[0])) is None:
            stop_head(folder)
            shutil.rmtree(folder, ignore_errors=True)
