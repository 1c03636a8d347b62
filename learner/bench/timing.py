"""How long calls take, measured side by side: in turns, so that a busy minute of the machine meets all of them."""

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch


@dataclass(frozen=True)
class Timing:
    """The least seconds of each round, and the peak memory."""

    seconds: tuple[float, ...]
    peak_mb: float

    def over(self, other: "Timing") -> float:
        """How many times as long as the other: the median over the rounds that both took part in."""
        return median(mine / theirs for mine, theirs in zip(self.seconds, other.seconds, strict=False))


def time_in_turns(
    calls: Mapping[str, Callable[[], object]],
    rounds: int,
    turn_seconds: float,
    too_long_to_repeat: float = float("inf"),
) -> dict[str, Timing]:
    """Each call in turn, round after round; a quick one is repeated for `turn_seconds`, a very long one runs once."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    peak: dict[str, float] = {}
    for _ in range(rounds):
        for name, call in calls.items():
            if seconds[name] and seconds[name][0] > too_long_to_repeat:
                continue
            _reset_peak_memory()
            least, start = time_call(call), time.perf_counter()
            while time.perf_counter() - start < turn_seconds:
                least = min(least, time_call(call))
            seconds[name].append(least)
            peak[name] = _peak_memory_mb()
    return {name: Timing(tuple(seconds[name]), peak[name]) for name in calls}


def time_call(call: Callable[[], object]) -> float:
    """Seconds of one call, from an idle GPU to an idle GPU: kernels run on after a call returns."""
    _synchronise()
    start = time.perf_counter()
    call()
    _synchronise()
    return time.perf_counter() - start


def read_lines(path: str) -> list[str]:
    """The lines of a file of /proc; none where there is no such file."""
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def _synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _reset_peak_memory() -> None:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    elif os.access("/proc/self/clear_refs", os.W_OK):
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM


def _peak_memory_mb() -> float:
    """The peak memory of the process (or of the GPU) since the last reset."""
    if torch.cuda.is_available():
        return round(torch.cuda.max_memory_allocated() / 1e6, 1)
    peak = [line for line in read_lines("/proc/self/status") if line.startswith("VmHWM")]
    return round(int(peak[0].split()[1]) * 1024 / 1e6, 1) if peak else 0.0
