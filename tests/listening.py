"""Where processes listen, as the kernel knows it: for tests that nothing is open to strangers."""

import os
from collections.abc import Iterable
from pathlib import Path

PROC = Path("/proc")
LOOPBACK = ("0100007F:", "0000000000000000FFFF00000100007F:", "00000000000000000000000001000000:")
"""How addresses of this machine only begin, in the kernel's hexadecimal."""


def listening(pids: Iterable[int]) -> dict[str, str]:
    """The addresses, in the kernel's hexadecimal, that these processes listen on, and the program of each."""
    owners = {}
    for pid in pids:
        program = (PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")[0]
        for descriptor in (PROC / str(pid) / "fd").iterdir():
            try:
                owners[os.readlink(descriptor)] = program
            except FileNotFoundError:
                continue
    lines = [line.split() for name in ("tcp", "tcp6") for line in (PROC / "net" / name).read_text().splitlines()[1:]]
    found = [(line[1], f"socket:[{line[9]}]") for line in lines if line[3] == "0A"]
    return {address: owners[inode] for address, inode in found if inode in owners}


def open_to_all(found: dict[str, str]) -> dict[str, str]:
    """Those that other machines could reach."""
    return {address: owner for address, owner in found.items() if not address.startswith(LOOPBACK)}


def ports_of(found: dict[str, str]) -> set[int]:
    return {int(address.rpartition(":")[2], 16) for address in found}


def family(pid: int) -> set[int]:
    """A process with its children and theirs."""
    parents = {}
    for entry in PROC.iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
    found, size = {pid}, 0
    while len(found) > size:
        size = len(found)
        found |= {child for child, parent in parents.items() if parent in found}
    return found
