"""One private Ray head for a whole test session: a test that names `ray_head` runs in a process attached to it."""

import atexit
import functools
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from mqmk.daemon.processes import process
from mqmk.daemon.ray_attach import attach, detach
from mqmk.daemon.ray_command import RayHeadSettings
from mqmk.daemon.ray_head import Head, ensure_head, stop_head

__all__ = ["ray_head", "small_head"]

PREFIX = "mqmk-tests-"


def small_head(folder: Path, num_cpus: int = 2) -> RayHeadSettings:
    """What a test needs: few CPUs, the least memory that Ray accepts."""
    return RayHeadSettings(folder, num_cpus=num_cpus, num_gpus=0, object_store_memory=80_000_000)


@pytest.fixture(scope="module")
def ray_head() -> Iterator[Head]:
    """The session's head, found again if an earlier test file started it, with this process attached."""
    head = ensure_head(small_head(_session_folder()))
    attach(head)
    yield head
    detach()  # another file may attach to a head of its own


@functools.cache
def _session_folder() -> Path:
    """Ended at exit rather than by a fixture: one that two files import would be two fixtures, each ending it."""
    _sweep()
    folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    atexit.register(stop_head, folder)  # first: the last one registered runs first
    return folder


def _sweep() -> None:
    """A head outlives a killed test session too: end those that such sessions left."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        if process(int(folder.name.removeprefix(PREFIX).split("-")[0])) is None:
            stop_head(folder)
            shutil.rmtree(folder, ignore_errors=True)
