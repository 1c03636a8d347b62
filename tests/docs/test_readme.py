"""What README and docs show is what happens, and every command they name exists.

Examples that need a service are run elsewhere: docs/api.md by test_api_doc.py, those of README and docs/quickstart.md
by test_quickstart.py, docs/operations.md by programs/systemd (`make systemd-test`).
"""

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from copy import deepcopy
from itertools import takewhile
from pathlib import Path
from typing import Any

import click
import pytest
from support.shell import save_sketches

from mqmk.daemon.cli.main import cli
from mqmk.daemon.config.sections import Config, State
from mqmk.learner.data.manifest import parse_manifest
from mqmk.learner.data.validation import validate_task
from mqmk.learner.settings import ShardLimits

ROOT = Path(__file__).resolve().parents[2]
PAGES = (
    *(ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "deploy/README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "decisions").glob("*.md")),
)
NEED_A_SERVICE = ("api.md", "quickstart.md")
COMMAND = "mqmk-daemon"


def blocks(page: Path, *kinds: str) -> list[str]:
    """The fenced blocks of some languages."""
    found = re.findall(r"^```(\w*)[^\n]*\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    return [text for kind, text in found if kind in kinds]


PYTHON = [
    pytest.param(block, id=f"{page.name}-{number}")
    for page in PAGES
    if page.name not in NEED_A_SERVICE
    for number, block in enumerate(blocks(page, "python"))
]


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """What a user brings; the pages call it photos and owl.jpg."""
    for label in ("owl", "parrot", "crab", "whale"):
        save_sketches(tmp_path / "photos" / "train", label, 0, 20)
        save_sketches(tmp_path / "photos" / "test", label, 20, 25)
    for label in ("owl", "parrot"):
        save_sketches(tmp_path / "photos" / "birds", label, 0, 20)
    shutil.copy(tmp_path / "photos" / "test" / "owl" / "20.png", tmp_path / "owl.jpg")
    return tmp_path


@pytest.mark.parametrize("block", PYTHON)
def test_the_python_in_the_docs_runs(block, photos):
    found = subprocess.run([sys.executable, "-c", block], cwd=photos, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert found.stdout.strip()


def simple_commands(text: str, name: str) -> Iterator[list[str]]:
    """Uses of a command, each with its words, as a shell would see them; variables, sudo and the like are left out."""
    for line in (line for line in text.replace("\\\n", " ").splitlines() if name in line):
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.wordchars += "@:%+"
        words = list(lexer)
        while words:
            command = list(takewhile(lambda word: not set(word) <= set("();<>|&"), words))
            words = words[len(command) + 1 :]
            while command and (re.fullmatch(r"\w+=.*", command[0]) or command[0] in ("sudo", "-u", "mqmk", "$")):
                command = command[1:]
            if command and Path(command[0]).name == name:
                yield command


def spans(page: Path) -> list[str]:
    """What stands between backticks in the text, on one line each."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", text)]


def commands_of(page: Path) -> list[str]:
    """Every use of our command: in blocks for a shell, and in the text, where a name may stand without arguments."""
    typed = [words[1:] for block in blocks(page, "", "sh") for words in simple_commands(block, COMMAND)]
    named = [words[1:] for span in spans(page) for words in simple_commands(span, COMMAND) if words[1:]]
    shortened = [words if len(words) > 1 and words[-1] != "..." else [words[0], "--help"] for words in named]
    return [shlex.join(words) for words in typed + shortened]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_make_target_that_the_docs_name_exists(page):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for text in (*blocks(page, "", "sh"), *spans(page)):
        for words in simple_commands(text, "make"):
            assert {word for word in words[1:] if "=" not in word and not word.startswith("-")} <= targets


USES = [
    pytest.param(use, id=f"{page.name}: {use}")
    for page in PAGES
    for use in dict.fromkeys(commands_of(page))
]  # fmt: skip


@pytest.mark.parametrize("use", USES)
def test_every_use_of_our_command_in_the_docs_is_understood_by_it(use):
    parse(cli, shlex.split(use))


def parse(command: click.Command, words: list[str]) -> None:
    """What click does before it runs a command; files that are named need not exist here."""
    command = deepcopy(command)
    for parameter in command.params:
        if isinstance(parameter.type, click.Path):
            parameter.type.exists = False
    try:
        context: Any = command.make_context(COMMAND, words)
    except click.exceptions.Exit:  # --help, --version
        return
    if isinstance(command, click.Group):
        _, found, rest = command.resolve_command(context, [*context._protected_args, *context.args])
        assert found is not None
        parse(found, rest)


def test_the_task_that_the_docs_write_by_hand_is_a_good_one(photos):
    (block,) = blocks(ROOT / "docs" / "tasks.md", "python")
    subprocess.run([sys.executable, "-c", block], cwd=photos, capture_output=True, check=True)
    folder = photos / "bucket" / "tasks" / "birds"
    manifest = parse_manifest((folder / "TASK.json").read_bytes())
    report = validate_task(manifest, lambda name: (folder / name).open("rb"), ShardLimits(), known_classes={})
    assert report.samples == dict.fromkeys(("crab", "owl", "parrot", "whale"), 20)


def test_the_database_of_mlflow_is_where_the_docs_say():
    place = Config(state=State(Path("/STATE"))).tracking_uri.removeprefix("sqlite:////STATE/")
    named = {page: re.findall(r"sqlite:///\S*?(?:state/mqmk|STATE)/(\S+?\.db)", page.read_text()) for page in PAGES}
    assert named[ROOT / "README.md"] and named[ROOT / "docs" / "mlflow.md"]
    assert {each for found in named.values() for each in found} == {place}


@pytest.mark.parametrize("use", ["statsu", "status --jsn", "predict", "pack a b", "stop --seconds x", "bench sped"])
def test_a_command_that_does_not_exist_would_be_noticed(use):
    with pytest.raises(click.UsageError):
        parse(cli, shlex.split(use))


def test_uses_are_found_in_blocks_and_in_the_text(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "Type `mqmk-daemon status\n--json`, not `mqmk-daemon` or `mqmk-daemon pack ...`.\n"
        "```sh\n"
        "X=1 mqmk-daemon stop && /bin/mqmk-daemon tasks | jq .   # mqmk-daemon forget x\n"
        "systemctl stop mqmk-daemon\nmake test\n"
        "mqmk-daemon pack a \\\n    b --task 'c d'\n"
        "```\n"
    )
    assert commands_of(page) == ["stop", "tasks", "pack a b --task 'c d'", "status --json", "pack --help"]
