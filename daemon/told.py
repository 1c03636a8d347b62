"""What somebody says about files of pictures: an answer for each, or why there is none; and whom one may ask."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class Wishes:
    """What a question may choose; None leaves it to whoever answers."""

    matcher: str | None = None
    top_k: int | None = None


@dataclass(frozen=True)
class Told:
    """What was said about one picture; either `answer` or `error` is there."""

    file: Path
    answer: Mapping[str, Any] | None = None
    """As POST /predict answers."""
    error: str | None = None


class Oracle(Protocol):
    """A pool that can be asked: behind a service, or on disk."""

    @property
    def place(self) -> str:
        """Its address or folder."""

    def tasks(self) -> Mapping[str, Sequence[str]]:
        """The classes of each task."""

    def answers(self, files: Sequence[Path]) -> Iterator[Told]:
        """What it says about each file, in their order; DaemonError if it cannot be asked at all."""
