"""The commands of docs/quickstart.md, typed by a shell in a new folder: a real daemon, with Ray and Serve."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image
from ports import free_port

from mqmk.learner import sketches

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "quickstart.md").read_text()
COMMANDS = "".join(re.findall(r"^```sh\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE))
CLASSES = {"photos": ("bicycle", "owl", "teapot"), "more-photos": ("crab", "guitar")}
LEARNED, ASIDE = 20, 5
BIN = Path(sys.executable).parent


def draw(folder: Path) -> None:
    """What a user brings; sketches, which the embedded backbone is good at."""
    for source, labels in CLASSES.items():
        for label in labels:
            drawings = sketches.read(label).training[: LEARNED + ASIDE]
            for number, drawing in enumerate(drawings):
                place = folder / (source if number < LEARNED else "aside") / label
                if source == "photos" or number < LEARNED:
                    place.mkdir(parents=True, exist_ok=True)
                    Image.fromarray(drawing).save(place / f"{number}.png")


@pytest.fixture(scope="module")
def typed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """The folder after the last command, and all that was said."""
    folder, port = tmp_path_factory.mktemp("quickstart"), free_port()
    draw(folder)
    environment = {
        **os.environ,
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "COLUMNS": "160",
        "MQMK_SERVE_PORT": str(port),
        "MQMK_METRICS_PORT": str(free_port()),
        "MQMK_TRAIN_EPOCHS": "3",
        "MQMK_GATE_FRESH_PROCESS": "false",
    }
    script = "set -ex\n" + COMMANDS.replace("127.0.0.1:8000", f"127.0.0.1:{port}")
    with (folder / "said").open("w") as said:  # not a pipe: Ray, left behind by a failure, would keep it open
        done = subprocess.run(
            ["bash", "-c", script], cwd=folder, env=environment, stdout=said, stderr=said, check=False
        )
    try:
        text, log = (folder / "said").read_text(), (folder / "daemon.log").read_text()
        assert done.returncode == 0, f"{text[-4000:]}\n{log[-2000:]}"
        yield folder, text
    finally:
        subprocess.run([BIN / "mqmk-daemon", "stop", "--state", folder / "state"], capture_output=True, check=False)


def test_both_folders_are_learned_and_served(typed):
    _, text = typed
    assert "things: SERVING\n" in text
    assert "more-things: SERVING\n" in text
    assert text.splitlines()[-1] == "serving stopped"


def test_pictures_kept_aside_are_answered_before_and_after_the_second_task(typed):
    _, text = typed
    first, second = re.findall(r"accuracy ([0-9.]+)% of (\d+) pictures", text)
    for accuracy, pictures in (first, second):
        assert int(pictures) == len(CLASSES["photos"]) * ASIDE
        assert float(accuracy) > 100 / 3
    assert text.count("│ aside/owl/") == ASIDE
    assert re.search(r'\{"id":"[^"]+","label":"(bicycle|owl|teapot)"', text)


def test_the_report_shows_both_versions(typed):
    folder, _ = typed
    page = (folder / "report.html").read_text()
    assert "learn things" in page
    assert "2 (current)" in page
