"""The overhead of metrics is computed correctly; `python -m programs.observe.overhead` measures it."""

import random
from collections.abc import Callable
from statistics import median

import pytest
from programs.observe.overhead import Times, overhead, percentile_99, print_overhead


def turns(milliseconds: float, seed: int) -> Times:
    """A hundred turns of forty noisy requests."""
    rng = random.Random(seed)
    return [[rng.gauss(milliseconds, 0.2) / 1000 for _ in range(40)] for _ in range(100)]


@pytest.mark.parametrize("statistic", [median, percentile_99])
def test_the_interval_contains_the_true_overhead(statistic: Callable[[list[float]], float]) -> None:
    added, low, high = overhead(turns(10.5, 1), turns(10.0, 2), statistic)
    assert low < 0.05 < high
    assert added == pytest.approx(0.05, abs=0.01)


def test_only_a_clear_overhead_is_above_the_limit(capsys: pytest.CaptureFixture[str]) -> None:
    assert not print_overhead("median", median, turns(10.5, 1), turns(10.0, 2))
    assert print_overhead("median", median, turns(10.0, 1), turns(10.0, 2))
    assert "95 % interval" in capsys.readouterr().out
