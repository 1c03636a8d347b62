"""The soak test computes correct slopes and detects growth; and a short run of it works."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from programs.soak.run import Sample, slope_table
from support.trend import fit_slope

TESTS = Path(__file__).resolve().parents[2]
MINUTES = [60.0 * number for number in range(120)]


def test_a_line_has_its_slope_and_no_error() -> None:
    found = fit_slope(MINUTES, [100 + 0.5 * minute for minute in range(120)])
    assert found.per_hour == pytest.approx(30.0)
    assert found.error == pytest.approx(0.0, abs=1e-6)


def test_the_error_of_a_slope_is_as_large_as_slopes_of_noise_are() -> None:
    rng = random.Random(0)
    found = [fit_slope(MINUTES, [rng.gauss(0, 1) for _ in MINUTES]) for _ in range(300)]
    outliers = sum(abs(each.per_hour) > 2 * each.error for each in found)
    assert 3 <= outliers <= 30  # of 300; 5 % are expected


def test_samples_that_are_like_their_neighbours_make_a_slope_less_sure() -> None:
    rng, value, walk, noise = random.Random(0), 0.0, [], []
    for _ in MINUTES:
        value = 0.9 * value + rng.gauss(0, 1)
        walk.append(value)
        noise.append(rng.gauss(0, 1 / (1 - 0.9**2) ** 0.5))  # as wide as the walk
    assert fit_slope(MINUTES, walk).error > 2 * fit_slope(MINUTES, noise).error


def test_growth_is_detected_and_a_constant_is_not_mistaken_for_it() -> None:
    rng = random.Random(0)
    samples = [
        Sample(at, 0, {"daemon, MiB": 500 + rng.gauss(0, 2), "replicas, MiB": 300 + at / 60 + rng.gauss(0, 2)})
        for at in MINUTES
    ]
    assert [(row.what, row.is_too_steep) for row in slope_table(samples, 0)] == [
        ("daemon, MiB", False), ("replicas, MiB", True)
    ]  # fmt: skip


def test_growth_during_the_warm_up_is_ignored() -> None:
    samples = [Sample(at, 0, {"daemon, MiB": min(at, 5000.0)}) for at in MINUTES]
    assert slope_table(samples, 0)[0].is_too_steep
    assert not slope_table(samples, 5000)[0].is_too_steep


def test_databases_may_grow_with_the_tasks_that_they_remember() -> None:
    many = [Sample(at, int(at / 60), {"ledger, kB": 100 * at / 60}) for at in MINUTES]
    none = [Sample(at, 0, {"ledger, kB": 100 * at / 60}) for at in MINUTES]
    assert not slope_table(many, 0)[0].is_too_steep
    assert slope_table(none, 0)[0].is_too_steep


@pytest.mark.timeout(400)
def test_a_minute_of_the_real_daemon_loses_no_request_and_every_slope_is_printed(tmp_path: Path) -> None:
    if not os.environ.get("MINUTES_TEST"):
        pytest.skip("a minute of soak needs the machine for itself: make minutes-test")
    options = {"--hours": 60 / 3600, "--every": 3, "--task-seconds": 15, "--warm-up": 25, "--keep": tmp_path}
    command = [sys.executable, "-m", "programs.soak.run", *(str(part) for pair in options.items() for part in pair)]
    done = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, timeout=380, check=False)
    progress = done.stdout + done.stderr
    assert " 0 failed" in done.stdout, progress[-4000:]
    for what in ("daemon, MiB", "replicas, handles", "head, threads", "ray, series", "ledger, kB", "mlflow, kB"):
        assert f"\n{what} " in done.stdout, progress[-4000:]
