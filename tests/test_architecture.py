"""Rules for the source tree: import layers, file docstrings, links, folder sizes, no unpickling."""

import ast
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("matcher", "learner", "daemon", "deploy")
SOURCES = [
    ROOT / "src" / "mqmk" / "__init__.py",
    *sorted(path for part in PARTS for path in (ROOT / part).rglob("*.py")),
]
MAX_ENTRIES = 24
LARGE_FOLDERS = {
    "matcher": "flat: tensors, the frozen ViT, pools and matchers, a file each",
    "daemon": "the pipeline's values and the loop are at the top, beside one folder per part",
    "learner/data/sketch_sheets": "one file per class of the demo",
}
"""Folders that may have more entries, and why."""


def test_the_parts_import_each_other_only_downwards():
    command = [Path(sys.executable).with_name("lint-imports"), "--no-cache"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_says_in_its_first_line_what_it_is_for(path):
    docstring = ast.get_docstring(ast.parse(path.read_text()))
    assert docstring
    assert len(docstring.splitlines()[0]) > 20


@pytest.mark.parametrize("part", PARTS)
def test_a_part_is_linked_into_the_package(part):
    """A checkout with `core.symlinks=false` or a zip download has text files instead of links."""
    link = ROOT / "src" / "mqmk" / part
    assert link.is_symlink(), f"src/mqmk/{part} is not a symbolic link: clone with `git -c core.symlinks=true clone`"
    assert link.readlink() == Path("..", "..", part)
    assert link.resolve() == ROOT / part and link.is_dir()


def make_targets():
    return set(re.findall(r"^([\w.-]+):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_ci_and_pre_commit_run_targets_that_exist():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    (job,) = workflow["jobs"].values()
    assert "make ${{ matrix.target }}" in [step.get("run") for step in job["steps"]]
    script = re.findall(r"^make (\S+)$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert job["strategy"]["matrix"]["target"] == script
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    used = {hook["entry"].split()[1] for hook in hooks if hook["entry"].startswith("make ")}
    assert used == {"lint"}
    assert used | set(script) <= make_targets()


def test_every_phony_target_exists():
    (phony,) = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(phony.split()) <= make_targets()


def test_a_program_that_make_runs_exists_and_has_a_main_function_and_a_test_beside_it():
    modules = re.findall(r"-m (programs\.[\w.]+)", (ROOT / "Makefile").read_text())
    assert len(modules) > 5
    for module in modules:
        path = ROOT / "tests" / Path(*module.split(".")).with_suffix(".py")
        assert "main" in [node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
        assert list(path.parent.glob("test_*.py")), f"{path.parent.name}: no test beside the program"


def tracked_files():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    return [Path(name) for name in listed.stdout.split("\0") if name]


def test_a_folder_fits_on_one_screen():
    entries = defaultdict(set)
    for path in tracked_files():
        for place in (path, *path.parents[:-1]):
            entries[place.parent.as_posix()].add(place.name)
    large = {folder: len(names) for folder, names in entries.items() if len(names) > MAX_ENTRIES}
    assert {folder: count for folder, count in large.items() if folder not in LARGE_FOLDERS} == {}
    assert set(LARGE_FOLDERS) == set(large), "folders that are small now are no exceptions any more"


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
