"""The accuracy benchmark learns a folder as a stream of tasks and reports what it measured."""

import dataclasses
import json
import os
import pty
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from mqmk.learner.bench.accuracy import AccuracySettings, run_stream, sweep_prompts, to_json
from mqmk.learner.data import sketches
from mqmk.learner.data.streams import StreamSettings, read_stream
from mqmk.learner.errors import LearnerError
from mqmk.learner.evaluation.ablations import key_ablations
from mqmk.learner.evaluation.query_table import QueryTable, extend
from mqmk.learner.settings import TrainSettings
from mqmk.matcher.backbone import load_backbone

COMMAND = Path(sys.executable).with_name("mqmk-daemon")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Nine classes of sketches as train/CLASS/*.png and test/CLASS/*.png."""
    root = tmp_path_factory.mktemp("sketches")
    for name in (*sketches.TASKS["birds"], *sketches.TASKS["fruit"][:4]):
        drawings = sketches.read(name)
        for side, part in (("train", drawings.training[:20]), ("test", drawings.held_out[:10])):
            (root / side / name).mkdir(parents=True)
            for number, drawing in enumerate(part):
                Image.fromarray(drawing).save(root / side / name / f"{number:04d}.png")
    return root


@pytest.fixture(scope="module")
def vit():
    return load_backbone()


@pytest.fixture(scope="module")
def settings(folder) -> AccuracySettings:
    train = TrainSettings(epochs=2, batch=32, e_length=4)
    return AccuracySettings(StreamSettings(folder, tasks=3), train, ("sqsk", "mqmk", "cascade", "perfect"), joint=True)


@pytest.fixture(scope="module")
def run(vit, settings):
    return run_stream(vit, settings, seed=0)


def test_a_stream_holds_every_class_once_and_keeps_test_images_apart(folder, vit):
    tasks = list(read_stream(StreamSettings(folder, tasks=4), vit.info, seed=0))
    assert sorted(len(task.classes) for task in tasks) == [2, 2, 2, 3]
    assert len({name for task in tasks for name in task.classes}) == 9
    other = list(read_stream(StreamSettings(folder, tasks=4), vit.info, seed=1))
    assert [task.classes for task in tasks] != [task.classes for task in other]
    for task in tasks:
        training = {pixels.numpy().tobytes() for pixels in task.training.pixels}
        assert not training & {pixels.numpy().tobytes() for pixels in task.held_out.pixels}
        assert len(task.training) == 20 * len(task.classes)
        assert len(task.held_out) == 10 * len(task.classes)


def test_a_label_belongs_to_its_own_images(folder, vit):
    task = next(iter(read_stream(StreamSettings(folder, tasks=9), vit.info, seed=0)))
    expected = sketches.read(task.classes[0]).training[:20]
    assert np.array_equal(task.training.pixels[:, 0].numpy(), expected)


def test_too_many_tasks_and_unequal_folders_are_refused(folder, vit, tmp_path):
    with pytest.raises(LearnerError, match="expected 1 to 9 tasks of 9 classes, got 10"):
        list(read_stream(StreamSettings(folder, tasks=10), vit.info, seed=0))
    (tmp_path / "train" / "a").mkdir(parents=True)
    with pytest.raises(
        LearnerError, match=r"expected train/CLASS/\* and test/CLASS/\* .* found 1 classes to train on and 0"
    ):
        list(read_stream(StreamSettings(tmp_path, tasks=1), vit.info, seed=0))


def test_every_task_is_evaluated_after_every_task(run):
    assert [len(row["mqmk"].task_accuracy_task) for row in run.tallies] == [1, 2, 3]
    assert run.tallies[0]["mqmk"].matching_rate == 1.0  # one task cannot be mistaken
    assert run.figures("perfect")["matching_rate"] == 1.0
    assert run.figures("perfect")["accuracy_task"] > 0.5
    assert 0 < run.plain_ncm <= 1
    assert 0.2 < run.joint_accuracy <= 1


def test_a_g_prompt_that_goes_on_changing_leaves_no_stale_queries(vit, settings):
    train = dataclasses.replace(settings.train, epochs=1, g_prompt="always")
    evaluation = run_stream(vit, dataclasses.replace(settings, train=train, joint=False), seed=0).evaluation
    anew = extend(QueryTable.empty(vit.dim), vit, evaluation.pool, evaluation.held_out)
    torch.testing.assert_close(evaluation.table.task_queries, anew.task_queries, atol=1e-5, rtol=1e-5)


def test_the_document_has_the_promised_fields(run, settings, vit):
    document = to_json(settings, vit, [run, run], 1.0)
    fields = {"matching_rate", "accuracy_all", "accuracy_task", "forgetting", "forgetting_max", "recall_at_3"}
    assert document.keys() >= {"settings", "matchers", "seconds"}
    assert document["matchers"].keys() == {"sqsk", "mqmk", "cascade", "perfect"}
    for row in document["matchers"].values():
        assert row.keys() >= fields
        assert row["matching_rate_spread"] == 0.0
    for by_seed in document["history"].values():  # a(t, n) of both read-outs, for each seed and after each task
        for steps in by_seed:
            assert [len(step["task_accuracy_all"]) for step in steps] == [1, 2, 3]
            assert [len(step["task_accuracy_task"]) for step in steps] == [1, 2, 3]
    assert len(document["history"]["mqmk"]) == 2
    assert json.loads(json.dumps(document["history"])) is not None
    assert json.loads(json.dumps(document)) == document


def test_the_deviation_is_that_of_a_sample_and_one_seed_has_none(run, settings, vit):
    other = dataclasses.replace(run, tallies=run.tallies[:1])  # one task cannot be mistaken: another matching rate
    rates = [each.figures("sqsk")["matching_rate"] for each in (run, other)]
    row = to_json(settings, vit, [run, other], 1.0)["matchers"]["sqsk"]
    assert row["matching_rate_spread"] == pytest.approx(abs(rates[0] - rates[1]) / 2**0.5)
    assert row["matching_rate_spread"] > 0
    assert to_json(settings, vit, [run], 1.0)["matchers"]["sqsk"]["matching_rate_spread"] is None


def test_ablations_of_the_keys_need_no_further_training(run):
    found = key_ablations(run.evaluation)
    one_key = run.evaluation.tally("mqsk")
    assert found["keys per task"]["1"].confusion == one_key.confusion
    assert found["classifier"].keys() == {"fc", "ncm", "km"}
    assert found["top-K"]["1"] == run.evaluation.tally("mqmk")
    assert found["shortlist"]["3"].matching_rate == run.evaluation.tally("mqmk").matching_rate  # three tasks in all


def test_length_and_depth_of_prompts_are_runs_of_their_own(vit, settings):
    quick = dataclasses.replace(settings, train=dataclasses.replace(settings.train, epochs=1), joint=False)
    swept = dataclasses.replace(quick, stream=dataclasses.replace(quick.stream, train_per_class=4), lengths=(1, 4),
                                layers=((3,),))  # fmt: skip
    found = sweep_prompts(vit, swept)
    assert {choice: [*values] for choice, values in found.items()} == {
        "e-prompt length": ["1", "4"],
        "e-prompt blocks": ["3-3"],
    }
    same = run_stream(vit, dataclasses.replace(swept, matchers=("mqmk",)), seed=0)  # of length 4, too
    assert found["e-prompt length"]["4"]["matching_rate"] == same.tallies[-1]["mqmk"].matching_rate
    assert sweep_prompts(vit, settings) == {}


def test_the_command_prints_json_draws_progress_and_writes_a_report(folder, tmp_path):
    options = "--tasks 2 --epochs 1 --train-per-class 5 --matchers sqsk,mqmk --seeds 2 --html report.html --json"
    command = [COMMAND, "bench", "accuracy", "--data", folder, *options.split()]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    document = json.loads(found.stdout)
    assert document["matchers"].keys() == {"sqsk", "mqmk"}
    assert document["settings"]["stream"]["tasks"] == 2
    assert "seed 1  task 2/2  epoch 1/1" in found.stderr
    assert "matching rate" in (tmp_path / "report.html").read_text().lower()


def test_options_of_training_and_ablations_reach_the_document_and_the_report(folder, tmp_path):
    options = "--tasks 2 --epochs 1 --train-per-class 5 --matchers mqmk --e-layers 3-4 --e-length 3 --start random"
    extra = "--patches 0.5 --g-prompt always --keys learned --ablations --sweep-length 2 --html report.html --json"
    command = [COMMAND, "bench", "accuracy", "--data", folder, *options.split(), *extra.split()]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    document = json.loads(found.stdout)
    train = document["settings"]["train"]
    assert (train["e_layers"], train["e_length"], train["start"]) == ([3, 4], 3, "random")
    assert (train["patches"], train["g_prompt"], train["keys"]) == (0.5, "always", "learned")
    assert document["ablations"].keys() == {
        "keys per task", "top-K", "classifier", "shortlist", "e-prompt length",
    }  # fmt: skip
    best = document["matchers"]["mqmk"]["matching_rate"]
    assert document["ablations"]["top-K"]["1"]["matching_rate"] == pytest.approx(best)
    assert 'id="ablations"' in (tmp_path / "report.html").read_text()


def test_a_terminal_shows_a_table_that_is_redrawn_in_place(folder, tmp_path):
    screen, side = pty.openpty()
    options = "--tasks 2 --epochs 1 --train-per-class 2 --test-per-class 2 --matchers mqmk,perfect"
    command = [COMMAND, "bench", "accuracy", "--data", folder, *options.split()]
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "100"}
    running = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=side, env=environment)
    os.close(side)
    shown = b""
    while True:
        try:
            shown += os.read(screen, 4096)
        except OSError:  # Linux says so when the other side was closed
            break
    printed, _ = running.communicate(timeout=60)
    os.close(screen)
    assert running.returncode == 0
    assert "after 1 of 2 tasks" in shown.decode()
    assert "after 2 of 2 tasks" in shown.decode()
    assert b"\x1b[1A" in shown  # the cursor goes up, over what it wrote before
    assert "no prompts, nearest class mean" in printed.decode()


@pytest.mark.shared
def test_real_weights_on_real_images_learn_two_tasks(assets, tmp_path):
    with tarfile.open(assets / "cifar100-200x50.tar") as archive:
        wanted = ("apple", "bicycle", "castle", "dolphin", "lion", "rocket")
        members = [member for member in archive if Path(member.name).parent.name in wanted]
        archive.extractall(tmp_path, members, filter="data")
    vit = load_backbone("deit_tiny_patch16_224", weights=assets / "deit_tiny_patch16_224.safetensors", image_size=64)
    stream = StreamSettings(tmp_path / "cifar100", tasks=2, train_per_class=40, test_per_class=10)
    run = run_stream(
        vit, AccuracySettings(stream, TrainSettings(epochs=4, batch=16), ("sqsk", "mqmk", "perfect")), seed=0
    )
    assert run.figures("perfect")["accuracy_task"] > 0.6
    assert run.figures("mqmk")["accuracy_task"] > 0.4
