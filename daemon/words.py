"""Parts of sentences: counts, times, and commands that can be pasted into a shell."""

import shlex
from collections.abc import Sequence
from datetime import UTC, datetime


def plural(count: int, noun: str, many: str | None = None) -> str:
    """`1 task`, `2 tasks`, `1,500 images`."""
    return f"{count:,} {noun if count == 1 else many or f'{noun}s'}"


def summarize(names: Sequence[str]) -> str:
    """The name of one task; of several, how many they are."""
    return names[0] if len(names) == 1 else plural(len(names), "task") if names else ""


def command(*words: object) -> str:
    """A `mqmk-daemon` command in backticks, quoted for a shell."""
    return f"`{shlex.join(['mqmk-daemon', *map(str, words)])}`"


def time_text(seconds: float) -> str:
    """A point in time for people and programs: ISO 8601, UTC, to the second."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
