"""Which processes belong to a session, and how to stop them: from /proc, so Linux only."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")


@dataclass(frozen=True)
class Process:
    """A live process; its start time tells it from a later process with the same id."""

    pid: int
    name: str
    """The program's name in the kernel, at most 15 characters."""
    session: int
    """The id of the process that started its session with setsid."""
    start_ticks: int
    """Clock ticks from boot to its start."""


def process(pid: int) -> Process | None:
    """The process with this id, or None; a zombie counts only until its last thread has exited."""
    try:
        text = (PROC / str(pid) / "stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    name = text[text.index("(") + 1 : text.rindex(")")]  # a name may itself contain parentheses and spaces
    state, *numbers = text[text.rindex(")") + 1 :].split()
    if state in "ZX" and int(numbers[16]) <= 1:
        return None
    return Process(pid, name, session=int(numbers[2]), start_ticks=int(numbers[18]))


def is_alive(found: Process) -> bool:
    """Whether this very process is still alive, and not another one with its id."""
    now = process(found.pid)
    return now is not None and now.start_ticks == found.start_ticks


def processes() -> Iterator[Process]:
    """Every live process that is visible to us."""
    for entry in PROC.iterdir():
        if entry.name.isdigit() and (found := process(int(entry.name))) is not None:
            yield found


def arguments(pid: int) -> tuple[str, ...]:
    """The command line; empty if the process is gone or belongs to another user."""
    try:
        return tuple((PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0"))
    except OSError:
        return ()


def working_folder(pid: int) -> Path | None:
    """Its working directory; None if the process is gone or belongs to another user."""
    try:
        return (PROC / str(pid) / "cwd").readlink()
    except OSError:
        return None


def stop_all(find: Callable[[], list[Process]], grace_seconds: float, kill_seconds: float = 10.0) -> list[Process]:
    """SIGTERM to all that `find` returns, SIGKILL to those left after the grace period; returns those still alive.

    Without a grace period, SIGKILL at once. `find` is called again each time: a dying parent may have started a child.
    """
    if grace_seconds > 0:
        _signal_all(find(), signal.SIGTERM)
    deadline = time.monotonic() + grace_seconds
    while (left := find()) and time.monotonic() < deadline:
        time.sleep(0.05)
    deadline = time.monotonic() + kill_seconds
    while left and time.monotonic() < deadline:
        _signal_all(left, signal.SIGKILL)
        time.sleep(0.05)
        left = find()
    return left


def _signal_all(found: list[Process], number: signal.Signals) -> None:
    for each in found:
        if is_alive(each):
            try:
                os.kill(each.pid, number)
            except ProcessLookupError:
                continue
