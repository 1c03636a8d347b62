"""Notifies a service manager (sd_notify): ready, alive, stopping. Without one, nothing happens.

manager = ServiceManager.take(os.environ)    # removes the variables, so that Ray's processes do not inherit them
manager.ready("watching s3://images")
manager.alive()                              # as often as you like: it notifies a few times per watchdog period
manager.stopping()
"""

import os
import socket
import time
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Self

MESSAGES_PER_PERIOD = 4  # one lost message must not restart the daemon


@dataclass
class ServiceManager:
    """The service manager of $NOTIFY_SOCKET, or none."""

    address: str | None = None
    period: float | None = None
    """Watchdog timeout in seconds; None without a watchdog."""
    clock: Callable[[], float] = time.monotonic
    _sent_at: float = field(default=float("-inf"), init=False)

    @classmethod
    def take(cls, environ: MutableMapping[str, str] = os.environ) -> Self:
        """As set in the environment; the watchdog's variables count only if they are for this process."""
        address = environ.pop("NOTIFY_SOCKET", "")
        period, wanted = environ.pop("WATCHDOG_USEC", ""), environ.pop("WATCHDOG_PID", "")
        watched = period.isdigit() and int(period) > 0 and wanted in ("", str(os.getpid()))
        return cls(address if address.startswith(("/", "@")) else None, int(period) / 1e6 if watched else None)

    def ready(self, status: str) -> None:
        """Everything is up; `systemctl status` shows the status."""
        self._send(f"READY=1\nSTATUS={' '.join(status.split())}")

    def alive(self) -> None:
        """The loop is running. Call it from the loop: a separate thread would stay alive when the loop hangs."""
        if self.period is not None and self.clock() - self._sent_at >= self.period / MESSAGES_PER_PERIOD:
            self._sent_at = self.clock()
            self._send("WATCHDOG=1")

    def stopping(self) -> None:
        """A signal was received."""
        self._send("STOPPING=1")

    def _send(self, text: str) -> None:
        if self.address is None:
            return
        address = f"\0{self.address[1:]}" if self.address.startswith("@") else self.address
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as line:
            try:
                line.settimeout(1.0)
                line.sendto(text.encode(), address)
            except OSError:
                return  # nobody listens any more, which is no reason to stop
