"""Bad input by the thousand: `python tests/mutations.py 10000` damages tars, manifests, pictures, requests and folders.

Each is taken in (accepted), refused with a reason (rejected) or put aside by the daemon (quarantined). Anything else is
a failure: another error, an answer of 5xx, a case that takes too long or too much memory, a process that dies. Child
processes with limits do the work. Everything follows from the seed: a failure prints the command that repeats it.
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
from mutated_bytes import Dice
from mutation_subjects import SUBJECTS, Attempt, Input, Subject

SECONDS: Final = 20.0  # of one case, on a busy machine
MEMORY: Final = 700 * 2**20  # that one case may add: a picture of 40 million pixels, three times over
READY: Final = b"{}"
ADDRESSES: Final = 4 * 2**30  # that a child may add to its address space in all


@dataclass(frozen=True)
class Case:
    """One input, known by its kind, seed and number."""

    kind: str
    seed: int
    number: int

    def input(self, subject: Subject) -> Input:
        return subject.make(Dice(f"{self.seed}/{self.kind}/{self.number}"))

    @property
    def command(self) -> str:
        """What repeats it."""
        return f"python tests/mutations.py 1 --kind {self.kind} --seed {self.seed} --first {self.number}"


@dataclass(frozen=True)
class Outcome:
    """What became of a case; `said` begins with accepted, rejected or quarantined unless it failed."""

    number: int
    said: str
    failed: bool = False
    seconds: float = 0.0
    memory: int = 0


@dataclass
class Tally:
    """What became of all of them."""

    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[tuple[Case, str]] = field(default_factory=list)
    slowest: float = 0.0
    largest: int = 0

    def take(self, case: Case, outcome: Outcome) -> None:
        self.outcomes["failed" if outcome.failed else outcome.said] += 1
        self.slowest, self.largest = max(self.slowest, outcome.seconds), max(self.largest, outcome.memory)
        if outcome.failed:
            self.failures.append((case, outcome.said))


def run(kind: str, subject: Subject, cases: range, seed: int, keep: Path, seconds: float = SECONDS) -> Tally:
    """Try a range of cases; a child that hangs or dies is replaced and the rest goes on."""
    tally, following = Tally(), cases.start
    while following < cases.stop:
        for outcome in _in_a_child(kind, subject, range(following, cases.stop), seed, seconds):
            case = Case(kind, seed, outcome.number)
            tally.take(case, outcome)
            following = outcome.number + 1
            if outcome.failed:
                _kept(case, subject, keep, outcome.said)
    return tally


def _kept(case: Case, subject: Subject, keep: Path, said: str) -> None:
    keep.mkdir(parents=True, exist_ok=True)
    path = keep / f"{case.kind}-{case.seed}-{case.number}"
    path.write_bytes(case.input(subject).to_bytes())
    print(f"FAILED {said}\n  kept in {path}; again: {case.command}", flush=True)


def _in_a_child(kind: str, subject: Subject, cases: range, seed: int, seconds: float) -> Iterator[Outcome]:
    """The outcomes of a child process, the last of them its death if it did not finish."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        os._exit(_child(kind, subject, cases, seed, writing))
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
    """Lines as they come; None when one is late. The first may take longer: a child has to open its subject."""
    rest, patience = b"", seconds + 60
    while True:
        if not select.select([pipe], [], [], patience)[0]:
            yield None
            return
        data, patience = pipe.read(2**16), seconds
        *whole, rest = (rest + data).split(b"\n")
        yield from whole
        if not data:
            return


def _child(kind: str, subject: Subject, cases: range, seed: int, writing: int) -> int:
    """Every case in turn, each outcome told at once."""
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    try:
        attempt = subject.open()
        _limit_memory()
        os.write(writing, READY + b"\n")
        for number in cases:
            outcome = _tried(attempt, number, Case(kind, seed, number).input(subject))
            os.write(writing, json.dumps(asdict(outcome)).encode() + b"\n")
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _limit_memory() -> None:
    most = _status("VmSize") + ADDRESSES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _tried(attempt: Attempt, number: int, given: Input) -> Outcome:
    before, begun = _memory_from_here(), time.monotonic()
    try:
        said, failed = attempt(given), False
    except Exception as error:
        said, failed = "".join(traceback.format_exception(error))[-3000:], True
    seconds, memory = time.monotonic() - begun, _status("VmHWM") - before
    if not failed and memory > MEMORY:
        said, failed = f"{said}, but took {memory // 2**20} MiB", True
    return Outcome(number, said, failed, seconds, memory)


def _memory_from_here() -> int:
    """What is resident now; the peak is counted anew from here."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def run_all(count: int, seed: int, first: int, kinds: list[str], keep: Path, seconds: float) -> dict[str, Tally]:
    """That many cases, divided among the kinds by their shares."""
    shares = {kind: SUBJECTS[kind].share for kind in kinds}
    tallies = {}
    for kind in kinds:
        own = max(1, round(count * shares[kind] / sum(shares.values())))
        begun = time.monotonic()
        tallies[kind] = run(kind, SUBJECTS[kind], range(first, first + own), seed, keep, seconds)
        _say(kind, tallies[kind], time.monotonic() - begun)
    return tallies


def _say(kind: str, tally: Tally, seconds: float) -> None:
    sums: Counter[str] = Counter()
    for said, times in tally.outcomes.items():
        sums[said.partition(":")[0]] += times
    reasons = ", ".join(f"{said.partition(': ')[2]} {n}" for said, n in tally.outcomes.most_common() if ":" in said)
    found = ", ".join(f"{n} {what}" for what, n in sorted(sums.items()))
    print(f"{kind}: {sum(sums.values()):,} cases: {found}; slowest {tally.slowest:.1f} s, largest "
          f"{tally.largest // 2**20} MiB, {seconds:.0f} s in all\n  {reasons}", flush=True)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", type=int, nargs="?", default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--kind", choices=SUBJECTS, action="append")
    parser.add_argument("--keep", type=Path, default=Path("build/mutations"), help="where failing inputs are kept")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="that one case may take")
    given = parser.parse_args()
    tallies = run_all(given.cases, given.seed, given.first, given.kind or [*SUBJECTS], given.keep, given.seconds)
    total, failures = sum(t.outcomes.total() for t in tallies.values()), sum(len(t.failures) for t in tallies.values())
    print(f"{total:,} cases, {failures} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
