"""What becomes of tasks that are dropped into the bucket."""

import errno
import os
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.daemons.daemon import daemon, drop, small_config

from mqmk.daemon.app import outbound_for
from mqmk.daemon.builder.smoke_test import SmokeTest
from mqmk.daemon.config.sections import Config, Gate, Pools, Retry
from mqmk.daemon.errors import BucketError, RegistryError, WorkerDied
from mqmk.daemon.jobs import Build, Failed
from mqmk.daemon.ledger.ledger import State
from mqmk.daemon.pipeline.retry import RetryLater, decide
from mqmk.daemon.registry.in_memory import MemoryRegistry
from mqmk.daemon.replicas import Replica
from mqmk.learner.data.pack import pack
from mqmk.matcher.errors import PoolError
from mqmk.matcher.pool_store import PoolStore


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A state directory with three tasks in three versions."""
    folder = tmp_path_factory.mktemp("learned")
    for task in ("sea", "birds", "fruit"):
        drop(folder / "bucket", task)
    parts = daemon(small_config(folder))
    parts.run()
    assert parts.states == {"birds": "PUBLISHED", "fruit": "PUBLISHED", "sea": "PUBLISHED"}
    parts.close()
    return folder


def test_every_task_becomes_one_version_recorded_and_current(learned: Path) -> None:
    registry = MemoryRegistry()
    parts = daemon(small_config(learned), registry=registry)
    versions = parts.ledger.versions()
    assert [(row.version, row.parent, row.step) for row in versions] == [
        (1, None, "PUBLISHED"), (2, 1, "PUBLISHED"), (3, 2, "PUBLISHED"),
    ]  # fmt: skip
    current = parts.files.store.current()
    assert current and current.version == 3
    pool = parts.files.store.read(current)
    assert [task.name for task in pool.tasks] == [parts.ledger.task(row.tasks[0].task).name for row in versions]
    assert [*parts.files.store.paths()] == [1, 2, 3]
    assert pool.matching["matchers"].keys() == set(parts.config.evaluate.matchers)
    for task in parts.ledger.tasks():
        assert 0 <= task.metrics["matching_rate"] <= 1 and task.metrics["accuracy_given_task"] > 0.3
    for task, version in zip(pool.tasks, versions, strict=True):
        reached = version.evaluation["tasks"][task.name]
        assert task.metrics == {name: round(value, 4) for name, value in reached.items()}, "when it was learned"


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


QUICK = Gate(accuracy_floor=0.0, fresh_process=False)


def quick(folder: Path, **sections: object) -> Config:
    return small_config(folder, **({"gate": QUICK} | sections))


def test_the_same_content_under_another_name_is_a_no_op(tmp_path: Path) -> None:
    drop(tmp_path / "bucket", "sea", per_class=6)
    parts = daemon(quick(tmp_path))
    parts.run()
    drop(tmp_path / "bucket", "sea", "sea-again", per_class=6)
    parts.run()
    assert parts.states == {"sea": "PUBLISHED"} and len(parts.ledger.versions()) == 1
    assert "task.duplicate_found" in [event.event for event in parts.ledger.events()]


def test_the_same_name_with_other_content_is_a_conflict_that_is_shown_and_never_trained(tmp_path: Path) -> None:
    drop(tmp_path / "bucket", "sea", per_class=6)
    parts = daemon(quick(tmp_path))
    parts.run()
    (tmp_path / "bucket" / "tasks" / "sea").rename(tmp_path / "old")
    drop(tmp_path / "bucket", "birds", "sea", per_class=6)
    parts.run()
    rows = parts.ledger.tasks_named("sea")
    assert [row.state for row in rows] == [State.PUBLISHED, State.CONFLICT]
    assert "forget sea first" in (rows[1].reason or "") and len(parts.ledger.versions()) == 1


def test_a_bad_task_is_quarantined_with_its_reason_and_learned_once_it_is_fixed(tmp_path: Path) -> None:
    drop(tmp_path / "bucket", "sea", per_class=6)
    shard = next((tmp_path / "bucket" / "tasks" / "sea").glob("*.tar"))
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-600])
    drop(tmp_path / "bucket", "birds", per_class=6)
    parts = daemon(quick(tmp_path))
    parts.run()
    (sea,) = parts.ledger.tasks_named("sea")
    assert parts.states == {"sea": "QUARANTINED", "birds": "PUBLISHED"}
    assert sea.code and sea.reason and shard.name in sea.reason
    shard.write_bytes(whole)
    parts.ledger.enqueue_command("retry", "sea")
    parts.run()
    assert parts.states == {"sea": "PUBLISHED", "birds": "PUBLISHED"}


def test_a_manifest_that_is_no_manifest_is_quarantined_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "bucket" / "tasks" / "odd"
    folder.mkdir(parents=True)
    (folder / "TASK.json").write_text("{}")
    parts = daemon(quick(tmp_path))
    time.sleep(0.3)
    parts.run()
    time.sleep(0.3)
    parts.run()
    (odd,) = parts.ledger.tasks_named("odd")
    assert odd.state is State.QUARANTINED and odd.code == "bad-manifest"
    drop(tmp_path / "other", "sea", "odd", per_class=6)
    shutil.copytree(tmp_path / "other" / "tasks" / "odd", folder, dirs_exist_ok=True)
    parts.ledger.enqueue_command("retry", "odd")
    parts.run()
    assert [task.state for task in parts.ledger.tasks_named("odd")] == [State.PUBLISHED], "one row, mended"


def test_shards_without_a_manifest_become_a_task_once_they_settled(tmp_path: Path) -> None:
    manifest = drop(tmp_path / "bucket", "sea", per_class=6)
    (tmp_path / "bucket" / "tasks" / "sea" / "TASK.json").unlink()
    parts = daemon(quick(tmp_path))
    deadline = time.monotonic() + 20
    while parts.states.get("sea") != "PUBLISHED" and time.monotonic() < deadline:
        parts.run(3)
        time.sleep(0.1)
    (sea,) = parts.ledger.tasks_named("sea")
    assert sea.state is State.PUBLISHED and b'"settled"' in (parts.ledger.manifest_bytes(sea) or b"")
    assert sea.identity == manifest.identity


def test_what_the_gate_refuses_is_held_and_served_when_an_operator_promotes_it(tmp_path: Path) -> None:
    drop(tmp_path / "bucket", "sea", per_class=6)
    config = quick(tmp_path, gate=Gate(accuracy_floor=1.0, fresh_process=False))
    parts = daemon(config)
    parts.run()
    (sea,) = parts.ledger.tasks_named("sea")
    assert sea.state is State.HELD and "below gate.accuracy_floor" in (sea.reason or "")
    assert parts.files.store.current() is None and parts.ledger.versions() == []
    parts.ledger.enqueue_command("promote", "sea")
    parts.run()
    current = parts.files.store.current()
    assert parts.states == {"sea": "PUBLISHED"} and current and current.version == 1


def test_a_task_without_held_out_images_is_held_unless_configured(tmp_path: Path) -> None:
    drop(tmp_path / "bucket", "sea", per_class=6, holdout=0.0)
    parts = daemon(quick(tmp_path))
    parts.run()
    assert parts.states == {"sea": "HELD"}
    allowed = quick(tmp_path, gate=Gate(without_held_out="promote", fresh_process=False))
    parts.ledger.enqueue_command("promote", "sea")
    parts = daemon(allowed)
    parts.run()
    assert parts.states == {"sea": "PUBLISHED"}


def test_rolling_back_holds_later_tasks_and_the_next_version_builds_on_what_is_current(tmp_path: Path) -> None:
    for task in ("sea", "birds"):
        drop(tmp_path / "bucket", task, per_class=6)
    registry = MemoryRegistry()
    parts = daemon(quick(tmp_path), registry=registry)
    parts.run()
    command = parts.ledger.enqueue_command("rollback", "1")
    parts.run()
    first, second = (parts.ledger.task(row.tasks[0].task).name for row in parts.ledger.versions())
    assert parts.ledger.command(command.id).state == "DONE"
    assert parts.states == {first: "PUBLISHED", second: "HELD"} and registry.serving() == 1
    drop(tmp_path / "bucket", "fruit", per_class=6)
    parts.run()
    parts.ledger.enqueue_command("promote", second)
    parts.run()
    rows = [(row.version, row.parent) for row in parts.ledger.versions()]
    assert rows == [(1, None), (2, 1), (3, 1), (4, 3)]
    current = parts.files.store.current()
    assert current and [task.name for task in parts.files.store.read(current).tasks] == [first, "fruit", second]
    assert registry.serving() == 4 and [version.version for version in registry.versions()] == [1, 2, 3, 4]


def is_down(_record: object) -> str:
    raise RegistryError("MLflow is down")


def test_only_the_newest_versions_and_the_current_one_are_kept_and_none_that_mlflow_lacks(tmp_path: Path) -> None:
    themes = ("sea", "birds", "fruit", "travel")
    for task in themes[:3]:
        drop(tmp_path / "bucket", task, per_class=6)
    registry = MemoryRegistry()
    parts = daemon(quick(tmp_path), registry=registry)
    parts.run()
    assert [*parts.files.store.paths()] == [1, 2, 3]
    parts.ledger.enqueue_command("rollback", "1")
    parts.run()
    kept = replace(quick(tmp_path), pools=Pools(keep=1))
    parts = daemon(kept, registry=registry)
    parts.run()
    assert [*parts.files.store.paths()] == [1, 3], "the current one stays, however old"
    refused = parts.ledger.enqueue_command("rollback", "2")
    parts.run()
    answer = parts.ledger.command(refused.id)
    assert answer.state == "REFUSED" and "version 2 cannot be read" in (answer.answer or "")
    assert parts.files.store.current().version == 1, "CURRENT never names what is not there"
    registry.record_training = is_down
    drop(tmp_path / "bucket", themes[3], per_class=6)
    parts.run()
    assert [*parts.files.store.paths()] == [4], "1 and 3 were recorded and are not current any more"
    parts.ledger.enqueue_command("promote", parts.ledger.task(parts.ledger.versions()[1].tasks[0].task).name)
    parts.run()
    assert [*parts.files.store.paths()] == [4, 5], "4 waits for MLflow"


def test_versions_that_were_dropped_before_mlflow_was_switched_on_are_recorded_without_their_files(tmp_path) -> None:
    for task in ("sea", "birds", "fruit"):
        drop(tmp_path / "bucket", task, per_class=6)
    config = replace(quick(tmp_path), pools=Pools(keep=1))
    parts = daemon(replace(config, mlflow=replace(config.mlflow, enabled=False)))
    parts.outbound = outbound_for(config, parts.ledger, parts.files, None)
    parts.run()
    assert [*parts.files.store.paths()] == [3]
    registry = MemoryRegistry()
    parts = daemon(config, registry=registry)
    drop(tmp_path / "bucket", "travel", per_class=6)
    parts.run()
    assert [record.card is not None for record in registry.recorded.values()] == [False, False, True, True]
    assert registry.serving() == 4
    assert [each.up for each in parts.ledger.health() if each.dependency == "mlflow"] == [True]


def test_a_pool_that_cannot_be_recorded_stops_nothing_but_the_records(tmp_path: Path) -> None:
    for task in ("sea", "birds"):
        drop(tmp_path / "bucket", task, per_class=6)
    config = quick(tmp_path)
    parts = daemon(config)
    parts.outbound = outbound_for(config, parts.ledger, parts.files, None)
    parts.run()
    next(parts.files.store.versions.glob("1-*")).write_text("{}")
    parts = daemon(replace(config, bucket=replace(config.bucket, after_learning="move")))
    parts.run()
    assert [each.up for each in parts.ledger.health() if each.dependency == "mlflow"] == [False]
    assert len([*(tmp_path / "bucket" / "learned").iterdir()]) == 2, "the pass went on to its end"


def test_what_a_killed_daemon_left_of_a_removed_version_is_removed_with_its_layers(tmp_path) -> None:
    for task in ("sea", "birds"):
        drop(tmp_path / "bucket", task, per_class=6)
    registry = MemoryRegistry()
    parts = daemon(replace(quick(tmp_path), pools=Pools(keep=1)), registry=registry)
    parts.run()
    store = parts.files.store
    current = store.card(store.current())
    assert [*store.paths()] == [2] and names_in(store.layers) == current.files
    again = store.versions / registry.fetch_pool(1, store).card
    store.write(
        replace(store.assemble(current), tasks=(), g_prompt=torch.ones(2, 2, 5, 64), anchor=None),
        9,
        None,
        cards=tmp_path,
    )
    store.remove(again)  # and killed before its layers were collected
    assert names_in(store.layers) > current.files
    parts.close()
    parts = daemon(parts.config, registry=registry)
    registry.fetch_pool(1, store)
    parts.run()
    assert [*store.paths()] == [2] and names_in(store.layers) == current.files
    assert [path.name for path in store.folder.glob(".*")] == []
    parts.close()


def test_a_version_that_was_being_built_on_a_removed_one_is_built_again(tmp_path: Path) -> None:
    for task in ("sea", "birds"):
        drop(tmp_path / "bucket", task, per_class=6)
    parts = daemon(quick(tmp_path))
    parts.run()
    drop(tmp_path / "bucket", "fruit", per_class=6)
    work = parts.orchestrator.workers._runner
    do, moved = work.run, []

    def rolled_back_meanwhile(job: object, report: object) -> object:
        if isinstance(job, Build) and not moved:
            moved.append(parts.orchestrator.publisher.move_to(1))
            raise PoolError("the parent's folder is gone")
        return do(job, report)

    work.run = rolled_back_meanwhile
    parts.run()
    (fruit,) = parts.ledger.tasks_named("fruit")
    assert moved and fruit.state is State.PUBLISHED and not fruit.failures
    assert parts.ledger.versions()[-1].parent == 1


def test_forgetting_publishes_a_version_without_the_task_and_deletes_its_data(tmp_path: Path) -> None:
    for task in ("sea", "birds"):
        drop(tmp_path / "bucket", task, per_class=6)
    registry = MemoryRegistry()
    parts = daemon(quick(tmp_path), registry=registry)
    parts.run()
    kept, gone = (parts.ledger.task(row.tasks[0].task) for row in parts.ledger.versions())
    assert gone.identity and parts.files.held_out(gone.identity).exists()
    command = parts.ledger.enqueue_command("forget", gone.name)
    parts.run()
    answer = parts.ledger.command(command.id)
    assert answer.state == "DONE" and "exactly: nothing" in (answer.answer or "")
    assert parts.states == {kept.name: "PUBLISHED", gone.name: "FORGOTTEN"}
    assert not parts.files.held_out(gone.identity).exists() and not parts.files.work(gone.identity).exists()
    current = parts.files.store.current()
    assert current and [task.name for task in parts.files.store.read(current).tasks] == [kept.name]
    assert [path.stem for path in parts.files.records("x").parent.glob("*.safetensors")] == [current.digest]
    assert [(each.task, each.exact) for each in registry.deletions()] == [(gone.name, True)]
    refused = parts.ledger.enqueue_command("rollback", "2")
    parts.run()
    assert parts.ledger.command(refused.id).state == "REFUSED"
    command = parts.ledger.enqueue_command("forget", kept.name)
    parts.run()
    current = parts.files.store.current()
    assert current and parts.files.store.read(current).tasks == () and parts.states[kept.name] == "FORGOTTEN"


def test_a_task_is_serving_when_as_many_replicas_as_are_wanted_hold_its_version(tmp_path: Path) -> None:
    drop(tmp_path / "bucket", "sea", per_class=6)
    parts = daemon(quick(tmp_path))
    parts.run()
    current = parts.files.store.current()
    assert current
    parts.serving.live = [Replica("a", current.version, current.digest), Replica("b", None, None)]
    parts.run()
    assert parts.states == {"sea": "PUBLISHED"}
    parts.serving.live, parts.serving.wanted = [Replica("a", current.version, current.digest)], 2
    parts.run()
    assert parts.states == {"sea": "PUBLISHED"}, "the other one is gone, or has not reported yet"
    parts.serving.live.append(Replica("c", current.version, current.digest))
    parts.run()
    assert parts.states == {"sea": "SERVING"}


def test_a_worker_that_dies_is_tried_again_and_a_task_that_always_fails_is_given_up(tmp_path: Path) -> None:
    drop(tmp_path / "bucket", "sea", per_class=6)
    parts = daemon(quick(tmp_path))
    work = parts.orchestrator.workers._runner
    learn, failures = work.learn, [WorkerDied("gone"), MemoryError("out of memory")]

    def sometimes(job: object, report: object) -> object:
        if failures:
            raise failures.pop(0)
        return learn(job, report)

    work.learn = sometimes
    parts.run()
    (sea,) = parts.ledger.tasks_named("sea")
    assert sea.state is State.PUBLISHED and sea.split == 2
    drop(tmp_path / "bucket", "birds", per_class=6)
    failures += [RuntimeError("no")] * 9
    parts.run()
    (birds,) = parts.ledger.tasks_named("birds")
    assert birds.state is State.QUARANTINED and birds.code == "gave-up" and "no" in (birds.reason or "")


def test_a_gate_that_gets_no_answer_in_time_asks_again_and_holds_nothing(tmp_path: Path) -> None:
    drop(tmp_path / "bucket", "sea", per_class=6)
    config = quick(tmp_path)
    parts = daemon(replace(config, gate=replace(config.gate, fresh_process=True)))
    fresh = parts.orchestrator.workers._runner._smoke_test
    fresh.seconds = 0.0  # on a machine that is busy with other things
    parts.run(passes=2)
    (sea,) = parts.ledger.tasks_named("sea")
    assert sea.state is State.TRAINED and sea.failures and "did not answer within 0 s" in (sea.reason or "")
    fresh.seconds = 120.0
    parts.run()
    assert parts.states == {"sea": "PUBLISHED"}
    parts.close()


def test_a_part_is_not_called_healthy_while_a_task_waits_because_of_it(tmp_path: Path) -> None:
    drop(tmp_path / "bucket", "sea", per_class=6)
    parts = daemon(quick(tmp_path, retry=Retry(attempts=3, first_seconds=60.0, max_seconds=60.0)))
    workers = parts.orchestrator.workers
    real, full = workers.start, OSError(errno.ENOSPC, "No space left on device", "state")
    workers.start = lambda job: workers._updates.append(Failed(job, full))
    parts.run(3)
    assert [(each.up, each.message) for each in parts.ledger.health() if each.dependency == "disk"] == [
        (False, "No space left on device: state")
    ], "an alert can see it, however many passes go well"
    workers.start, parts.orchestrator.clock = real, lambda: time.time() + 61
    parts.run()
    assert parts.states == {"sea": "PUBLISHED"}
    assert [each.up for each in parts.ledger.health() if each.dependency == "disk"] == [True]
    parts.close()


def test_what_cannot_be_forgotten_yet_is_served_on_and_not_called_forgotten(tmp_path: Path) -> None:
    for task in ("sea", "birds"):
        drop(tmp_path / "bucket", task, per_class=6)
    parts = daemon(quick(tmp_path))
    parts.run()
    work = parts.orchestrator.workers._runner
    do, failures = work.run, [RuntimeError("no")] * 9

    def sometimes(job: object, report: object) -> object:
        if failures:
            raise failures.pop(0)
        return do(job, report)

    work.run = sometimes
    command = parts.ledger.enqueue_command("forget", "birds")
    parts.run(passes=5)
    (birds,) = parts.ledger.tasks_named("birds")
    assert birds.state is State.PUBLISHED and "no" in (birds.reason or "") and birds.identity
    assert parts.ledger.command(command.id).state == "PENDING" and parts.files.held_out(birds.identity).exists()
    parts.run()
    assert parts.states["birds"] == "FORGOTTEN" and not failures
    assert parts.ledger.command(command.id).state == "DONE"
    parts.close()


def test_the_pause_before_another_try_has_an_upper_end_however_long_a_bucket_is_down() -> None:
    found = decide(BucketError("down"), 5000, 1, Retry(first_seconds=1.0, max_seconds=300.0))
    assert isinstance(found, RetryLater) and found.seconds == 300.0


def test_shards_are_tidied_as_configured_and_the_task_is_not_reopened(tmp_path: Path) -> None:
    drop(tmp_path / "bucket", "sea", per_class=6)
    config = quick(tmp_path)
    config = replace(config, bucket=replace(config.bucket, after_learning="move"))
    parts = daemon(config)
    parts.run()
    assert not (tmp_path / "bucket" / "tasks" / "sea" / "TASK.json").exists()
    assert (tmp_path / "bucket" / "learned" / "sea" / "TASK.json").exists()
    parts.orchestrator.bucket.scan({}, everything=True)
    parts.run()
    assert parts.states == {"sea": "PUBLISHED"} and len(parts.ledger.versions()) == 1


def test_two_tasks_with_one_class_in_common_are_not_both_learned(tmp_path: Path) -> None:
    drop(tmp_path / "bucket", "sea", per_class=6)
    from support.daemons.daemon import class_folders

    mixed = tmp_path / "mixed"
    for source in (class_folders("sea", 6) / "crab", class_folders("birds", 6) / "owl"):
        (mixed / source.name).mkdir(parents=True)
        for number, image in enumerate(sorted(source.iterdir())[:6]):
            (mixed / source.name / image.name).write_bytes(image.read_bytes() + bytes([number]))
    pack(mixed, tmp_path / "bucket" / "tasks", "zoo", holdout=0.3)
    parts = daemon(quick(tmp_path))
    parts.run()
    assert parts.states == {"sea": "PUBLISHED", "zoo": "QUARANTINED"}
    assert parts.ledger.tasks_named("zoo")[0].code == "class-overlap"


EMBEDDED = {"name": "embedded", "weights": None, "sha256": None, "image_size": None}


@pytest.fixture(scope="module")
def fresh() -> Iterator[SmokeTest]:
    fresh = SmokeTest()
    yield fresh
    fresh.close()


def test_a_pool_that_does_not_load_in_a_fresh_process_is_refused_with_the_reason(
    learned: Path, tmp_path: Path, fresh: SmokeTest
) -> None:
    store = PoolStore(learned / "state" / "pools")
    (card,) = store.cards(1)
    path = store.versions / card.identity.card
    assert fresh.find_error(store.folder, path, EMBEDDED) is None
    for name in sorted(card.files):
        shutil.copytree(store.folder, tmp_path / name)
        (tmp_path / name / "layers" / name).write_bytes(b"no")
        assert "wrong sha256" in (fresh.find_error(tmp_path / name, path, EMBEDDED) or "")
    assert fresh.find_error(store.folder, path, EMBEDDED) is None, "one bad pool does not spoil the next answer"


def test_a_smoke_test_that_hangs_ends_with_its_timeout(learned: Path, tmp_path: Path, fresh: SmokeTest) -> None:
    """A file that never comes: the fork waits in `open`, and holds the pipe that its asker reads."""
    store, copy = PoolStore(learned / "state" / "pools"), tmp_path / "copy"
    (card,) = store.cards(1)
    path = store.versions / card.identity.card
    shutil.copytree(store.folder, copy)
    stalled = copy / "layers" / f"{card.tasks[0].layer}.safetensors"
    stalled.unlink()
    os.mkfifo(stalled)
    found = fresh.find_error(store.folder, path, EMBEDDED)
    assert found is None, "the process is up: only the question takes its time now"
    fresh.seconds = 1.0
    raised: list[BaseException] = []

    def ask() -> None:
        with pytest.raises(WorkerDied) as caught:
            fresh.find_error(copy, path, EMBEDDED)
        raised.append(caught.value)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(10)
    release = None if raised else os.open(stalled, os.O_RDWR)  # or the thread would be left behind
    assert raised and "did not answer within 1 s" in str(raised[0])
    assert release is None
    fresh.seconds = 120.0


def test_a_folder_that_changed_since_it_was_learned_is_left_alone_and_the_ledger_says_so(tmp_path: Path) -> None:
    drop(tmp_path / "bucket", "sea", per_class=6)
    config = quick(tmp_path)
    parts = daemon(config)
    parts.run()
    parts.close()
    manifest = tmp_path / "bucket" / "tasks" / "sea" / "TASK.json"
    manifest.write_bytes(manifest.read_bytes() + b" ")
    parts = daemon(replace(config, bucket=replace(config.bucket, after_learning="delete")))
    parts.run()
    events = [event.event for event in parts.ledger.events()]
    assert "task.cleanup_skipped" in events and "task.cleaned_up" not in events
    assert manifest.exists() and any(manifest.parent.glob("*.tar"))
    parts.close()
