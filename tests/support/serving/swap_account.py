"""The cost of swaps for concurrent requests: latency during and between version changes, of the same clients."""

import random
from dataclasses import dataclass
from statistics import median

from support.serving.load import Sample, quantile, within

Window = tuple[float, float]


@dataclass(frozen=True)
class Swap:
    """The rollout of one version, and the quiet time after it."""

    published: float
    everywhere: float
    until: float
    """The end of the quiet time."""

    @property
    def window(self) -> Window:
        """A little longer than the swap: a request that it delayed may still be in flight."""
        return (self.published, min(self.everywhere + 0.1, self.until))

    @property
    def seconds(self) -> float:
        return self.everywhere - self.published


@dataclass(frozen=True)
class Account:
    """Requests of the swapping part of a run: block by block, a swap and the quiet time after it."""

    blocks: list[tuple[list[Sample], list[Sample]]]
    delays: list[float]

    @property
    def swapping(self) -> list[Sample]:
        return [sample for block in self.blocks for sample in block[0]]

    @property
    def steady(self) -> list[Sample]:
        return [sample for block in self.blocks for sample in block[1]]

    @property
    def ratio(self) -> float:
        """p99 in swap windows over p99 between them."""
        return ratio_of(self.blocks)

    def range_of_ratio(self, draws: int = 400) -> tuple[float, float]:
        """Bootstrap interval of the ratio: its 5th and 95th percentile over resampled blocks."""
        rng = random.Random(0)
        found = sorted(ratio_of(rng.choices(self.blocks, k=len(self.blocks))) for _ in range(draws))
        return found[int(0.05 * draws)], found[int(0.95 * draws)]

    def __str__(self) -> str:
        low, high = self.range_of_ratio()
        steady, swapping = self.steady, self.swapping
        return (
            f"p50 {quantile(steady, 0.5) * 1e3:.1f} ms, in swap windows {quantile(swapping, 0.5) * 1e3:.1f} ms\n"
            f"p99 {quantile(steady, 0.99) * 1e3:.1f} ms of {len(steady)} requests, in swap windows "
            f"{quantile(swapping, 0.99) * 1e3:.1f} ms of {len(swapping)}: ratio {self.ratio:.2f} "
            f"({low:.2f} to {high:.2f} over resampled swaps)\n"
            f"publish to all replicas: median {median(self.delays):.2f} s, most {max(self.delays):.2f} s"
        )


def ratio_of(blocks: list[tuple[list[Sample], list[Sample]]]) -> float:
    swapping, steady = ([sample for block in blocks for sample in block[side]] for side in (0, 1))
    return quantile(swapping, 0.99) / quantile(steady, 0.99)


def account(samples: list[Sample], swaps: list[Swap]) -> Account:
    """A request that was in flight at any time of a swap's window belongs to that swap."""
    blocks = []
    for swap in swaps:
        near = within(samples, [(swap.published, swap.until)])
        touched = within(near, [swap.window])
        counted = set(map(id, touched))
        begun_after = [one for one in near if id(one) not in counted and one.began + one.seconds <= swap.until]
        blocks.append((touched, begun_after))
    return Account(blocks, [swap.seconds for swap in swaps])
