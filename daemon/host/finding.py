"""The result of a check that `doctor` or `start` runs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from mqmk.daemon.config.sections import Config

Status = Literal["ok", "warn", "fail"]
CheckResult = tuple[Status, str, str]
"""The status, what was found, and what to do about it."""
Check = Callable[[Config], CheckResult]


@dataclass(frozen=True)
class Finding:
    """The result of a named check."""

    name: str
    status: Status
    what: str
    to_do: str = ""
