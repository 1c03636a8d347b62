"""Opens the ledger of a state directory for a command that reads it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from mqmk.daemon.cli.options import require_ledger

if TYPE_CHECKING:
    from mqmk.daemon.config.load import Loaded
    from mqmk.daemon.ledger.ledger import Ledger
    from mqmk.daemon.status.snapshot import Snapshot


@contextmanager
def open_ledger(loaded: "Loaded") -> "Iterator[Ledger]":
    """The ledger of a state directory; DaemonError if there is none."""
    from mqmk.daemon.ledger.ledger import Ledger

    require_ledger(loaded.config)
    ledger = Ledger(loaded.config.ledger_file)
    try:
        yield ledger
    finally:
        ledger.close()


@contextmanager
def open_snapshot(loaded: "Loaded") -> "Iterator[Snapshot]":
    from mqmk.daemon.status.snapshot import Snapshot

    with open_ledger(loaded) as ledger:
        yield Snapshot(loaded.config, ledger)
