"""Which processes belong to one session, and how they are ended: what /proc tells, so Linux only."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")


@dataclass(frozen=True)
class Process:
    """A living process; its start keeps a later process with the same id apart from it."""

    pid: int
    name: str
    """The program's name as the kernel knows it, at most 15 letters."""
    session: int
    """The id of the process that started its session with setsid."""
    start_ticks: int
    """Clock ticks from boot to its start."""


def process(pid: int) -> Process | None:
    """The process with this id, or None if there is none; a zombie is none once its last thread has let go of all."""
    try:
        text = (PROC / str(pid) / "stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    name = text[text.index("(") + 1 : text.rindex(")")]  # a name may itself hold brackets and spaces
    state, *numbers = text[text.rindex(")") + 1 :].split()
    if state in "ZX" and int(numbers[16]) <= 1:
        return None
    return Process(pid, name, session=int(numbers[2]), start_ticks=int(numbers[18]))


def is_alive(found: Process) -> bool:
    """Whether this very process still lives, and not merely its number."""
    now = process(found.pid)
    return now is not None and now.start_ticks == found.start_ticks


def processes() -> Iterator[Process]:
    """Every living process that we may look at."""
    for entry in PROC.iterdir():
        if entry.name.isdigit() and (found := process(int(entry.name))) is not None:
            yield found


def arguments(pid: int) -> tuple[str, ...]:
    """The command line, empty where the process is gone or belongs to somebody else."""
    try:
        return tuple((PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0"))
    except OSError:
        return ()


def working_folder(pid: int) -> Path | None:
    """Where the process works, or None where it is gone or belongs to somebody else."""
    try:
        return (PROC / str(pid) / "cwd").readlink()
    except OSError:
        return None


def end_all(find: Callable[[], list[Process]], grace_seconds: float, kill_seconds: float = 10.0) -> list[Process]:
    """SIGTERM to all that `find` names, SIGKILL to those left after the grace; returns those that outlived even that.

    Without a grace nobody is asked. `find` is asked again each time: a dying parent may still have started a child.
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
