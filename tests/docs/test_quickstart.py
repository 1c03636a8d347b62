"""The commands of README and docs/quickstart.md, typed by a shell in a new folder: a real daemon with Ray and Serve."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.shell import run_commands, save_sketches

ROOT = Path(__file__).resolve().parents[2]
CLASSES = {"photos": ("bicycle", "owl", "teapot"), "more-photos": ("crab", "guitar")}
LEARNED, ASIDE = 20, 5


def commands(page: str) -> list[str]:
    """What a page tells to type, by blocks."""
    return re.findall(r"^```sh\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def quick_start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """The folder after the last command, and all that was said."""
    folder = tmp_path_factory.mktemp("quickstart")
    for source, labels in CLASSES.items():
        for label in labels:
            save_sketches(folder / source, label, 0, LEARNED)
    for label in CLASSES["photos"]:
        save_sketches(folder / "aside", label, LEARNED, LEARNED + ASIDE)
    with run_commands("".join(commands("docs/quickstart.md")), folder, ["--state", str(folder / "state")]) as said:
        yield folder, said


def test_both_folders_are_learned_and_served(quick_start):
    _, text = quick_start
    assert "things: SERVING\n" in text
    assert "more-things: SERVING\n" in text
    assert text.splitlines()[-1] == "serving stopped"


def test_images_kept_aside_are_answered_before_and_after_the_second_task(quick_start):
    _, text = quick_start
    first, second = re.findall(r"accuracy ([0-9.]+)% \(±[0-9.]+, (\d+) images\)", text)
    for accuracy, images in (first, second):
        assert int(images) == len(CLASSES["photos"]) * ASIDE
        assert float(accuracy) > 100 / 3
    assert len(re.findall(r"^ *aside/owl/", text, re.MULTILINE)) == ASIDE
    assert re.search(r'\{"id":"[^"]+","label":"(bicycle|owl|teapot)"', text)


def test_the_report_shows_both_versions(quick_start):
    folder, _ = quick_start
    page = (folder / "report.html").read_text()
    assert "learn things" in page
    assert "2 (current)" in page


def test_what_readme_tells_to_type_works_from_a_users_home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("readme")
    for source, labels in {"photos": ("owl", "penguin"), "more": ("hammer", "saw")}.items():
        for label in labels:
            save_sketches(folder / source, label, 0, LEARNED)
    save_sketches(folder, "owl", LEARNED, LEARNED + 1)
    shutil.move(next((folder / "owl").iterdir()), folder / "heron.jpg")
    two_commands, run_it = commands("README.md")
    assert re.findall(r"^make (\w+) ", two_commands, re.MULTILINE) == ["demo", "test"]
    with run_commands(run_it, folder, environment={"HOME": str(folder), "XDG_STATE_HOME": ""}) as text:
        assert "birds: SERVING\n" in text
        assert "tools: SERVING\n" in text
        assert re.search(r"heron\.jpg +(owl|penguin) ", text)
        assert text.splitlines()[-1] == "serving stopped"
