"""How a daemon starts and stops: what it starts, what it announces when ready, and what keeps serving without it."""

import logging
import shlex
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final, Protocol

from mqmk.daemon.config.sections import Config
from mqmk.daemon.ledger.ledger import Ledger
from mqmk.daemon.logs import event
from mqmk.daemon.ray_runtime.head import find_head, stop_head
from mqmk.daemon.ray_runtime.processes import is_alive
from mqmk.daemon.redaction import redact
from mqmk.daemon.status.snapshot import Snapshot

log = logging.getLogger(__name__)
READY_SECONDS: Final = 120.0
"""How long to wait for the first replica before announcing its address anyway."""
POLL_SECONDS: Final = 0.5


class Startable(Protocol):
    """What the daemon runs on: Ray, or nothing."""

    def start(self) -> None:
        """Start it, or connect to it."""

    def stop(self) -> None:
        """Disconnect; serving may continue."""


def start_or_undo(runtime: Startable, config: Config) -> None:
    """Start Ray and what runs on it; if that fails, stop a Ray head that was not running before."""
    head = find_head(config.ray_folder)
    ran_before = head is not None and is_alive(head.leader)
    with ExitStack() as undo:
        if config.ray.address == "local" and not ran_before:
            undo.callback(stop_head, config.ray_folder)
        undo.callback(runtime.stop)
        runtime.start()
        undo.pop_all()


@dataclass(frozen=True)
class Announcement:
    """Logs where everything is, once the first replica is up."""

    config: Config
    backbone: str
    metrics_url: str | None = None
    options: Sequence[str] = ()
    """Options that select this daemon on the command line."""

    def start(self) -> Callable[[], None]:
        """Wait in the background for the first replica, then log; call the result to cancel."""
        cancelled = threading.Event()
        thread = threading.Thread(target=self._wait_and_log, args=(cancelled,), name="announcement", daemon=True)
        thread.start()

        def cancel() -> None:
            cancelled.set()
            thread.join()

        return cancel

    def _wait_and_log(self, cancelled: threading.Event) -> None:
        ledger = Ledger(self.config.ledger_file)
        try:
            snapshot = Snapshot(self.config, ledger)
            for _ in range(int(READY_SECONDS / POLL_SECONDS)):
                if not snapshot.serves or snapshot.serving()["replicas"]:
                    break
                if cancelled.wait(POLL_SECONDS):
                    return
            self._log(snapshot)
        finally:
            ledger.close()

    def _log(self, snapshot: Snapshot) -> None:
        places = self.places(snapshot)
        url = places.get("page")
        log.info(f"ready, serving at {url}" if url else "ready", extra=event("daemon.ready", **places))
        if sys.stdout.isatty():
            print("\n".join(["", *(f"  {name:<9} {place}" for name, place in places.items()), ""]), flush=True)

    def places(self, snapshot: Snapshot) -> dict[str, str]:
        """Name -> place of everything that a user may want to open or type next."""
        bucket, learned = redact(self.config.bucket_url), snapshot.current_version() is not None
        url = snapshot.serving()["url"]
        following = ("predict", "IMAGE") if learned else ("pack", "IMAGES", f"{bucket}/tasks", "--task", "NAME")
        options = self.options if learned else ()
        found = {
            "page": f"{url}/" if url else None,
            "API": f"{url}/docs" if url else None,
            "serving": snapshot.serving_problem,
            "metrics": self.metrics_url,
            "bucket": bucket,
            "state": str(self.config.state.dir),
            "backbone": self.backbone,
            "next": shlex.join(("mqmk-daemon", *following, *options)),
        }
        return {name: place for name, place in found.items() if place}


def log_stopped(snapshot: Snapshot, options: Sequence[str] = ()) -> None:
    """The last line of the log; serving may continue."""
    url = snapshot.serving()["url"]
    stop = shlex.join(("mqmk-daemon", "stop", *options))
    more = f". Serving continues at {url}; `{stop}` ends it." if url else ""
    log.info(f"stopped{more}", extra=event("daemon.stopped", **({"serving": url} if url else {})))
