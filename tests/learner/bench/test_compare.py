"""The comparison runs every method under one protocol, goes on where it was stopped, and reports what it measured."""

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from PIL import Image
from support.builders import frozen, random_timm_vit
from support.method_tasks import QUICK, coloured

from mqmk.daemon.cli.bench.compare import compare as command
from mqmk.learner.bench import compare as comparison
from mqmk.learner.bench.compare import (
    CompareSettings,
    compare,
    measure_figures,
    predict_all,
    run_method,
    search_rate,
    to_json,
)
from mqmk.learner.bench.estimate import Estimate, split_methods
from mqmk.learner.bench.figures import compare_prompts, evaluate_pool
from mqmk.learner.bench.methods.parts import trained_pool
from mqmk.learner.bench.methods.parts.protocol import Answer, MethodInfo
from mqmk.learner.bench.methods.registry import choose_methods
from mqmk.learner.data.streams import StreamSettings, read_stream
from mqmk.learner.evaluation.query_table import HeldOut
from mqmk.learner.report.compare_report import FIGURES, write_compare_report


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Five classes of coloured noise as train/CLASS/*.png and test/CLASS/*.png."""
    root = tmp_path_factory.mktemp("colours")
    for label in range(5):
        for side, count, seed in (("train", 20, 1), ("test", 3, 2)):
            (root / side / f"class{label}").mkdir(parents=True)
            for number, pixels in enumerate(coloured([label] * count, 10 * label + seed, size=28).pixels):
                array = pixels.permute(1, 2, 0).numpy()
                Image.fromarray(array).save(root / side / f"class{label}" / f"{number}.png")
    return root


@pytest.fixture(scope="module")
def vit():
    torch.manual_seed(0)
    return frozen(random_timm_vit())


@pytest.fixture(scope="module")
def settings(folder) -> CompareSettings:
    train = dataclasses.replace(QUICK.train, batch=64)
    return CompareSettings(StreamSettings(folder, tasks=2), train, width=24, replay=4, replay_epochs=1)


class Always:
    """Answers with the first class, and keeps what it was shown."""

    trained = 3

    def __init__(self, rate: float = 1.0) -> None:
        self.rate, self.shown, self.batches, self.classes = rate, [], [], 0

    def learn(self, task):
        self.shown.append((len(task.training), len(task.held_out), task.classes))
        self.classes += len(task.classes)

    def predict(self, images):
        self.batches.append(len(images))
        first = torch.zeros(len(images), dtype=torch.int64)
        return Answer(torch.eye(self.classes)[first], first)

    def kept(self):
        return {"numbers": torch.zeros(7)}


def info_of(create, **options) -> MethodInfo:
    return MethodInfo("always", "prompts", "answers with the first class", create, **options)


def test_a_method_sees_training_images_of_one_task_at_a_time_and_is_measured_on_all(vit, settings):
    made = []
    run = run_method(vit, info_of(lambda *_: made.append(Always()) or made[-1]), settings, seed=0)
    (method,) = made
    assert [(images, held_out) for images, held_out, _ in method.shown] == [(40, 0), (60, 0)]
    assert [len(step.task_accuracy) for step in run.steps] == [1, 2]
    first, last = run.steps
    assert first.task_accuracy == (0.5,) and first.matching_rate == 1 and first.correct_unmatched is None
    assert last.task_accuracy == (0.5, 0.0)
    assert last.accuracy == pytest.approx(3 / 15)
    assert last.matching_rate == last.task_of_answer == pytest.approx(6 / 15)
    assert last.confusion == ((6, 0), (9, 0))
    assert (last.correct_unmatched, last.trained, last.kept) == (0, 3, 7)
    figures = run.figures()
    assert figures["accuracy"] == 0.25 and figures["forgetting"] == 0 and figures["test_passes"] == 0


def test_joint_training_gets_all_tasks_as_one_and_is_measured_task_by_task(vit, settings):
    made = []
    run = run_method(vit, info_of(lambda *_: made.append(Always()) or made[-1], is_joint=True), settings, seed=0)
    assert [(images, len(classes)) for images, _, classes in made[0].shown] == [(100, 5)]
    assert [len(step.task_accuracy) for step in run.steps] == [2]
    figures = run.figures()
    assert figures["matching_rate"] is None and figures["forgetting"] is None
    assert figures["task_of_answer"] == pytest.approx(6 / 15)


def test_batches_mix_tasks_but_for_methods_with_the_batch_bug(vit, settings):
    held_out = HeldOut.empty(12)
    for number, task in enumerate(read_stream(settings.stream, vit.info, 0)):
        held_out = held_out.with_task(number, task.held_out)

    class Spy(Always):
        def predict(self, images):
            self.batches.append(images)
            means = images.mean(dim=(1, 2, 3))
            return Answer(torch.stack([means, -means], dim=1))

    mixed, apart = Spy(), Spy()
    answers = [predict_all(vit, spy, held_out, 0, mixed=spy is mixed).scores for spy in (mixed, apart)]
    assert torch.equal(*answers)  # in the order of the images, whatever the batches
    assert [len(batch) for batch in mixed.batches] == [15]
    assert [len(batch) for batch in apart.batches] == [6, 9]


def test_the_learning_rate_is_chosen_on_training_images_that_were_not_learned(vit, settings):
    (first, _) = read_stream(dataclasses.replace(settings.stream, tasks=2), vit.info, 0)
    big = dataclasses.replace(first, training=coloured([0, 0, 0, 1] * 50, 3))
    tried = []

    class Rated(Always):
        def predict(self, images):
            return Answer(torch.tensor([[float(self.rate == 3), 0.5]]).expand(len(images), 2))

    def create(_, given):
        tried.append(Rated(given.rate))
        return tried[-1]

    info = info_of(create, searches_rate=True)
    assert search_rate(vit, info, settings, 0, big) == 3  # which answers with the common class
    assert [method.rate for method in tried] == [1, 3, 10]
    assert all(method.shown[0][0] == 180 for method in tried)
    assert search_rate(vit, info_of(create), settings, 0, big) == 1
    assert search_rate(vit, info, dataclasses.replace(settings, rates=(5.0,)), 0, big) == 5
    assert len(tried) == 3


def test_a_finished_method_and_seed_is_not_run_again(vit, settings, tmp_path, monkeypatch):
    methods = choose_methods("ncm,joint-linear")
    settings = dataclasses.replace(settings, seeds=2)
    runs = compare(vit, methods, settings, tmp_path)
    assert len(list(tmp_path.iterdir())) == 4
    monkeypatch.setattr(comparison, "run_method", lambda *_: pytest.fail("run again"))
    assert compare(vit, methods, settings, tmp_path) == runs
    monkeypatch.undo()
    (next(tmp_path.glob("ncm-seed1-*"))).unlink()
    shown = []
    assert compare(vit, methods, settings, tmp_path, shown.append)[1].figures()["accuracy"] == pytest.approx(
        runs[1].figures()["accuracy"]
    )
    assert [progress.is_known for progress in shown] == [True, True, False, False, True]
    other = dataclasses.replace(settings, seeds=1, train=dataclasses.replace(settings.train, epochs=2))
    compare(vit, methods[:1], other, tmp_path)
    assert len(list(tmp_path.iterdir())) == 5


def test_rates_are_searched_on_the_first_seed_and_kept_on_the_others(vit, settings, tmp_path, monkeypatch):
    searched, given = [], []
    monkeypatch.setattr(comparison, "search_rate", lambda *at: searched.append(at[3]) or 3.0)
    info = info_of(lambda _, chosen: given.append(chosen.rate) or Always(), searches_rate=True)
    two = dataclasses.replace(settings, seeds=2)
    compare(vit, [info], two, tmp_path)
    assert (searched, given) == ([0], [3.0, 3.0])
    next(tmp_path.glob("always-seed1-*")).unlink()
    compare(vit, [info], two, tmp_path)  # the first seed is known, and so is its rate
    assert (searched, given) == ([0], [3.0, 3.0, 3.0])


def test_the_time_left_falls_to_nothing_and_a_known_run_takes_none(vit, settings, tmp_path):
    methods, shown = choose_methods("ncm,mqmk,sqsk"), []
    whole = comparison.estimate_time(vit, methods, settings, tmp_path).seconds_left()
    assert whole > 0
    compare(vit, methods[:1], settings, tmp_path)
    assert comparison.estimate_time(vit, methods[:1], settings, tmp_path).seconds_left() == 0
    compare(vit, methods, settings, tmp_path, shown.append)
    assert shown[0].is_known and shown[0].seconds_left is None
    assert all(progress.seconds_left >= 0 for progress in shown[1:])


def test_a_run_is_counted_by_its_passes_and_a_shared_pool_once(vit, settings):
    def count(*names: str, rates: int = 1) -> float:
        pending = [(info, 0) for info in choose_methods(",".join(names))]
        return sum(Estimate(vit, settings.stream, 6, rates, pending)._passes.values())

    images = 100 + 15  # to train on and to test with, in 2 tasks
    assert count("ncm") == images / 2
    dual = choose_methods("dualprompt")[0]
    assert count("dualprompt") == pytest.approx(6 * 100 * 2.1 + dual.test_passes * 15 * 1.5 + images / 2)
    assert count("dualprompt", rates=3) - count("dualprompt") == pytest.approx(3 * 0.9 * 6 * 50 * 2.1)
    assert count("mqmk", "sqsk") < count("mqmk") + count("sqsk") - 6 * 100 * 1.8


def test_other_code_of_a_method_is_another_result(vit, settings, tmp_path):
    info, other = choose_methods("ncm,fecam")
    known = comparison.result_path(tmp_path, vit, info, settings, 0)
    assert comparison.result_path(tmp_path, vit, info, dataclasses.replace(settings, seeds=9), 0) == known
    assert comparison.result_path(tmp_path, vit, dataclasses.replace(info, create=other.create), settings, 0) != known


def test_the_document_and_the_page_show_every_method_with_its_history_and_source(vit, settings, tmp_path):
    methods = choose_methods("ncm,joint-linear,sqsk,mqmk,dualprompt", leaky=True)
    quick = dataclasses.replace(settings, rates=(1.0,))
    quick = dataclasses.replace(quick, figures=True, lengths=(2, 3), layers=((2,),))
    runs = compare(vit, methods, quick, tmp_path)
    document = to_json(quick, vit, methods, runs, measure_figures(vit, quick, tmp_path))
    assert json.loads(json.dumps(document)) == document
    rows = document["methods"]
    assert [len(step["task_accuracy"]) for step in rows["mqmk"]["runs"][0]["steps"]] == [1, 2]
    assert rows["ncm"]["published"]["source"] == "RanPAC, tables"
    assert rows["ncm"]["test_passes"] == pytest.approx(1)
    assert rows["dualprompt"]["test_passes"] == pytest.approx(2)
    assert rows["mqmk"]["matching_rate"] is not None and rows["ncm"]["matching_rate"] is None
    assert [name for name, row in rows.items() if row["is_leaky"]] == ["mqmk-leaky", "dualprompt-leaky"]
    for step, tasks in zip(rows["mqmk"]["runs"][0]["steps"], (1, 2), strict=True):  # a(t, n) of both read-outs
        assert len(step["task_accuracy_all"]) == len(step["task_accuracy_matched"]) == tasks
        assert step["task_accuracy_matched"] == step["task_accuracy"]
    assert (
        rows["sqsk"]["runs"][0]["steps"][1]["task_accuracy_all"] == rows["sqsk"]["runs"][0]["steps"][1]["task_accuracy"]
    )
    assert rows["ncm"]["runs"][0]["steps"][1]["task_accuracy_matched"] is None
    write_compare_report(tmp_path / "page.html", document)
    page = (tmp_path / "page.html").read_text()
    assert not re.search(r"<script|src=|href=\"http", page)
    for text in (
        "mqmk-leaky<small> not a result",
        "RanPAC, tables",
        "matched task",
        f"{100 * rows['mqmk']['accuracy']:.1f}",
    ):
        assert text in page, text


PAPER = [  # what the paper's figures and tables show, and where the page has it
    "lines", "maps", "prompts", "task-over-time", "queries", "depth-length", "keys-per-task", "top-k", "classifiers",
    "perfect", "cost", "published",
]  # fmt: skip


def test_the_page_has_a_section_for_every_figure_of_the_paper(vit, settings, tmp_path):
    assert [*FIGURES] == PAPER
    methods = choose_methods("sqsk,mqmk,ncm,joint-linear")
    two = dataclasses.replace(settings, figures=True, lengths=(2, 4), layers=((1, 2),))
    runs = compare(vit, methods, two, tmp_path)
    measured = measure_figures(vit, two, tmp_path)
    page = tmp_path / "page.html"
    write_compare_report(page, to_json(two, vit, methods, runs, measured))
    text = page.read_text()
    ids = re.findall(r'<section id="([^"]+)"', text)
    assert len(ids) == len(set(ids)) and {*PAPER} < {*ids}
    sections = dict(zip(ids, text.split("<section id=")[1:], strict=True))
    assert not any("Not measured" in sections[name] for name in PAPER)
    assert sections["queries"].count("<figure>") == 8  # four queries, by task and by class
    assert sections["maps"].count("<figure>") == 2 and "sqsk" in sections["maps"]
    assert "sequential" in sections["cost"] and "parallel" in sections["cost"]
    assert {*measured["e-prompt length"]} == {"2", "4"} and {*measured["e-prompt blocks"]} == {"1-2"}
    assert measured["e-prompt length"]["2"].keys() == {"sqsk", "mqmk"}
    write_compare_report(page, to_json(two, vit, methods, runs))  # without figures the page says how to get them
    assert [name for name in PAPER if f'id="{name}"' not in page.read_text()] == []
    assert page.read_text().count("Not measured") >= 5


def test_false_prompts_are_replaced_by_true_ones(vit, settings):
    evaluation, _ = evaluate_pool(vit, settings.stream, settings.for_method(0, 1.0))
    found, perfect = evaluation.match("sqsk"), evaluation.match("perfect")
    wrong = found.task != evaluation.held_out.task
    row = compare_prompts(evaluation, "sqsk")
    assert (row["images"], row["false_images"]) == (15, int(wrong.sum()))
    answers = {name: evaluation.is_correct(each, "fc", "all") for name, each in (("given", found), ("true", perfect))}
    assert row["all"]["perfect"] == pytest.approx(answers["true"].float().mean().item())
    assert row["all"]["true"] == pytest.approx(answers["given"][~wrong].float().mean().item())
    if wrong.any():
        assert row["all"]["false_to_true"] == pytest.approx(answers["true"][wrong].float().mean().item())
        assert row["task"]["false"] == 0  # among the classes of a false task the own one is not


def test_figures_take_the_pool_that_was_trained_for_the_methods(vit, settings, tmp_path, monkeypatch):
    trained, real = [], trained_pool.train_task
    monkeypatch.setattr(trained_pool, "train_task", lambda task, *rest: trained.append(task.name) or real(task, *rest))
    with_figures = dataclasses.replace(settings, figures=True)
    compare(vit, choose_methods("mqmk"), with_figures, tmp_path)
    assert trained == ["task00", "task01"]
    measure_figures(vit, with_figures, tmp_path)
    assert len(trained) == 2  # they are in the work folder


def test_the_command_lists_methods_writes_files_and_prints_the_table(folder, tmp_path):
    listed = CliRunner().invoke(command, ["--list"])
    assert listed.exit_code == 0
    assert re.search(r"^mqmk +pool", listed.output, re.MULTILINE)
    options = ["--data", folder, "--tasks", "2", "--methods", "ncm,fecam", "--train-per-class", "4", "--work", tmp_path,
               "--json", tmp_path / "all.json", "--html", tmp_path / "all.html"]  # fmt: skip
    found = CliRunner().invoke(command, [str(option) for option in options], catch_exceptions=False)
    assert found.exit_code == 0
    assert re.search(r"│ ncm +│ +83.40 │ +61.20 │ +- │ +- │ +RanPAC", found.output)
    assert "ncm: means of normalised features" in found.output
    assert "2 of 2 runs to do, about 0 min" in found.stderr
    assert re.search(r"ncm  seed 0  task 2/2  accuracy .*  \d+ min left", found.stderr)
    document = json.loads((tmp_path / "all.json").read_text())
    assert document["methods"].keys() == {"ncm", "fecam"}
    assert "All methods" in (tmp_path / "all.html").read_text()
    again = CliRunner().invoke(command, [str(option) for option in options], catch_exceptions=False)
    assert again.stderr.count("(known)") == 2


def test_jobs_share_the_methods_and_a_pool_stays_in_one(folder, tmp_path):
    parts = split_methods(choose_methods("all"), 2)
    assert sorted(info.name for part in parts for info in part) == sorted(info.name for info in choose_methods("all"))
    assert len({number for number, part in enumerate(parts) for info in part if info.shares_pool}) == 1
    options = ["--tasks", "2", "--methods", "ncm,fecam", "--train-per-class", "2", "--work", "work", "--jobs", "2"]
    command = [Path(sys.executable).parent / "mqmk-daemon", "bench", "compare", "--data", folder, *options]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert found.stderr.count("task 2/2") == 4 and found.stderr.count("(known)") == 2
    assert len(list((tmp_path / "work").iterdir())) == 2


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--methods", "best"], "no method is called best; choose among"),
        (["--methods", "mqmk-leaky"], "add --leaky"),
        (["--rates", "0,1"], "expected positive numbers, such as 1,3,10, got '0,1'"),
    ],
)
def test_what_cannot_be_compared_is_refused_with_its_reason(folder, options, reason):
    found = CliRunner().invoke(command, ["--data", str(folder), *options])
    assert found.exit_code != 0
    assert reason in f"{found.output} {found.exception}"
