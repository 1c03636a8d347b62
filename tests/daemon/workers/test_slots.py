"""Which jobs run side by side on Ray, and which worker processes live how long; Ray itself is a fake."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import ray
from support.daemons.daemon import small_config

from mqmk.daemon.jobs import Build, Finished, Job, Learn, Validate
from mqmk.daemon.workers import ray_pool
from mqmk.daemon.workers.ray_pool import IDLE_SECONDS, RayWorkers, WarmWorkers


@dataclass(eq=False)
class FakeActor:
    """A worker process; a job is its own result."""

    jobs: list[Job] = field(default_factory=list)
    done: bool = False
    killed: bool = False

    @property
    def run(self) -> "FakeActor":
        return self

    @property
    def take_progress(self) -> "FakeActor":
        return self

    def remote(self, *call: Any) -> "FakeActor":
        self.jobs += call[:1]
        return self


class FakeRay(RayWorkers):
    """Starts fakes instead of processes."""

    def _new_worker(self, **options: Any) -> FakeActor:
        made.append((FakeActor(), options))
        return made[-1][0]


made: list[tuple[FakeActor, dict[str, Any]]] = []
now = [0.0]


@pytest.fixture
def workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RayWorkers:
    made.clear()
    now[0] = 1000.0
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "get", lambda actor: (actor.jobs[-1], []))
    monkeypatch.setattr(ray, "kill", lambda actor: setattr(actor, "killed", True))
    monkeypatch.setattr(ray_pool, "_is_ready", lambda actor: actor.done)
    monkeypatch.setattr(ray_pool.RayWorkers, "_new_local_worker", lambda self: self._new_worker(num_cpus=0))
    found = FakeRay(small_config(tmp_path), trainers=2, clock=lambda: now[0])
    found.adopt(WarmWorkers(2, FakeActor(), FakeActor()))
    return found


def job(kind: type[Job]) -> Any:
    return object.__new__(kind)  # what is in it concerns nobody here


def finish(workers: RayWorkers, kind: type[Job]) -> None:
    (actor,) = {each.worker for each in workers._running if isinstance(each.job, kind)}
    actor.done = True
    assert [type(update) for update in workers.poll()] == [Finished]
    actor.done = False


def test_while_a_task_is_read_a_version_can_be_built_and_the_other_way_round(workers: RayWorkers) -> None:
    workers.start(job(Validate))
    assert workers.has_capacity(Build) and workers.has_capacity(Learn) and not workers.has_capacity(Validate)
    workers.start(job(Build))
    assert not workers.has_capacity(Build)
    finish(workers, Validate)
    assert workers.has_capacity(Validate) and not workers.has_capacity(Build), "a version is being built"
    workers.start(job(Learn))
    workers.start(job(Learn))
    assert not workers.has_capacity(Learn) and len({each.worker for each in workers._running}) == 3


def test_the_validator_is_started_for_the_first_task_and_stopped_when_no_more_come(workers: RayWorkers) -> None:
    workers.poll()
    assert not made, "an idle daemon has no validator"
    workers.start(job(Validate))
    ((validator, options),) = made
    assert options == {"num_cpus": 0}, "it needs no CPU of those that Ray counts"
    now[0] += 10 * IDLE_SECONDS
    workers.poll()
    finish(workers, Validate)
    now[0] += IDLE_SECONDS / 2
    workers.poll()
    workers.start(job(Validate))
    assert len(made) == 1, "the same one reads the next task"
    workers.poll()
    finish(workers, Validate)
    now[0] += IDLE_SECONDS + 1
    workers.poll()
    assert validator.killed and workers.has_capacity(Validate)
    workers.start(job(Validate))
    assert len(made) == 2


def test_a_cancelled_validation_leaves_the_builder_alone_and_stopping_ends_all(workers: RayWorkers) -> None:
    reading, building, learning = job(Validate), job(Build), job(Learn)
    for each in (reading, building, learning):
        workers.start(each)
    actors = [each.worker for each in workers._running]
    workers.cancel(reading)
    assert [actor.killed for actor in actors] == [True, False, False]
    assert workers.has_capacity(Validate) and workers.running() == [building, learning]
    workers.stop()
    assert all(actor.killed for actor in actors) and not workers.has_capacity(Validate)
