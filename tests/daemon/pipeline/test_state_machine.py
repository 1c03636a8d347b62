"""Whatever happens in whatever order, the ledger, the pool store and what was said to operators agree.

`make model-test` looks further than `make test` does.
"""

import errno
import hashlib
import os
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from support.daemons.daemon import RELEASED, daemon, small_config
from support.daemons.invariants import problems
from support.daemons.state_model import Killed, Model, learned_before, manifest_of

from mqmk.daemon import failpoints
from mqmk.daemon.config.sections import Evaluate, Gate, Mlflow, Pools
from mqmk.daemon.errors import LedgerError, OutdatedError
from mqmk.daemon.jobs import Build, Failed, JobUpdate, Learn, Validate
from mqmk.daemon.ledger.ledger import Ledger, State
from mqmk.daemon.ledger.schema import migrate
from mqmk.daemon.pipeline.orchestrator import Orchestrator
from mqmk.daemon.pipeline.publisher import Publisher
from mqmk.daemon.registry.in_memory import MemoryRegistry
from mqmk.daemon.registry.recorder import Recorder
from mqmk.learner.settings import TrainSettings
from mqmk.matcher.errors import PoolError
from mqmk.matcher.pool_cards import PAGE
from mqmk.matcher.pool_store import Pointer, PoolStore

EXAMPLES = int(os.environ.get("MODEL_EXAMPLES", "2000"))
ALL = ("birds", "sea", "fruit", "tools")
NAMES = st.sampled_from(ALL)


class DaemonLife(RuleBasedStateMachine):
    """Drops, results, commands, kills and restarts in any order.

    Most commands are drawn from what is possible: of those drawn blindly, nearly all are refused.
    """

    model: Model

    @initialize(learned=st.integers(0, 3))
    def begin(self, learned: int) -> None:
        """So that there are versions to choose from at once."""
        self.model = Model(learned_before(*ALL[:learned]))

    @rule(folder=NAMES, name=NAMES, content=st.integers(0, 1))
    def drop(self, folder: str, name: str, content: int) -> None:
        self.model.drop(folder, name, content)
        self.model.run()

    @rule(content=st.integers(0, 1))
    def drop_all(self, content: int) -> None:
        """So that several wait at once."""
        for name in ALL:
            self.model.drop(name, name, content)
        self.model.run()

    @precondition(lambda self: self.model.workers.running())
    @rule(data=st.data(), how=st.sampled_from(["well"] * 6 + ["died", "rejected", "refused", "refused first"]))
    def result(self, data: st.DataObject, how: str) -> None:
        job = data.draw(st.sampled_from(self.model.workers.running()))
        self.model.finish(job, how)
        self.model.run()

    @precondition(lambda self: self.model.workers.over)
    @rule(data=st.data(), how=st.sampled_from(["well", "died", "rejected"]))
    def late_result(self, data: st.DataObject, how: str) -> None:
        self.model.finish_late(data.draw(st.sampled_from(self.model.workers.over)), how)
        self.model.run()

    @precondition(lambda self: self.model.likely_commands())
    @rule(data=st.data(), at_once=st.sampled_from([True, True, True, False]))
    def command(self, data: st.DataObject, at_once: bool) -> None:
        likely = self.model.likely_commands()
        kind = data.draw(st.sampled_from([*likely]))
        self.model.command(kind, data.draw(st.sampled_from(likely[kind])))
        if at_once:
            self.model.run()

    @rule(kind=st.sampled_from(["forget", "retry", "promote", "rollback"]),
          subject=NAMES | st.integers(1, 4).map(str))  # fmt: skip
    def blind_command(self, kind: str, subject: str) -> None:
        self.model.command(kind, subject)
        self.model.run()

    @precondition(lambda self: self.model.ledger.pending_commands())
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        command = data.draw(st.sampled_from(self.model.ledger.pending_commands()))
        with suppress(LedgerError):  # it is being applied
            self.model.ledger.cancel_command(command.id)
        self.model.run()

    @precondition(lambda self: self.model.workers.running())
    @rule(steps=st.integers(1, 3))
    def settle_jobs(self, steps: int) -> None:
        """Three steps take a task from the bucket into a version."""
        for _ in range(steps):
            for job in self.model.workers.running():
                self.model.finish(job)
            self.model.run()

    @rule(holds=st.booleans())
    def replicas_swap(self, holds: bool) -> None:
        current = self.model.files.store.current()
        self.model.serving.digest = current.digest if current and holds else None
        self.model.run()

    @rule(after=st.integers(0, 8))
    def kill(self, after: int) -> None:
        self.model.crash(after)

    def teardown(self) -> None:
        if not hasattr(self, "model"):  # it never began
            return
        try:
            self.model.settle()
        finally:
            self.model.close()


