"""Machines made of namespaces, each with its own address, processes and /tmp, that can be killed or disconnected.

`run_in_network` starts a program in a separate network; inside it, every `Machine` is connected to a bridge. Needs
root, or a kernel that allows unprivileged namespaces; `unavailable_reason` says why not.
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
"""The address of the machine that runs the program itself."""
_UNSHARE: Final = ("unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
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


def unshare_command() -> list[str]:
    """The prefix that runs a command in separate namespaces."""
    return [*_UNSHARE] if os.getuid() == 0 else [*_UNSHARE, "--user", "--map-root-user"]


def unavailable_reason() -> str | None:
    """Why namespaces cannot be used here; None if they can."""
    trial = "ip link add one type veth peer name two && ip link add both type bridge && mount -t tmpfs t /mnt"
    try:
        done = subprocess.run(
            [*unshare_command(), "sh", "-c", trial], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"namespaces are not available: {error}"
    return None if done.returncode == 0 else f"namespaces are not available: {done.stderr.strip()[-200:]}"


def run_in_network(program: Sequence[str], **options: object) -> "subprocess.Popen[str]":
    """Start a Python program with its arguments in a separate network."""
    lines = f"ip link set lo up && ip link add bridge0 type bridge && ip address add {HERE}/24 dev bridge0 && "
    lines += 'ip link set bridge0 up && exec "$@"'
    command = [*unshare_command(), "sh", "-c", lines, "sh", sys.executable, *program]
    return subprocess.Popen(command, text=True, **options)  # type: ignore[call-overload, no-any-return]


@dataclass
class Machine:
    """One machine and its program."""

    number: int
    command: Sequence[str]
    log: Path
    environment: Mapping[str, str]

    @property
    def address(self) -> str:
        return f"{NETWORK}.{self.number}"

    def start(self) -> None:
        """Start the program and connect the machine to the bridge."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*_UNSHARE, "sh", "-c", _BOOT, "sh", self.address, *self.command],
                stdout=log, stderr=log, stdin=subprocess.DEVNULL, env={**os.environ, **self.environment},
            )  # fmt: skip
        ours, theirs = Path("/proc/self/ns/net").readlink(), Path(f"/proc/{self.process.pid}/ns/net")
        while theirs.readlink() == ours:
            time.sleep(0.01)
        port = f"port{self.number}"
        for line in (
            f"link add {port} type veth peer name eth0 netns {self.process.pid}",
            f"link set {port} master bridge0 up",
        ):
            subprocess.run(["ip", *line.split()], check=True)

    def kill(self) -> None:
        """Kill every process at once; the kernel closes their connections."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def unplug(self) -> None:
        """Cut the network silently: no connection is closed."""
        subprocess.run(["ip", "link", "set", f"port{self.number}", "down"], check=True)
