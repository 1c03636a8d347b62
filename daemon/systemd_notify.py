"""What a service manager is told: ready, alive, stopping. Where none listens, nothing happens (sd_notify's protocol).

manager = ServiceManager.take(os.environ)    # takes the variables out, so that Ray's processes do not inherit them
manager.ready("watching s3://pictures")
manager.alive()                              # as often as you like: it speaks a few times in each watchdog period
manager.stopping()
"""

import os
import socket
import time
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Self

SPEAKS_PER_PERIOD = 4  # one lost message must not end the daemon


@dataclass
class ServiceManager:
    """Whoever started us with $NOTIFY_SOCKET, or nobody."""

    address: str | None = None
    period: float | None = None
    """Seconds of silence after which it ends us; None does not watch."""
    clock: Callable[[], float] = time.monotonic
    _spoke_at: float = field(default=float("-inf"), init=False)

    @classmethod
    def take(cls, environ: MutableMapping[str, str] = os.environ) -> Self:
        """What the environment says; the watchdog's variables count only if they are meant for this process."""
        address = environ.pop("NOTIFY_SOCKET", "")
        period, wanted = environ.pop("WATCHDOG_USEC", ""), environ.pop("WATCHDOG_PID", "")
        watched = period.isdigit() and int(period) > 0 and wanted in ("", str(os.getpid()))
        return cls(address if address.startswith(("/", "@")) else None, int(period) / 1e6 if watched else None)

    def ready(self, status: str) -> None:
        """Everything is up; the status is what `systemctl status` shows."""
        self._say(f"READY=1\nSTATUS={' '.join(status.split())}")

    def alive(self) -> None:
        """The loop comes round. Call it from the loop: a thread of its own would be alive when the loop is not."""
        if self.period is not None and self.clock() - self._spoke_at >= self.period / SPEAKS_PER_PERIOD:
            self._spoke_at = self.clock()
            self._say("WATCHDOG=1")

    def stopping(self) -> None:
        """A signal was taken."""
        self._say("STOPPING=1")

    def _say(self, text: str) -> None:
        if self.address is None:
            return
        address = f"\0{self.address[1:]}" if self.address.startswith("@") else self.address
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as line:
            try:
                line.settimeout(1.0)
                line.sendto(text.encode(), address)
            except OSError:
                return  # nobody listens any more, which is no reason to end
