"""The rules of the house: layers, doors, and a first line that says what a file is for."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("matcher", "learner", "daemon", "deploy")
SOURCES = sorted(path for part in PARTS for path in (ROOT / part).rglob("*.py"))


def test_the_parts_import_each_other_only_downwards():
    command = [Path(sys.executable).with_name("lint-imports"), "--no-cache"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_says_in_its_first_line_what_it_is_for(path):
    docstring = ast.get_docstring(ast.parse(path.read_text()))
    assert docstring
    assert len(docstring.splitlines()[0]) > 20


def test_nothing_can_unpickle():
    loaders = ("pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal")
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                assert not {alias.name.split(".")[0] for alias in node.names} & set(loaders), path
            if isinstance(node, ast.ImportFrom):
                assert (node.module or "").split(".")[0] not in loaders, path
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                assert (node.value.id, node.attr) != ("torch", "load"), path
