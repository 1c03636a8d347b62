"""How long a comparison takes: the forward passes of each method by arithmetic, times the seconds of one pass.

Before the first run a pass is timed on its own; later the runs themselves tell what a pass costs.
"""

import time
from collections.abc import Iterable, Sequence
from typing import Final

import torch

from mqmk.learner.bench.methods.parts.protocol import MethodInfo
from mqmk.learner.data.streams import StreamSettings, count_images
from mqmk.matcher.prompted_vit import FrozenViT

PROBE: Final = 32  # images
SEARCHED: Final = 0.9  # share of the first task that learning rates are tried on

Pending = tuple[MethodInfo, int]
"""A method and a seed."""


class Estimate:
    """The passes of all runs to come, and the seconds of a pass."""

    def __init__(
        self, vit: FrozenViT, stream: StreamSettings, epochs: int, rates: int, pending: Iterable[Pending]
    ) -> None:
        train, test = count_images(stream)
        self._train, self._test, self._tasks, self._epochs, self._rates = train, test, stream.tasks, epochs, rates
        self._passes = self._count_all(list(pending))
        self._done, self._spent = 0.0, 0.0
        self._seconds_per_pass = time_pass(vit) if self._passes else 0.0

    @property
    def runs(self) -> int:
        """How many have not ended."""
        return len(self._passes)

    def finish(self, info: MethodInfo, seed: int, seconds: float) -> None:
        """A run has ended after so many seconds."""
        self._done += self._passes.pop((info.name, seed))
        self._spent += seconds
        self._seconds_per_pass = self._spent / max(1.0, self._done)

    def seconds_left(self) -> float:
        """Of all runs that have not ended."""
        return sum(self._passes.values()) * self._seconds_per_pass

    def _count_all(self, pending: list[Pending]) -> dict[tuple[str, int], float]:
        found: dict[tuple[str, int], float] = {}
        with_pool: set[int] = set()  # seeds whose shared pool some run before trains
        for info, seed in pending:
            found[info.name, seed] = self._count(info, is_first_seed=seed == 0, has_pool=seed in with_pool)
            with_pool |= {seed} if info.shares_pool else set()
        return found

    def _count(self, info: MethodInfo, is_first_seed: bool, has_pool: bool) -> float:
        first, later = (0.0, 0.0) if info.shares_pool and has_pool else info.epoch_passes
        per_task, tasks = self._train / self._tasks, self._tasks
        training = self._epochs * per_task * (first + (tasks - 1) * (first if info.is_joint else later))
        searching = self._rates * SEARCHED * self._epochs * per_task * first
        evaluations = 1 if info.is_joint else (tasks + 1) / 2
        return (
            training
            + (searching if info.searches_rate and is_first_seed and self._rates > 1 else 0.0)
            + info.test_passes * self._test * evaluations
            + self._train / 2  # statistics and images to read
            + self._test / 2
        )


def split_methods(methods: Sequence[MethodInfo], parts: int) -> list[tuple[MethodInfo, ...]]:
    """About equal parts for processes of their own; methods that share a pool stay together."""
    units = [[info] for info in methods if not info.shares_pool]
    units += [together] if (together := [info for info in methods if info.shares_pool]) else []
    shares: list[list[MethodInfo]] = [[] for _ in range(parts)]
    for unit in sorted(units, key=_weigh, reverse=True):
        min(shares, key=_weigh).extend(unit)
    return [tuple(share) for share in shares if share]


def _weigh(methods: Sequence[MethodInfo]) -> float:
    """Passes an image and epoch, roughly; a shared pool counts once."""
    alone = sum(info.epoch_passes[0 if info.is_joint else 1] for info in methods if not info.shares_pool)
    shared = [info.epoch_passes[1] for info in methods if info.shares_pool]
    return alone + max(shared, default=0.0) + 0.3 * sum(info.test_passes for info in methods)


@torch.inference_mode()
def time_pass(vit: FrozenViT) -> float:
    """Seconds of a plain query of one image, in a batch; the better of two."""
    size = vit.info.image_size
    images, seconds = torch.zeros(PROBE, 3, size, size, device=vit.device), []
    for _ in range(2):
        begun = time.monotonic()
        vit.plain(images).sum().item()
        seconds.append((time.monotonic() - begun) / PROBE)
    return min(seconds)