SEARCH = settings(
    max_examples=EXAMPLES, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck),
    derandomize=EXAMPLES <= 2000, print_blob=False,
)  # fmt: skip


@pytest.mark.timeout(1800)
def test_no_order_of_events_makes_the_daemon_say_what_is_not_so() -> None:
    run_state_machine_as_test(DaemonLife, settings=SEARCH)


def apply_late_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the check of the attempt once a job has ended."""
    real = Orchestrator._is_over
    monkeypatch.setattr(Orchestrator, "_is_over", lambda self, job: job in self.workers.running() and real(self, job))


def apply_late_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without that check for validations and trainings that failed."""
    real = Orchestrator._drop

    def drop(self: Orchestrator, update: JobUpdate) -> None:
        if isinstance(update, Failed) and not isinstance(update.job, Build):
            self._handle_failure(self.ledger.task(update.job.task), update.error)
        else:
            real(self, update)

    monkeypatch.setattr(Orchestrator, "_drop", drop)


def move_only_held_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A task that is promoted, but not published yet, stays so when CURRENT moves to a version that contains it."""
    real = Publisher._plan_moves

    def plan_moves(self: Publisher, number: int) -> dict[int, tuple[State, str | None]]:
        held = {task.id for task in self._ledger.tasks(State.HELD)}
        return {task: move for task, move in real(self, number).items() if move[0] != "PUBLISHED" or task in held}

    monkeypatch.setattr(Publisher, "_plan_moves", plan_moves)


@pytest.mark.parametrize("break_it", [apply_late_results, apply_late_failures, move_only_held_tasks])
def test_a_mistake_in_the_state_machine_is_found_within_a_few_hundred_orders(break_it, monkeypatch) -> None:
    break_it(monkeypatch)
    found = settings(SEARCH, max_examples=400, derandomize=True, phases=[Phase.generate], report_multiple_bugs=False)
    with pytest.raises((AssertionError, LedgerError)):
        run_state_machine_as_test(DaemonLife, settings=found)


@pytest.fixture
def model() -> Model:
    found = Model()
    yield found
    found.close()


def learn(model: Model, name: str, content: int = 0) -> None:
    model.drop(name, name, content)
    model.settle()


def drop_until_built(model: Model, name: str) -> None:
    """Drop a task, and finish its jobs until the version with it is being built."""
    model.drop(name, name, 0)
    while not any(isinstance(job, Build) for job in model.workers.running()):
        model.run()
        for job in model.workers.running():
            if not isinstance(job, Build):
                model.finish(job)


def test_a_task_forgotten_while_its_version_is_built_is_not_served(model: Model) -> None:
    learn(model, "sea")
    drop_until_built(model, "birds")
    (job,) = model.workers.running()
    model.command("forget", "birds")
    model.run()
    model.finish(job)  # too late
    model.run()
    model.settle()
    assert [row[1:3] for row in model.rows()] == [("sea", "SERVING"), ("birds", "FORGOTTEN")]


def test_a_promoted_task_that_a_rollback_serves_again_is_served_and_can_be_forgotten(model: Model) -> None:
    for name in ("birds", "sea"):
        learn(model, name)
    for kind, subject in (("rollback", "1"), ("promote", "sea"), ("rollback", "2")):
        model.command(kind, subject)
        model.run()
    model.settle()
    assert [row[1:3] for row in model.rows()] == [("birds", "SERVING"), ("sea", "SERVING")]
    model.command("forget", "sea")
    model.settle()
    current = model.files.store.current()
    assert current and [task.name for task in model.files.store.read(current).tasks] == ["birds"]


@pytest.mark.parametrize("how", ["well", "died", "rejected"])
@pytest.mark.parametrize("kind", [Validate, Learn])
def test_a_result_that_comes_after_its_task_was_forgotten_is_dropped_with_an_event(model: Model, kind, how) -> None:
    model.drop("birds", "birds", 0)
    model.run()
    while not isinstance(model.workers.running()[0], kind):
        model.finish(model.workers.running()[0])
        model.run()
    (job,) = model.workers.running()
    model.command("forget", "birds")
    model.run()
    assert not model.workers.running(), "its worker is not needed any more"
    model.finish(job, how)
    model.run()
    (birds,) = model.ledger.tasks_named("birds")
    assert birds.state == "FORGOTTEN" and birds.reason is None
    assert "task.result_dropped" in [event.event for event in model.ledger.events(birds)]


@pytest.mark.parametrize("overlap", ["reject", "extend"])
def test_a_class_that_another_task_got_during_validation_is_noticed_after_it(model: Model, overlap: str) -> None:
    model.config = replace(model.config, bucket=replace(model.config.bucket, overlap=overlap))
    model.ledger.close()
    model.start()
    for name in ("birds", "zoo"):
        model.bucket.folders[name] = replace(manifest_of(name, 0), classes=("owl", name))
    model.run()
    first, second = model.workers.running()
    assert isinstance(second, Validate) and second.known_classes == {}
    model.finish(first)
    model.finish(second)
    model.run()
    (birds,), (zoo,) = model.ledger.tasks_named("birds"), model.ledger.tasks_named("zoo")
    if overlap == "reject":
        assert (birds.state, zoo.state, zoo.code) == ("TRAINING", "QUARANTINED", "class-overlap")
        assert zoo.reason and zoo.reason.startswith("expected new classes, got owl (task birds); rename them")
    else:
        warnings = (model.ledger.report(zoo) or {})["warnings"]
        assert warnings == ["1 class that other tasks have, too, e.g. owl (task birds): both answer with it"]


def test_forgetting_one_of_two_tasks_of_a_name_leaves_the_other_alone(model: Model) -> None:
    learn(model, "sea")
    learn(model, "birds")
    model.drop("birds-too", "birds", 1)  # other content
    model.settle()
    model.command("forget", "birds")
    model.settle()
    served, waiting = model.ledger.tasks_named("birds")
    assert (served.state, waiting.state) == (State.FORGOTTEN, State.CONFLICT)
    model.command("retry", "birds")
    model.settle()
    assert [task.state for task in model.ledger.tasks_named("birds")] == [State.FORGOTTEN, State.SERVING]


def answer_to(model: Model, kind: str, subject: str) -> str:
    model.command(kind, subject)
    model.settle()
    return str(model.ledger.commands()[-1].answer)


def test_exactly_is_said_only_where_nothing_was_made_from_the_data(model: Model) -> None:
    learn(model, "sea")
    assert "forgotten; exactly" in answer_to(model, "forget", "sea"), "nothing else was learned"
    learn(model, "birds")  # makes the next g-prompt
    learn(model, "fruit")
    learn(model, "tools")
    assert "forgotten; exactly" in answer_to(model, "forget", "tools"), "nothing began with it"
    said = answer_to(model, "forget", "birds")
    assert "forgotten; not exactly" in said
    version = model.ledger.versions()[-1]
    assert (version.kind, version.exact) == ("forget", False)
    (event,) = [
        each for each in model.ledger.events() if each.event == "task.forgotten" and each.detail["version"] == 7
    ]
    assert event.detail["answer"] == said and event.detail["exact"] is False


def test_exactly_is_not_said_while_a_task_is_trained_from_what_the_data_made(model: Model) -> None:
    learn(model, "birds")
    model.drop("sea", "sea", 0)
    model.run()
    while not isinstance(model.workers.running()[0], Learn):
        model.finish(model.workers.running()[0])
        model.run()
    model.command("forget", "birds")
    model.run()
    (job,) = [job for job in model.workers.running() if isinstance(job, Build)]
    model.finish(job)
    model.run()  # published
    model.run()  # answered
    assert "forgotten; not exactly" in str(model.ledger.commands()[-1].answer), "sea has the g-prompt of birds"
    model.settle()


def test_prompts_that_begin_with_the_last_one_remember_it(model: Model) -> None:
    model.config = small_config(model.folder, train=TrainSettings(start="previous"), retry=model.config.retry)
    model.restart()
    for name in ("birds", "sea", "fruit"):
        learn(model, name)
    assert "not exactly" in answer_to(model, "forget", "sea"), "fruit began as a copy of it"
    assert "; exactly" in answer_to(model, "forget", "fruit")


def test_a_version_with_a_forgotten_task_is_gone_and_stays_refused_when_the_task_is_learned_again(model: Model) -> None:
    learn(model, "sea")
    learn(model, "birds")
    answer_to(model, "forget", "birds")
    assert "which was forgotten" in answer_to(model, "rollback", "2")
    answer_to(model, "retry", "birds")
    assert [task.state for task in model.ledger.tasks_named("birds")] == [State.SERVING]
    assert "which was forgotten" in answer_to(model, "rollback", "2")
    assert [*model.files.store.paths()] == [1, 3, 4]


def test_a_training_that_was_repeated_is_another_run_in_the_registry(model: Model) -> None:
    learn(model, "birds")
    answer_to(model, "forget", "birds")
    answer_to(model, "retry", "birds")
    registry = MemoryRegistry()
    Recorder(model.config, model.ledger, model.files, registry).catch_up(0.0)
    runs = [run for record in registry.recorded.values() for run in record.run_ids]
    assert len(runs) == 2 and len(set(runs)) == 2


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    kind=st.one_of(st.sampled_from(["retry", "rollback", "promote", "forget"]), st.text(max_size=8)),
    subject=st.one_of(st.text(max_size=30), st.integers().map(str), st.sampled_from(["birds", "²", "١", "-1", ""])),
)
@example("rollback", "99999999999999999999")
@example("rollback", "²")
@example("promote", "9" * 5000)
@example("explode", "birds")
def test_whatever_stands_in_a_command_it_is_answered_and_the_daemon_lives(
    lived: Model, kind: str, subject: str
) -> None:
    lived.command(kind, subject)
    lived.settle()
    assert lived.ledger.commands()[-1].state in ("DONE", "REFUSED")


@pytest.fixture(scope="module")
def lived() -> Iterator[Model]:
    found = Model()
    learn(found, "birds")
    yield found
    found.close()


def test_a_command_that_fails_for_an_unknown_reason_is_refused_with_it(model: Model, monkeypatch) -> None:
    learn(model, "birds")
    monkeypatch.setattr(model.orchestrator.publisher, "move_to", lambda _: 1 / 0)
    assert "ZeroDivisionError" in answer_to(model, "rollback", "1")


def test_a_queued_command_can_be_taken_back_until_it_is_applied(model: Model) -> None:
    learn(model, "birds")
    model.command("forget", "birds")
    model.run()  # the version without it is being built
    (job,) = model.workers.running()
    (command,) = model.ledger.pending_commands()
    model.ledger.cancel_command(command.id)
    model.finish(job)
    model.settle()
    assert [task.state for task in model.ledger.tasks()] == [State.SERVING]
    with pytest.raises(LedgerError, match="is CANCELLED: too late"):
        model.ledger.cancel_command(command.id)
    with pytest.raises(LedgerError, match="there is no command 99"):
        model.ledger.cancel_command(99)


def test_a_task_that_release_0_1_called_forgotten_while_it_served_it_is_forgotten_now(tmp_path: Path) -> None:
    shutil.copytree(RELEASED, tmp_path / "state")
    with closing(sqlite3.connect(tmp_path / "state" / "ledger.sqlite")) as db:
        db.execute("UPDATE tasks SET state = 'FORGOTTEN' WHERE name = 'sea'")
        db.commit()
    config = small_config(tmp_path, gate=Gate(accuracy_floor=0.0, fresh_process=False),
                          evaluate=Evaluate(matchers=("mqmk-ei",)))  # fmt: skip
    parts = daemon(config)
    parts.run()
    current = parts.files.store.current()
    assert current and [task.name for task in parts.files.store.read(current).tasks] == ["birds"]
    assert not problems(tmp_path / "state", tmp_path / "bucket")
    parts.close()


def test_an_error_of_a_full_disk_is_said_as_it_is(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    pages = ledger._db.execute("PRAGMA page_count").fetchone()[0]
    ledger._db.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(sqlite3.OperationalError, match="full"):
        ledger.add_task("long" * 100_000, "folder", "print", State.DISCOVERED)
    ledger._db.execute(f"PRAGMA max_page_count = {pages * 1000}")
    assert ledger.add_task("birds", "birds", "print", State.DISCOVERED).id == 1
    ledger.close()


def test_a_state_that_does_not_exist_and_a_move_that_is_not_allowed_are_refused(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    task = ledger.add_task("birds", "birds", "print", State.DISCOVERED)
    with pytest.raises(LedgerError, match="cannot go from DISCOVERED to SERVING"):
        ledger.transition(task.id, task.state, State.SERVING, task.attempt, "task.rolled_out")
    ledger.transition(task.id, task.state, State.VALIDATED, task.attempt, "task.validated")
    with pytest.raises(OutdatedError, match="is no longer DISCOVERED in attempt 1"):
        ledger.transition(task.id, task.state, State.QUARANTINED, task.attempt, "task.quarantined")
    with pytest.raises(sqlite3.IntegrityError, match="CHECK"):
        ledger._db.execute("UPDATE tasks SET state = 'LOST'")
    ledger.close()


def test_a_command_that_meets_a_full_disk_stays_queued_and_is_applied_later(model: Model, monkeypatch) -> None:
    learn(model, "birds")
    learn(model, "sea")
    store = type(model.files.store)
    real, failures = store.point_at, [OSError(errno.ENOSPC, "No space left on device"), PermissionError("not yours")]

    def point_at(self: object, version: object) -> None:
        if failures:
            raise failures.pop()
        real(self, version)

    monkeypatch.setattr(store, "point_at", point_at)
    model.command("rollback", "1")
    for _ in range(2):
        with pytest.raises(OSError, match=r"not yours|No space"):
            model.orchestrator.run_pass()
        assert [command.state for command in model.ledger.commands()] == ["PENDING"]
    model.settle()
    assert model.ledger.commands()[-1].state == "DONE"
    assert [row[1:3] for row in model.rows()] == [("birds", "SERVING"), ("sea", "HELD")]


def test_a_command_is_either_cancelled_or_applied_never_both(model: Model, monkeypatch) -> None:
    learn(model, "birds")
    learn(model, "sea")
    model.command("rollback", "1")
    (command,) = model.ledger.pending_commands()
    model.ledger.cancel_command(command.id)
    monkeypatch.setattr(model.ledger, "pending_commands", lambda: [command])  # read just before it was cancelled
    model.orchestrator.commands.apply_pending()
    monkeypatch.undo()
    assert model.ledger.command(command.id).state == "CANCELLED"
    assert [row[1:3] for row in model.rows()] == [("birds", "SERVING"), ("sea", "SERVING")]
    model.command("rollback", "1")
    (command,) = model.ledger.pending_commands()
    assert model.ledger.claim_command(command)
    with pytest.raises(LedgerError, match="is being applied: too late"):
        model.ledger.cancel_command(command.id)
    model.settle()
    assert model.ledger.command(command.id).state == "DONE"


def test_a_version_that_the_disk_does_not_give_leaves_the_command_queued_and_the_daemon_working(
    model: Model, monkeypatch
) -> None:
    learn(model, "birds")
    learn(model, "sea")
    store = type(model.files.store)
    real = store.card_bytes

    def card_bytes(self: object, at: object) -> bytes:
        if at.version == 1:
            raise PoolError("cannot be read") from OSError(errno.EIO, "Input/output error")
        return real(self, at)

    monkeypatch.setattr(store, "card_bytes", card_bytes)
    model.command("rollback", "1")
    model.drop("fruit", "fruit", 0)
    for _ in range(4):
        model.run()
        for job in model.workers.running():
            model.finish(job)
    model.run()
    assert [command.state for command in model.ledger.commands()] == ["PENDING"]
    assert [row[1:3] for row in model.rows()][-1] == ("fruit", "PUBLISHED"), "nothing else waits for it"
    monkeypatch.undo()
    model.settle()
    assert model.ledger.commands()[-1].state == "DONE"


def test_versions_with_a_task_that_release_0_1_forgot_are_withdrawn_also_if_the_upgrade_was_killed(tmp_path) -> None:
    shutil.copytree(RELEASED, tmp_path / "state")
    with closing(sqlite3.connect(tmp_path / "state" / "ledger.sqlite")) as db:
        db.execute("UPDATE tasks SET state = 'FORGOTTEN' WHERE name = 'sea'")
        db.commit()
        digest = db.execute("SELECT digest FROM versions WHERE version = 1").fetchone()[0]
        migrate(db)  # and killed before anything else happened
    PoolStore(tmp_path / "state" / "pools").point_at(Pointer(1, digest))  # it was rolled back before it was forgotten
    config = small_config(tmp_path, gate=Gate(accuracy_floor=0.0, fresh_process=False),
                          evaluate=Evaluate(matchers=("mqmk-ei",)))  # fmt: skip
    parts = daemon(config)
    parts.run()
    assert [row.version for row in parts.ledger.versions() if row.withdrawn] == [2]
    assert [*parts.files.store.paths()] == [1]
    parts.close()


# Layers


def layers_in(model: Model) -> set[str]:
    return {path.name for path in model.files.store.layers.iterdir()}


def layer_of(model: Model, name: str) -> str:
    """The layer of a task in the current version."""
    card = model.files.store.card(model.files.store.current())
    return next(f"{task.layer}.safetensors" for task in card.tasks if task.name == name)


def test_a_version_adds_as_many_bytes_however_many_tasks_there_are(model: Model) -> None:
    """The layer of its task, and a card that lists the tasks that do not fill a page yet."""
    sizes, added = [0], []
    for number in range(40):
        learn(model, f"task{number:02}")
        files = [path for path in model.files.store.folder.rglob("*") if path.is_file()]
        sizes.append(sum(path.stat().st_size for path in files))
        added.append(sizes[-1] - sizes[-2])
    assert len(model.files.store.paths()) == 40
    assert len([name for name in layers_in(model) if name.endswith(".json")]) == 1, "one page is full"
    tensors = [name for name in layers_in(model) if name.endswith(".safetensors")]
    assert len(tensors) == 1 + 40, "each task once, and the g layer"
    name = 64 + len('"",')
    for number in range(PAGE + 1, 40):  # the first on a new page, and what that page held before, come once for all
        assert added[number] <= added[number - PAGE] + name + 8, f"task {number + 1} added {added[number]} bytes"
    assert added[PAGE] <= added[0] + 2 * added[PAGE - 1]


def test_the_layer_of_a_forgotten_task_is_deleted_and_all_others_stay(model: Model) -> None:
    for name in ("sea", "birds", "fruit"):
        learn(model, name)
    gone, before = layer_of(model, "birds"), layers_in(model)
    answer_to(model, "forget", "birds")
    assert layers_in(model) == before - {gone}


@pytest.mark.parametrize("then", ["it is forgotten", "another task is learned"])
def test_the_layer_of_a_candidate_that_was_held_does_not_outlive_it(model: Model, then: str) -> None:
    learn(model, "sea")
    before = layers_in(model)
    model.drop("birds", "birds", 0)
    while not model.ledger.tasks(State.HELD):
        for job in model.workers.running():
            model.finish(job, "refused" if isinstance(job, Build) else "well")
        model.run()
    model.settle()
    (held,) = layers_in(model) - before
    if then == "it is forgotten":
        answer_to(model, "forget", "birds")
    else:
        learn(model, "fruit")
    assert held not in layers_in(model)


def test_pools_keep_removes_cards_and_then_the_layers_that_only_they_named(model: Model) -> None:
    model.config = replace(model.config, pools=Pools(keep=2), mlflow=Mlflow(enabled=False))
    model.restart()
    for name in ("sea", "birds"):
        learn(model, name)
    held = layer_of(model, "birds")
    answer_to(model, "rollback", "1")
    learn(model, "fruit")
    assert [*model.files.store.paths()] == [2, 3] and held in layers_in(model), "version 2 has it"
    model.drop("tools", "tools", 0)
    seen: list[tuple[str, list[int], bool]] = []
    hit = failpoints.hit

    def watched(point: str) -> None:
        if point.startswith(("drop.", "collect.")):
            seen.append((point, [*model.files.store.paths()], held in layers_in(model)))
        hit(point)

    failpoints.hit = watched
    try:
        model.settle()
    finally:
        failpoints.hit = hit
    assert seen == [
        ("drop.before", [2, 3, 4], True), ("drop.after", [3, 4], True),
        ("collect.before", [3, 4], True), ("collect.after", [3, 4], False),
    ]  # fmt: skip


def _finish_everything(model: Model) -> None:
    for _ in range(9):
        for job in model.workers.running():
            model.finish(job)
        model.orchestrator.run_pass()


@pytest.mark.parametrize("point", ["drop.after", "collect.before"])
def test_layers_that_a_killed_daemon_did_not_collect_are_collected_by_the_next(model: Model, point: str) -> None:
    for name in ("sea", "birds"):
        learn(model, name)
    gone, hit = layer_of(model, "birds"), failpoints.hit

    def killed(reached: str) -> None:
        if reached == point:
            failpoints.hit = hit
            raise Killed(point)
        hit(reached)

    model.command("forget", "birds")
    failpoints.hit = killed
    with pytest.raises(Killed):
        _finish_everything(model)
    assert gone in layers_in(model) and [*model.files.store.paths()] == [1, 3]
    model.restart()
    model.settle()
    assert gone not in layers_in(model)


def test_nothing_is_collected_while_a_build_runs(model: Model) -> None:
    learn(model, "sea")
    drop_until_built(model, "birds")
    data = b"a layer that the build has written and no card names yet"
    name = f"{hashlib.sha256(data).hexdigest()}.safetensors"
    model.files.store.add_layer(name, data)
    model.orchestrator.publisher.has_garbage = True
    for _ in range(3):
        model.run()
        assert name in layers_in(model)
    model.settle()
    assert name not in layers_in(model), "the build is over and left it"
    assert layer_of(model, "birds") in layers_in(model)


def test_a_failing_build_without_a_task_that_is_called_forgotten_is_tried_again(model: Model) -> None:
    """Release 0.1 could call a task forgotten that was still served."""
    learn(model, "sea")
    learn(model, "birds")
    with closing(sqlite3.connect(model.files.folder / "ledger.sqlite")) as connection, connection:
        connection.execute("UPDATE tasks SET state = 'FORGOTTEN' WHERE name = 'birds'")
    model.ledger.close()
    model.start()
    for _ in range(2):
        model.orchestrator.run_pass()  # `model.run` would see that the ledger is wrong
        (job,) = model.workers.running()
        assert isinstance(job, Build) and job.kind == "forget"
        model.finish(job, "rejected")
    model.orchestrator.collect_results()
    (birds,) = model.ledger.tasks_named("birds")
    assert (birds.state, birds.failures) == (State.FORGOTTEN, 2), "neither quarantined nor given up"
    model.orchestrator.run_pass()
    model.finish(model.workers.running()[0])
    model.settle()
    assert model.ledger.versions()[-1].kind == "forget"
