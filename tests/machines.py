"""Machines made of namespaces: each has its own address, its own processes and its own /tmp, and can be lost.

`in_a_network` starts a program in a network of its own, which ends with it; there `Machine` plugs further machines into
a switch. Needs root, or a kernel that lets users make namespaces; `refusal` says why not.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

NETWORK: Final = "10.77.0"
HERE: Final = f"{NETWORK}.1"
"""The address of the machine that the program itself is on."""
_APART: Final = ("unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
_BOOT: Final = """
set -e
ip link set lo up
until ip link show eth0 >/dev/null 2>&1; do sleep 0.02; done
ip address add "$1/24" dev eth0
ip link set eth0 up
mount -t tmpfs -o mode=1777 tmpfs /tmp
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
shift
"$@" &
wait $!
"""


def apart() -> list[str]:
    """What is put before a command so that it runs in namespaces of its own."""
    return [*_APART] if os.getuid() == 0 else [*_APART, "--user", "--map-root-user"]


def refusal() -> str | None:
    """Why no machines can be made here; None if they can."""
    trial = "ip link add one type veth peer name two && ip link add both type bridge && mount -t tmpfs t /mnt"
    try:
        done = subprocess.run([*apart(), "sh", "-c", trial], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"no namespaces here: {error}"
    return None if done.returncode == 0 else f"no namespaces here: {done.stderr.strip()[-200:]}"


def in_a_network(program: Sequence[str], **choices: object) -> "subprocess.Popen[str]":
    """Start a Python program with its arguments in a network of its own."""
    lines = f"ip link set lo up && ip link add switch type bridge && ip address add {HERE}/24 dev switch && "
    lines += 'ip link set switch up && exec "$@"'
    command = [*apart(), "sh", "-c", lines, "sh", sys.executable, *program]
    return subprocess.Popen(command, text=True, **choices)  # type: ignore[call-overload, no-any-return]


@dataclass
class Machine:
    """One machine and the program that it runs."""

    number: int
    command: Sequence[str]
    log: Path
    environment: Mapping[str, str]

    @property
    def address(self) -> str:
        return f"{NETWORK}.{self.number}"

    def start(self) -> None:
        """Switch it on, and plug it in."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*_APART, "sh", "-c", _BOOT, "sh", self.address, *self.command],
                stdout=log, stderr=log, stdin=subprocess.DEVNULL, env={**os.environ, **self.environment},
            )  # fmt: skip
        ours, theirs = Path("/proc/self/ns/net").readlink(), Path(f"/proc/{self.process.pid}/ns/net")
        while theirs.readlink() == ours:
            time.sleep(0.01)
        plug = f"port{self.number}"
        for line in (
            f"link add {plug} type veth peer name eth0 netns {self.process.pid}",
            f"link set {plug} master switch up",
        ):
            subprocess.run(["ip", *line.split()], check=True)

    def kill(self) -> None:
        """Every process at once, as when its memory is gone; connections to it are closed by its kernel."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def unplug(self) -> None:
        """Nothing reaches it or comes from it any more, and nobody is told."""
        subprocess.run(["ip", "link", "set", f"port{self.number}", "down"], check=True)
