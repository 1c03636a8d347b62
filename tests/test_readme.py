"""What README and docs show is what happens."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BLOCKS = [
    pytest.param(block, id=f"{page.name}-{number}")
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
]


@pytest.mark.parametrize("block", BLOCKS)
def test_the_python_in_the_docs_runs(block, tmp_path):
    found = subprocess.run([sys.executable, "-c", block], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert found.stdout.strip()


def test_every_make_target_that_the_docs_name_exists():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in (ROOT / "README.md", ROOT / "ARCHITECTURE.md", *(ROOT / "docs").glob("*.md")):
        assert set(re.findall(r"\bmake ([a-z-]+)", page.read_text())) <= targets, page
