"""A build computes each query once, and what one task lost is no other task's loss."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.daemons.daemon import Parts, daemon, drop, small_config

from mqmk.daemon.builder.held_out_files import HeldOutFiles, pixel_reader
from mqmk.daemon.config.sections import Config, Gate
from mqmk.daemon.state_dir import StateDir
from mqmk.learner.evaluation.sample import choose_sample, image_ids
from mqmk.learner.settings import TrainSettings
from mqmk.matcher.golden import INPUTS


def quick(folder: Path) -> Config:
    train = TrainSettings(epochs=1, batch=16, e_length=2)
    return small_config(folder, gate=Gate(accuracy_floor=0.0, fresh_process=False), train=train)


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A state directory with birds, fruit and the sea in three versions."""
    folder = tmp_path_factory.mktemp("learned")
    for task in ("birds", "fruit", "sea"):
        drop(folder / "bucket", task, per_class=6)
    parts = daemon(quick(folder))
    parts.run()
    assert [parts.ledger.task(row.tasks[0].task).name for row in parts.ledger.versions()] == ["birds", "fruit", "sea"]
    parts.close()
    return folder


@pytest.fixture
def copied(learned: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(learned, tmp_path / "copy"))


def counted(parts: Parts) -> list[int]:
    """For how many images each pass from now on computes a query."""
    rows: list[int] = []
    vit = parts.orchestrator.workers._runner.vit  # type: ignore[attr-defined]
    run_query = vit.query
    vit.query = lambda stem, *prompts: (rows.append(len(stem)), run_query(stem, *prompts))[1]
    return rows


def images_of(parts: Parts) -> int:
    return int(parts.ledger.versions()[-1].evaluation["held_out"])


@pytest.mark.parametrize(("task", "computed"), [("fruit", "Q+"), ("sea", "nothing")])
def test_forgetting_computes_no_query_of_a_task_again(copied: Path, task: str, computed: str) -> None:
    """Only Q+, whose prompt is the mean of those that are left: known where the last task goes, new elsewhere."""
    parts = daemon(quick(copied))
    rows = counted(parts)
    parts.ledger.enqueue_command("forget", task)
    parts.run()
    assert parts.ledger.versions()[-1].kind == "forget" and parts.states[task] == "FORGOTTEN"
    replayed = INPUTS * (3 + 2)  # by the gate, for the tasks of the old pool and of the new one
    assert sum(rows) - replayed == (images_of(parts) if computed == "Q+" else 0)
    parts.close()


def test_a_build_after_a_rollback_takes_over_what_later_versions_computed(copied: Path) -> None:
    parts = daemon(quick(copied))
    rows = counted(parts)
    for kind, subject in (("rollback", "2"), ("forget", "birds")):
        parts.ledger.enqueue_command(kind, subject)
        parts.run()
    assert parts.states == {"birds": "FORGOTTEN", "fruit": "PUBLISHED", "sea": "HELD"}
    assert sum(rows) - INPUTS * (2 + 1) == images_of(parts)  # Q+
    parts.close()


def test_held_out_images_that_were_lost_are_nobody_elses_loss(copied: Path, tmp_path: Path) -> None:
    """The same figures as if no table of queries were there, and as good as none is one of another format."""
    other = Path(shutil.copytree(copied, tmp_path / "without-tables"))
    for path in (other / "state" / "evaluations").glob("*.safetensors"):
        if path.stat().st_size % 2:
            path.write_bytes(b"damaged")
        else:  # as they were before rows had names
            save_file({"own": torch.ones(9, 3, 64), "plus": torch.ones(9, 64), "plain": torch.ones(9, 64)}, path)
    documents = []
    for folder in (copied, other):
        parts = daemon(quick(folder))
        (birds,), (fruit,) = parts.ledger.tasks_named("birds"), parts.ledger.tasks_named("fruit")
        parts.files.held_out(str(birds.identity)).unlink()
        parts.files.held_out(str(fruit.identity)).write_bytes(b"damaged")
        drop(folder / "bucket", "clothes", per_class=6)
        parts.run()
        assert parts.states["clothes"] == "PUBLISHED"
        documents.append(parts.ledger.versions()[-1].evaluation)
        parts.close()
    assert documents[0]["tasks"].keys() == {"sea", "clothes"}
    assert documents[0] == documents[1]


def test_a_sample_smaller_than_the_held_out_images_bounds_the_queries(copied: Path) -> None:
    config = quick(copied)
    parts = daemon(replace(config, evaluate=replace(config.evaluate, max_images=8)))
    rows = counted(parts)
    drop(copied / "bucket", "clothes", per_class=6)
    parts.run()
    found = parts.ledger.versions()[-1].evaluation
    assert found["sampled"] is True and found["images"] == 8 < found["held_out"]
    assert found["tasks"]["clothes"]["images"] > 0, "by its own images, whether they are in the sample or not"
    assert sum(rows) > 0
    parts.close()


def test_held_out_files_of_older_releases_and_files_that_changed_are_read(tmp_path: Path) -> None:
    files, path = HeldOutFiles(), tmp_path / "task.safetensors"
    pixels, labels = torch.randint(0, 256, (4, 3, 8, 8), dtype=torch.uint8), torch.tensor([0, 1, 0, 1])
    save_file({"pixels": pixels, "labels": labels}, path)
    (old,) = files.list_images([path])
    save_file({"pixels": pixels, "labels": labels, "ids": image_ids(pixels)}, path)
    (new,) = files.list_images([path])
    assert [*old.ids] == [*new.ids] and [*new.labels] == [0, 1, 0, 1]
    assert files.list_images([path])[0] is new, "remembered"
    sample = choose_sample([new], 3)
    read = pixel_reader([path], sample)(torch.tensor([2, 0]))
    assert torch.equal(read, pixels[sample.place[[2, 0]]])
    path.write_bytes(path.read_bytes()[:-1])
    assert len(files.list_images([path])[0].ids) == 0
    path.unlink()
    assert len(files.list_images([path])[0].ids) == 0


def test_figures_of_versions_that_are_gone_are_removed(tmp_path: Path) -> None:
    files = StateDir(tmp_path)
    for number in range(9):
        folder = files.evaluation(f"{number}" * 64)
        folder.mkdir(parents=True)
        os.utime(folder, (number, number))
    (files.evaluations / f"{'0' * 64}.safetensors").write_bytes(b"")
    files.prune_evaluations({"1" * 12})
    assert sorted(path.name[0] for path in files.evaluations.iterdir() if path.is_dir()) == [*"145678"]
    assert files.records("0" * 64).exists()
    StateDir(tmp_path / "absent").prune_evaluations(set())
