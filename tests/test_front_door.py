"""`import mqmk`: the public names, imported lazily and typed."""

import ast
import subprocess
import sys
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import pytest

import mqmk

ROOT = Path(__file__).resolve().parent.parent
NAMES = sorted({*mqmk.__all__} - {"__version__"})


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_these_names_are_public():
    assert NAMES == [
        "Classifier", "FrozenViT", "MqmkError", "PredictSettings", "Prediction", "PromptPool", "TaskPrompt",
        "TrainSettings", "load", "load_backbone",
    ]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_is_the_object_of_that_name_in_its_own_module(name):
    found = getattr(mqmk, name)
    assert found.__name__ == name
    assert found is getattr(import_module(found.__module__), name)


def test_the_version_is_that_of_the_package():
    assert mqmk.__version__ == version("mqmk-daemon")


def test_a_name_that_does_not_exist_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'mqmk' has no attribute 'Clasifier'"):
        _ = mqmk.Clasifier


def test_all_names_are_listed_before_any_of_them_is_used():
    assert run("import mqmk; print({*mqmk.__all__} <= {*dir(mqmk)})") == "True"


def test_the_import_alone_loads_nothing_heavy():
    heavy = "{'torch', 'timm', 'numpy', 'PIL', 'importlib.metadata'}"
    assert run(f"import sys, mqmk; print({heavy} & set(sys.modules))") == "set()"


@pytest.mark.parametrize("package", ["src/mqmk", "matcher", "learner", "daemon", "deploy"])
def test_a_package_is_marked_as_typed(package):
    assert (ROOT / package / "py.typed").is_file()


def test_type_checkers_see_every_name_and_the_same_modules():
    tree = ast.parse((ROOT / "src" / "mqmk" / "__init__.py").read_text())
    (type_checking,) = (node for node in tree.body if isinstance(node, ast.If))
    imports = [node for node in type_checking.body if isinstance(node, ast.ImportFrom)]
    assert {alias.name: node.module for node in imports for alias in node.names} == mqmk._HOMES
    assert sorted(mqmk._HOMES) == NAMES
