"""What `predict` and `evaluate` need from a pool, served or on disk: a result for each image file."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class PredictOptions:
    """What a request may choose; None leaves the default."""

    matcher: str | None = None
    top_k: int | None = None


@dataclass(frozen=True)
class PredictionResult:
    """The result for one image: either `answer` or `error`."""

    file: Path
    answer: Mapping[str, Any] | None = None
    """As POST /predict answers."""
    error: str | None = None


class Predictor(Protocol):
    """A pool that predicts: behind a service, or on disk."""

    @property
    def place(self) -> str:
        """Its URL or folder."""

    def tasks(self) -> Mapping[str, Sequence[str]]:
        """The classes of each task."""

    def predict(self, files: Sequence[Path]) -> Iterator[PredictionResult]:
        """The result for each file, in order; DaemonError if no prediction is possible at all."""
