"""Untrusted input is accepted, rejected with a reason or quarantined; and the fuzzer detects violations."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from programs.fuzz.run import MEMORY, Case, run
from programs.fuzz.targets import TARGETS, RawInput, Target

TESTS = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")


@pytest.mark.timeout(300)
def test_fifteen_hundred_damaged_inputs_are_accepted_rejected_or_quarantined(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "programs.fuzz.run", "1500", "--keep", str(tmp_path)]
    done = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert done.stdout.splitlines()[-1] == "1,500 cases, 0 failures"


@pytest.mark.parametrize("kind", TARGETS)
def test_the_same_seed_makes_the_same_input(kind: str) -> None:
    made = [Case(kind, 3, number).input(TARGETS[kind]).to_bytes() for number in (5, 6, 5)]
    assert made[0] == made[2] != made[1]
    assert Case(kind, 4, 5).input(TARGETS[kind]).to_bytes() != made[0]


def _raise(_: RawInput) -> str:
    raise KeyError("something that nobody expected")


def _hang(_: RawInput) -> str:
    time.sleep(60)
    return "accepted"


def _die(_: RawInput) -> str:
    os._exit(3)


def _swell(_: RawInput) -> str:
    bytearray(b"x") * (MEMORY + 2**24)
    return "accepted"


FAULTS: dict[str, tuple[Callable[[RawInput], str], str]] = {
    "raises something else": (_raise, "something that nobody expected"),
    "hangs": (_hang, "took more than 1 s"),
    "ends the process": (_die, "the process died"),
    "takes too much memory": (_swell, "MiB"),
}


@pytest.mark.parametrize("what", FAULTS)
def test_it_is_a_failure_when_a_case(what: str, tmp_path: Path) -> None:
    fault, says = FAULTS[what]

    def attempt(given: RawInput) -> str:
        return fault(given) if given.data == b"2" else "accepted"

    numbers = iter(range(100))
    target = Target(lambda rng: RawInput(str(rng.randrange(4)).encode()), lambda: attempt)
    bad = next(number for number in numbers if Case("x", 0, number).input(target).to_bytes() == b"2")
    tally = run("x", target, range(bad, bad + 3), 0, tmp_path, seconds=1.0 if what == "hangs" else 60.0)
    assert tally.failures[0][0] == Case("x", 0, bad)
    assert says in tally.failures[0][1]
    assert tally.outcomes.total() == 3, "the remaining cases run"
    assert (tmp_path / f"x-0-{bad}").read_bytes() == b"2"
