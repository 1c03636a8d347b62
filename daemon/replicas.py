"""Which replica serves which version, as far as the daemon needs to know."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Replica:
    """One replica of the served model, and the version it serves."""

    id: str
    pool_version: int | None
    digest: str | None
    last_failure: str | None = None


class Serving(Protocol):
    """What serves requests."""

    def replicas(self) -> list[Replica]:
        """Every live replica; none if nothing is served."""

    def wanted_replicas(self) -> int:
        """How many must serve a version before its tasks are SERVING."""
