"""What a service manager hears from the daemon."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from mqmk.daemon.host.systemd import ServiceManager


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[socket.socket]:
    """Somebody who listens as systemd does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
        line.bind(str(tmp_path / "notify"))
        line.settimeout(1)
        yield line


def environment(manager: socket.socket, **more: str) -> dict[str, str]:
    return {"NOTIFY_SOCKET": manager.getsockname(), "HOME": "/", **more}


def test_it_hears_ready_with_a_status_of_one_line_and_stopping(manager: socket.socket) -> None:
    notifier = ServiceManager.take(environment(manager))
    notifier.ready("watching\nSTOPPING=1")
    assert manager.recv(500) == b"READY=1\nSTATUS=watching STOPPING=1"
    notifier.stopping()
    assert manager.recv(500) == b"STOPPING=1"


def test_the_watchdog_hears_four_signs_of_life_in_a_period_however_often_the_loop_turns(manager: socket.socket) -> None:
    mine = environment(manager, WATCHDOG_USEC="8000000", WATCHDOG_PID=str(os.getpid()))
    notifier = ServiceManager.take(mine)
    now = [100.0]
    notifier.clock = lambda: now[0]
    for tenth in range(80):
        now[0] = 100.0 + tenth / 10
        notifier.alive()
    assert [manager.recv(500) for _ in range(4)] == [b"WATCHDOG=1"] * 4
    manager.settimeout(0)
    with pytest.raises(BlockingIOError):
        manager.recv(500)


def test_children_inherit_nothing_of_it(manager: socket.socket) -> None:
    environ = environment(manager, WATCHDOG_USEC="1", WATCHDOG_PID="1")
    ServiceManager.take(environ)
    assert environ == {"HOME": "/"}


@pytest.mark.parametrize("more", [{}, {"WATCHDOG_USEC": "x"}, {"WATCHDOG_USEC": "5", "WATCHDOG_PID": "1"}])
def test_a_watchdog_that_is_not_ours_hears_nothing(manager: socket.socket, more: dict[str, str]) -> None:
    notifier = ServiceManager.take(environment(manager, **more))
    notifier.alive()
    manager.settimeout(0)
    with pytest.raises(BlockingIOError):
        manager.recv(500)


def test_an_address_in_the_abstract_name_space_is_understood() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
        line.bind(f"\0mqmk-test-{os.getpid()}")
        line.settimeout(1)
        ServiceManager.take({"NOTIFY_SOCKET": f"@mqmk-test-{os.getpid()}"}).stopping()
        assert line.recv(500) == b"STOPPING=1"


@pytest.mark.parametrize("environ", [{}, {"NOTIFY_SOCKET": ""}, {"NOTIFY_SOCKET": "/nobody/there"}])
def test_without_a_listener_nothing_happens(environ: dict[str, str]) -> None:
    notifier = ServiceManager.take(environ)
    notifier.ready("watching")
    notifier.alive()
    notifier.stopping()
