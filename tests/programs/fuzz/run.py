"""Fuzz tars, manifests, images, requests and task folders: `python -m programs.fuzz.run 10000`.

Each input must be accepted, rejected with a reason, or quarantined by the daemon. Anything else is a failure: another
exception, a 5xx response, a case that exceeds its time or memory limit, a process that dies. Cases run in child
processes with resource limits. Inputs are reproducible from the seed; a failure prints the command that repeats it.
"""

import argparse
import json
import logging
import os
import resource
import select
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from programs.fuzz.mutate_bytes import Rng
from programs.fuzz.targets import TARGETS, Attempt, Input, Target

SECONDS: Final = 20.0  # per case, on a busy machine
MEMORY: Final = 700 * 2**20  # that one case may add: three copies of an image of 40 million pixels
READY: Final = b"{}"
ADDRESS_SPACE: Final = 4 * 2**30  # that a child process may add in total


@dataclass(frozen=True)
class Case:
    """One input, identified by kind, seed and number."""

    kind: str
    seed: int
    number: int

    def input(self, target: Target) -> Input:
        return target.make(Rng(f"{self.seed}/{self.kind}/{self.number}"))

    @property
    def command(self) -> str:
        """The command that repeats it."""
        return f"cd tests; python -m programs.fuzz.run 1 --kind {self.kind} --seed {self.seed} --first {self.number}"


@dataclass(frozen=True)
class Outcome:
    """Outcome of a case; `result` starts with accepted, rejected or quarantined unless it failed."""

    number: int
    result: str
    failed: bool = False
    seconds: float = 0.0
    memory: int = 0


@dataclass
class Tally:
    """Outcomes of all cases of one kind."""

    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[tuple[Case, str]] = field(default_factory=list)
    slowest: float = 0.0
    largest: int = 0

    def add(self, case: Case, outcome: Outcome) -> None:
        self.outcomes["failed" if outcome.failed else outcome.result] += 1
        self.slowest, self.largest = max(self.slowest, outcome.seconds), max(self.largest, outcome.memory)
        if outcome.failed:
            self.failures.append((case, outcome.result))


def run(kind: str, target: Target, cases: range, seed: int, keep: Path, seconds: float = SECONDS) -> Tally:
    """Run a range of cases; a child that hangs or dies is replaced and the remaining cases continue."""
    tally, next_case = Tally(), cases.start
    while next_case < cases.stop:
        for outcome in _run_in_child(kind, target, range(next_case, cases.stop), seed, seconds):
            case = Case(kind, seed, outcome.number)
            tally.add(case, outcome)
            next_case = outcome.number + 1
            if outcome.failed:
                _save_failure(case, target, keep, outcome.result)
    return tally


def _save_failure(case: Case, target: Target, keep: Path, result: str) -> None:
    keep.mkdir(parents=True, exist_ok=True)
    path = keep / f"{case.kind}-{case.seed}-{case.number}"
    path.write_bytes(case.input(target).to_bytes())
    print(f"FAILED {result}\n  saved in {path}; repeat with: {case.command}", flush=True)


def _run_in_child(kind: str, target: Target, cases: range, seed: int, seconds: float) -> Iterator[Outcome]:
    """Yield the outcomes of a child process; if it does not finish, the last one is its death."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        os._exit(_run_cases(kind, target, cases, seed, writing))
    os.close(writing)
    number, late = cases.start, False
    with os.fdopen(reading, "rb", buffering=0) as pipe:
        for line in _lines(pipe, seconds):
            if late := line is None:
                os.kill(child, signal.SIGKILL)
                break
            if line != READY:
                outcome = Outcome(**json.loads(line))
                number = outcome.number + 1
                yield outcome
    _, status = os.waitpid(child, 0)
    if status:
        why = f"took more than {seconds:g} s" if late else f"the process died, status {status}"
        yield Outcome(number, why, failed=True)


def _lines(pipe: Any, seconds: float) -> Iterator[bytes | None]:
    """Yield lines as they arrive, None on a timeout. The first may take longer: the child sets up its target."""
    rest, timeout = b"", seconds + 60
    while True:
        if not select.select([pipe], [], [], timeout)[0]:
            yield None
            return
        data, timeout = pipe.read(2**16), seconds
        *whole, rest = (rest + data).split(b"\n")
        yield from whole
        if not data:
            return


def _run_cases(kind: str, target: Target, cases: range, seed: int, writing: int) -> int:
    """Run the cases in order and write each outcome immediately."""
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    try:
        attempt = target.set_up()
        _limit_memory()
        os.write(writing, READY + b"\n")
        for number in cases:
            outcome = _try_input(attempt, number, Case(kind, seed, number).input(target))
            os.write(writing, json.dumps(asdict(outcome)).encode() + b"\n")
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _limit_memory() -> None:
    most = _process_status("VmSize") + ADDRESS_SPACE
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _try_input(attempt: Attempt, number: int, given: Input) -> Outcome:
    before, begun = _reset_peak_memory(), time.monotonic()
    try:
        result, failed = attempt(given), False
    except Exception as error:
        result, failed = "".join(traceback.format_exception(error))[-3000:], True
    seconds, memory = time.monotonic() - begun, _process_status("VmHWM") - before
    if not failed and memory > MEMORY:
        result, failed = f"{result}, but took {memory // 2**20} MiB", True
    return Outcome(number, result, failed, seconds, memory)


def _reset_peak_memory() -> int:
    """Reset the peak counter and return the resident memory."""
    Path("/proc/self/clear_refs").write_text("5")
    return _process_status("VmRSS")


def _process_status(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def run_all(count: int, seed: int, first: int, kinds: list[str], keep: Path, seconds: float) -> dict[str, Tally]:
    """Run that many cases, divided among the kinds by their shares."""
    shares = {kind: TARGETS[kind].share for kind in kinds}
    tallies = {}
    for kind in kinds:
        own = max(1, round(count * shares[kind] / sum(shares.values())))
        begun = time.monotonic()
        tallies[kind] = run(kind, TARGETS[kind], range(first, first + own), seed, keep, seconds)
        _print_tally(kind, tallies[kind], time.monotonic() - begun)
    return tallies


def _print_tally(kind: str, tally: Tally, seconds: float) -> None:
    sums: Counter[str] = Counter()
    for result, times in tally.outcomes.items():
        sums[result.partition(":")[0]] += times
    reasons = ", ".join(
        f"{result.partition(': ')[2]} {n}" for result, n in tally.outcomes.most_common() if ":" in result
    )
    found = ", ".join(f"{n} {what}" for what, n in sorted(sums.items()))
    print(f"{kind}: {sum(sums.values()):,} cases: {found}; slowest {tally.slowest:.1f} s, largest "
          f"{tally.largest // 2**20} MiB, {seconds:.0f} s in total\n  {reasons}", flush=True)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", type=int, nargs="?", default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--kind", choices=TARGETS, action="append")
    parser.add_argument("--keep", type=Path, default=Path("build/mutations"), help="folder for failing inputs")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="time limit for one case")
    given = parser.parse_args()
    tallies = run_all(given.cases, given.seed, given.first, given.kind or [*TARGETS], given.keep, given.seconds)
    total, failures = sum(t.outcomes.total() for t in tallies.values()), sum(len(t.failures) for t in tallies.values())
    print(f"{total:,} cases, {failures} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
