"""An evaluation at a thousand tasks: bounded queries, memory and files."""

import resource
import time
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import torch
from safetensors.torch import save_file
from support.builders import frozen, random_pool, random_task, random_timm_vit
from support.noise import count_queries

from mqmk.daemon.builder.held_out_files import HeldOutFiles
from mqmk.daemon.builder.version_evaluation import EvaluatedPool
from mqmk.daemon.builder.version_evaluator import VersionEvaluator
from mqmk.daemon.config.sections import Config, Evaluate
from mqmk.daemon.state_dir import StateDir
from mqmk.learner.evaluation.sample import image_ids
from mqmk.matcher.pool import PromptPool, TaskPrompt
from mqmk.matcher.prompted_vit import FrozenViT

TASKS = 1000
MAX_IMAGES = 60


def peak_memory() -> int:
    """Of this process, in bytes."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


class Many:
    """A pool of many tasks with two held-out images of each of five classes, and what evaluates it."""

    def __init__(self, folder: Path, tasks: int, max_images: int) -> None:
        self.vit: FrozenViT = frozen(random_timm_vit())
        self.config = Config(evaluate=Evaluate(max_images=max_images))
        self.files, self.held_out = StateDir(folder), HeldOutFiles()
        self.files.held_out("x").parent.mkdir()
        self.pool: PromptPool = replace(
            random_pool((), vit=self.vit), tasks=tuple(self.new_task(n) for n in range(tasks))
        )

    def new_task(self, number: int) -> TaskPrompt:
        identity = sha256(str(number).encode()).hexdigest()
        pixels, labels = torch.randint(0, 256, (10, 3, 12, 12), dtype=torch.uint8), torch.arange(5).repeat(2)
        tensors = {"pixels": pixels, "labels": labels, "ids": image_ids(pixels)}
        save_file(tensors, self.files.held_out(identity))
        task = random_task(f"task{number}", 5)
        return replace(task, manifest_sha256=identity, factor=None, residual=None, feature_means=None)

    def evaluate(self, digest: str, added: int = 1) -> EvaluatedPool:
        evaluator = VersionEvaluator(self.vit, self.config, self.files, self.held_out, self.pool)
        measured = evaluator.evaluate(added)
        evaluator.save(measured.files, digest)
        return measured


def test_a_build_at_a_thousand_tasks_is_bounded(tmp_path: Path) -> None:
    many = Many(tmp_path, TASKS, MAX_IMAGES)
    rows = count_queries(many.vit)
    many.evaluate("a" * 64)
    assert sum(rows) <= 12 * MAX_IMAGES + TASKS, "nothing was recorded yet"
    for number in range(2):
        many.pool = many.pool.with_task(many.new_task(TASKS + number))
        rows.clear()
        begun, peak = time.process_time(), peak_memory()
        found = many.evaluate(f"{number}" * 64)
        assert time.process_time() - begun < 60
        assert peak_memory() - peak < 200e6
        assert sum(rows) <= 4 * MAX_IMAGES + TASKS + number + 1, "one row more, until all are complete"
        assert found.document["images"] == MAX_IMAGES and found.document["sampled"] is True
        exact = found.document["matchers"]["mqmk"]
        assert exact["sampled"] is True and exact["images"] == number + 2
        assert found.document["tasks"][f"task{TASKS + number}"]["images"] == 10
        assert len(found.document["tasks"]) <= MAX_IMAGES + 1
        assert sum(map(len, found.files.values())) < 3_000_000
    assert many.files.records("0" * 64).stat().st_size < 3_000_000


def test_with_all_rows_complete_a_build_computes_at_most_four_queries_an_image(tmp_path: Path) -> None:
    many = Many(tmp_path, 20, 100)
    for number in range(6):
        many.evaluate(f"{number}" * 64, added=0)
    rows = count_queries(many.vit)
    for number in range(4):
        many.pool = many.pool.with_task(many.new_task(20 + number))
        rows.clear()
        found = many.evaluate(f"{number}" * 64)
        assert sum(rows) <= 4 * 100
        assert found.document["matchers"]["mqmk"]["images"] == 100


def test_a_lost_file_shrinks_the_sample_and_damaged_records_are_computed_again(tmp_path: Path) -> None:
    many = Many(tmp_path, 4, 1000)
    before = many.evaluate("a" * 64)
    rows = count_queries(many.vit)
    assert many.evaluate("b" * 64).document == before.document and not rows
    for path in many.files.evaluations.glob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:100])
    assert many.evaluate("c" * 64).document == before.document and rows
    many.files.held_out(many.pool.tasks[0].manifest_sha256).unlink()
    found = many.evaluate("d" * 64).document
    assert (before.document["held_out"], found["held_out"]) == (40, 30)
    assert found["tasks"].keys() == {"task1", "task2", "task3"}


def test_a_budget_of_one_image_is_enough_to_judge_a_task(tmp_path: Path) -> None:
    many = Many(tmp_path, 3, 1)
    for matcher in ("auto", "mqmk", "mqmk-ei"):
        many.config = replace(many.config, serve=replace(many.config.serve, matcher=matcher))
        found = many.evaluate("a" * 64).document
        assert found["images"] == 1 and found["tasks"]["task2"]["images"] == 1
        assert found["tasks"]["task2"]["accuracy_given_task"] in {n / 10 for n in range(11)}, "of all ten images"
