"""The range of a numeric setting, as part of its type: `port: Port`, `share: Annotated[float, Range(0, 1)]`."""

from dataclasses import dataclass
from math import isinf
from typing import Annotated


@dataclass(frozen=True)
class Range:
    """What a number may be, both ends included."""

    least: float
    most: float = float("inf")

    def __contains__(self, value: float) -> bool:
        return self.least <= value <= self.most

    def __str__(self) -> str:
        return f"at least {self.least:g}" if isinf(self.most) else f"{self.least:g} to {self.most:g}"


Count = Annotated[int, Range(1)]
Seconds = Annotated[float, Range(0)]
Port = Annotated[int, Range(0, 65535)]
Resource = Annotated[float, Range(0)]
