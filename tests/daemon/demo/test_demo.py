"""The demo: a real daemon learns before one's eyes, every figure is of that moment, and nothing is left running."""

import hashlib
import json
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from mqmk.daemon.config.sections import Config, State
from mqmk.daemon.demo.daemon import DemoDaemon, choose_port
from mqmk.daemon.demo.tasks import own_tasks, sketch_tasks
from mqmk.daemon.errors import DaemonError
from mqmk.daemon.ray_runtime.head import head_processes
from mqmk.daemon.ray_runtime.processes import arguments, processes
from mqmk.learner.data import sketches
from mqmk.learner.data.manifest import DEFAULT_HOLDOUT
from mqmk.learner.data.shards import is_held_out
from mqmk.learner.errors import PackError

COMMAND = Path(sys.executable).with_name("mqmk-daemon")
SECONDS = 480
KINDS = ("served", "exact", "single_query")


@dataclass(frozen=True)
class Run:
    """One finished run."""

    state: Path
    document: dict[str, Any]
    said: str


def left_over(state: Path) -> list[tuple[str, ...]]:
    """Command lines of living processes that belong to a demo."""
    named = [arguments(each.pid) for each in processes() if str(state) in " ".join(arguments(each.pid))]
    return named + [arguments(each.pid) for each in head_processes(state / "ray")]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    state = tmp_path_factory.mktemp("demo") / "state"
    options = ["--tasks", "3", "--exit", "--json", "--state", str(state), "--set", "train.epochs=3"]
    done = subprocess.run([COMMAND, "demo", *options], capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    return Run(state, json.loads(done.stdout), done.stderr)


def test_every_task_is_served_by_a_version_of_its_own(run):
    assert [task["name"] for task in run.document["tasks"]] == list(sketches.TASKS)[:3]
    assert [task["state"] for task in run.document["tasks"]] == ["SERVING"] * 3
    assert [task["version"] for task in run.document["tasks"]] == [1, 2, 3]
    for number, found in enumerate(run.document["rounds"], start=1):
        assert found["tasks"] == number
        assert found["served"]["versions"][0] >= number
        assert {found[kind]["asked"] for kind in KINDS} == {number * 5 * 20}


def test_it_says_how_long_each_step_of_a_task_took(run):
    steps = ["noticed", "checked", "begun", "learned", "judged", "published", "swapped in"]
    for task in run.document["tasks"]:
        assert list(task["seconds"]) == steps
        assert all(seconds >= 0 for seconds in task["seconds"].values())
        assert task["seconds"]["learned"] > 0
    seconds = run.document["seconds"]
    assert 0 < seconds["first_served"] < seconds["all_served"] < seconds["total"] < SECONDS


def test_its_figures_are_consistent_and_above_chance(run):
    for found in run.document["rounds"]:
        for answers in (found[kind] for kind in KINDS):
            assert 1 / found["classes"] < answers["accuracy"] <= 1
            assert 1 / found["tasks"] <= answers["matching_rate"] <= 1
            assert answers["accuracy"] == pytest.approx(sum(answers["by_task"].values()) / found["tasks"])
            assert answers["queries"] >= 1
    first, last = run.document["rounds"][0], run.document["rounds"][-1]
    assert first["served"]["forgetting"] == 0
    assert last["served"]["accuracy"] > 0.6
    learned = [each["served"]["by_task"][each["after"]] for each in run.document["rounds"]]
    lost = [before - now for before, now in zip(learned, last["served"]["by_task"].values(), strict=True)]
    assert last["served"]["forgetting"] == pytest.approx(sum(lost) / 3)


def test_the_served_matcher_finds_the_task_at_least_as_often_as_a_single_query(run):
    for found in run.document["rounds"]:
        assert found["exact"]["matcher"] == "mqmk"
        assert found["single_query"]["matcher"] == "sqsk"
        assert found["served"]["matching_rate"] >= found["single_query"]["matching_rate"]
        assert found["exact"]["matching_rate"] >= found["single_query"]["matching_rate"]


def test_no_image_that_is_asked_about_was_in_the_bucket(run):
    shards = list((run.state / "bucket" / "tasks").glob("*/*.tar"))
    learned = set()
    for shard in shards:
        with tarfile.open(shard) as tar:
            learned |= {tar.extractfile(member).read() for member in tar if member.name.endswith(".png")}
    asked = {path.read_bytes() for path in (run.state / "questions").rglob("*.png")}
    assert len(shards) == 3
    assert len(learned) > 1100
    assert len(asked) > 290
    assert not learned & asked


def test_lines_say_what_happens_where_there_is_no_terminal(run):
    for words in (
        "birds: validating",
        "birds: serving in v1",
        "the page is up: http://127.0.0.1:",
        "after fruit, 15 classes",
    ):
        assert words in run.said
    assert "mlflow ui --backend-store-uri sqlite:///" in run.said
    assert run.document == json.loads((run.state / "demo.json").read_text())


def test_nothing_is_left_running(run):
    assert left_over(run.state) == []


@pytest.fixture
def own_images(tmp_path: Path) -> Path:
    for task in ("birds", "sea"):
        sketches.write_class_folders(task, tmp_path / "own", 12)
    return tmp_path / "own"


@pytest.fixture
def running(tmp_path: Path, own_images: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    options = ["--data", str(own_images), "--tasks", "2", "--state", str(tmp_path / "state")]
    for setting in ("train.epochs=1", "mlflow.enabled=false", "gate.fresh_process=false", "gate.accuracy_floor=0"):
        options += ["--set", setting]
    with subprocess.Popen([COMMAND, "demo", *options], stdout=subprocess.PIPE, text=True) as process:
        yield process, tmp_path / "state"
        process.kill()


def test_it_learns_own_class_folders_and_a_signal_ends_all_of_it(running):
    process, state = running
    deadline = time.monotonic() + SECONDS
    for line in process.stdout:
        assert time.monotonic() < deadline
        if "after part-2, 10 classes, 20 unseen images" in line:
            break
    assert left_over(state) != []
    process.send_signal(signal.SIGTERM)
    said = process.stdout.read()
    assert process.wait(60) == 128 + signal.SIGTERM
    assert f"mqmk-daemon start --state {state}" in said
    assert left_over(state) == []


def test_own_classes_are_split_into_tasks_and_some_images_kept_back(own_images, tmp_path):
    tasks = own_tasks(own_images, 3, max_images=1000)
    assert [task.name for task in tasks] == ["part-1", "part-2", "part-3"]
    assert [label for task in tasks for label in task.classes] == sorted(path.name for path in own_images.iterdir())
    for task in tasks:
        learned = {path.read_bytes() for path in task.write(tmp_path / task.name).rglob("*.png")}
        asked = {question.path.read_bytes() for question in task.unseen}
        assert len(asked) == 2 * len(task.classes)
        assert len(learned) == 10 * len(task.classes)
        assert not learned & asked


def test_what_the_daemon_judges_a_task_by_is_left_to_it(own_images, tmp_path):
    images = [path.read_bytes() for path in own_images.rglob("*.png")]
    held_out = {each for each in images if is_held_out(hashlib.sha256(each).digest(), DEFAULT_HOLDOUT)}
    left = set()
    for task in own_tasks(own_images, 2, max_images=1000):
        left |= {path.read_bytes() for path in task.write(tmp_path / task.name).rglob("*.png")}
    assert len(held_out) > 10
    assert held_out <= left


def test_files_that_are_no_images_are_all_named(own_images, tmp_path):
    own = shutil.copytree(own_images, tmp_path / "with-notes")
    names = sorted(path.name for path in own.iterdir())[:2]
    for name in names:
        (own / name / "notes.txt").write_text("mine")
    with pytest.raises(PackError) as caught:
        own_tasks(own, 2, max_images=1000)
    assert [line.strip() for line in str(caught.value).splitlines()[1:]] == [
        str(own / name / "notes.txt") for name in names
    ]


def test_copies_of_an_image_stay_on_one_side(tmp_path):
    for number in range(20):
        folder = tmp_path / "own" / ("a" if number % 2 else "b")
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("L", (8, 8), number // 4 * 10).save(folder / f"{number}.png")
    (task,) = own_tasks(tmp_path / "own", None, max_images=1000)
    learned = {path.read_bytes() for path in task.write(tmp_path / "written").rglob("*.png")}
    for question in task.unseen:
        assert question.path.read_bytes() not in {
            path.read_bytes() for path in (tmp_path / "written" / question.label).iterdir()
        }
    assert learned


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--tasks", "11"), "--tasks: expected 1 to 10 tasks of sketches, got 11"),
        (("--questions", "3"), "--questions: expected at least one for each of 50 classes, got 3"),
        (("--set", "train.epochs=0"), "train.epochs: expected a whole number of at least 1"),
        (("--set", "bucket.url=s3://bucket"), "the demo drops tasks into a folder"),
        (("--set", "serve.enabled=false"), "the demo needs the service"),
        (("--state", str(Path(__file__).parent)), "is not empty; the demo starts from scratch"),
    ],
)
def test_a_wrong_wish_is_one_line_that_says_what_to_type(options, words, tmp_path):
    given = ["--state", str(tmp_path / "state"), *options]
    done = subprocess.run([COMMAND, "demo", *given], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_too_few_images_of_a_class_are_refused(tmp_path):
    sketches.write_class_folders("birds", tmp_path, 3)
    with pytest.raises(DaemonError, match="expected at least 5 images of every class, flamingo has 3"):
        own_tasks(tmp_path, None, max_images=1000)


def test_fewer_questions_are_the_same_number_for_every_class(tmp_path):
    tasks = sketch_tasks(2, tmp_path, max_images=35)
    counts = {label: 0 for task in tasks for label in task.classes}
    for question in (question for task in tasks for question in task.unseen):
        counts[question.label] += 1
    assert set(counts.values()) == {3}


def watched(daemon: DemoDaemon, seconds: float = 60) -> None:
    """Look until there is nothing to look at."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        daemon.status()
        time.sleep(0.1)


def test_a_daemon_that_dies_is_reported_with_its_last_words(tmp_path):
    config = Config(state=State(tmp_path))
    settings = {"state.dir": str(tmp_path), "train.epochs": "none at all"}
    with (
        DemoDaemon(config, settings) as daemon,
        pytest.raises(DaemonError, match=r"(?s)exited with code 1.*train\.epochs.*mqmk-daemon doctor"),
    ):
        watched(daemon)


def test_a_port_is_free_or_refused():
    first = choose_port()
    assert choose_port(None, first) != first
    with socket.create_server(("127.0.0.1", first)), pytest.raises(DaemonError, match="is already in use"):
        choose_port(first)
