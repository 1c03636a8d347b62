"""The arithmetic of docs/scaling.md is that of the tensors and of docs/benchmarks.md."""

import re
from pathlib import Path

import pytest
import torch

from mqmk.matcher.pool import TaskPrompt

DOCS = Path(__file__).resolve().parent.parent.parent / "docs"
SCALING = (DOCS / "scaling.md").read_text()
CLASSES, TASKS, REQUESTS, CORES = 10, 1_000, 10_000, 2


def task_bytes(dim: int) -> int:
    rows = torch.zeros(CLASSES, dim)
    names = tuple(map(str, range(CLASSES)))
    prompt = TaskPrompt("task", names, torch.zeros(9, 2, 20, dim), keys=rows, head=rows, means=rows, plain_means=rows)
    return sum(tensor.nbytes for tensor in prompt.tensors().values())


def row(begins: str) -> list[str]:
    (line,) = [line for line in SCALING.splitlines() if line.startswith(f"| {begins}")]
    return [cell.strip() for cell in line.strip("|").split("|")]


@pytest.mark.parametrize(("column", "dim"), [(1, 192), (2, 768)])
def test_memory_follows_from_the_shapes(column: int, dim: int) -> None:
    one = task_bytes(dim)
    assert row("one task")[column] == f"{one / 1e6:.3f} MB"
    assert row("pool of 1,000 tasks")[column] == f"{one * TASKS / 1e6:,.0f} MB"
    cards = 0.020 * TASKS
    assert row("all versions")[column] == f"{one * TASKS / 1e6 + cards:,.0f} MB"


@pytest.mark.parametrize("matcher", ["mqmk-ei", "sqmk", "cascade", "mqmk"])
def test_cost_follows_from_the_benchmark(matcher: str) -> None:
    pattern = rf"\| deit_tiny_patch16_224 \| 100 \| `{matcher}` \| ([\d.]+) \| [\d.]+ \| ([\d.]+) \|"
    (found,) = re.findall(pattern, (DOCS / "benchmarks.md").read_text())
    milliseconds, passes = float(found[0]), float(found[1])
    milliseconds *= TASKS / 100 if matcher == "mqmk" else 1
    _, shown_passes, _, shown_milliseconds, shown_cores = row(f"`{matcher}` ")
    assert float(shown_passes) == pytest.approx(passes, rel=0.01)
    assert float(shown_milliseconds.replace(",", "")) == pytest.approx(milliseconds, rel=0.02)
    assert float(shown_cores.replace(",", "")) == pytest.approx(milliseconds / 1e3 * REQUESTS * CORES, rel=0.02)
