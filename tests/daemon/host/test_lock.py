"""Whoever asks at any moment learns which process is the daemon."""

import os
from pathlib import Path

import pytest

from mqmk.daemon.errors import DaemonError
from mqmk.daemon.host import lock
from mqmk.daemon.host.lock import DaemonLock, LockOwner, lock_owner


def test_the_owner_is_named_from_the_first_moment_on_and_while_more_is_written(tmp_path: Path, monkeypatch):
    found: list[LockOwner | None] = []

    def watched(name: str) -> None:
        real = getattr(os, name)

        def call(*arguments: object) -> object:
            result = real(*arguments)
            found.append(lock_owner(tmp_path))
            return result

        monkeypatch.setattr(lock.os, name, call)

    for name in ("write", "pwrite", "ftruncate"):
        watched(name)
    ours = DaemonLock(tmp_path).take()
    for url in ("http://127.0.0.1:9109/metrics", None):
        ours.write_owner(LockOwner(os.getpid(), 1.0, url))
    ours.release()
    assert found and all(owner and owner.pid == os.getpid() for owner in found)
    assert lock_owner(tmp_path) is None, "a file without a lock names nobody"


def test_a_second_daemon_is_told_who_the_first_one_is(tmp_path: Path):
    first = DaemonLock(tmp_path).take()
    with pytest.raises(DaemonError, match=f"process {os.getpid()} is already the daemon of {tmp_path}"):
        DaemonLock(tmp_path).take()
    first.release()
    DaemonLock(tmp_path).take().release()
