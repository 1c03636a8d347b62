"""A daemon whose workers finish on command: every interleaving of drops, results, commands, kills, restarts.

Everything durable is real (ledger, pool store, files of the state directory); workers, bucket and replicas are fakes
that answer at once, late, twice or never. Prompts are tiny tensors whose origin is known, so that a claim such as
"exactly forgotten" can be checked against what training really read.
"""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from support.daemons.invariants import problems

from mqmk.daemon import failpoints
from mqmk.daemon.bucket.scanner import FoundTask
from mqmk.daemon.config.sections import Bucket as BucketSettings
from mqmk.daemon.config.sections import Config, Ray, Retry, State
from mqmk.daemon.errors import WorkerDied
from mqmk.daemon.jobs import (
    Build,
    Built,
    Failed,
    Finished,
    GateRejection,
    Job,
    JobUpdate,
    Learn,
    Learned,
    Result,
    Validate,
    Validated,
    attempts_of,
)
from mqmk.daemon.ledger.ledger import IN_POOL, Ledger, TaskRow
from mqmk.daemon.ledger.ledger import State as TaskState
from mqmk.daemon.pipeline.orchestrator import Orchestrator
from mqmk.daemon.replicas import Replica
from mqmk.daemon.state_dir import StateDir
from mqmk.learner.data.manifest import Manifest, Shard
from mqmk.learner.errors import TaskRejected
from mqmk.matcher.errors import PoolError
from mqmk.matcher.pointer import Pointer
from mqmk.matcher.pool import PromptPool, TaskPrompt
from mqmk.matcher.pool_files import decode, encode
from mqmk.matcher.prompted_vit import BackboneInfo

INFO = BackboneInfo("model", "0" * 64, 12, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
FAST = "/dev/shm"  # where waiting for the disk costs nothing


class Killed(BaseException):
    """The process ends here, as with kill -9."""


class FakeBucket:
    """Folders of manifests; nothing else of a task is read here."""

    def __init__(self) -> None:
        self.folders: dict[str, Manifest] = {}
        self.problems: tuple[str, ...] = ()

    def scan(self, known: Mapping[str, str], *, everything: bool = False) -> list[FoundTask]:
        found = [FoundTask(folder, _fingerprint(manifest), manifest) for folder, manifest in self.folders.items()]
        return [task for task in found if known.get(task.folder) != task.fingerprint]

    def has_changed(self) -> bool:
        return True

    def wake(self) -> None: ...


@cache
def _fingerprint(manifest: Manifest) -> str:
    return hashlib.sha256(manifest.to_bytes()).hexdigest()


class LateWorkers:
    """Any number of jobs, which end when the test says so; a cancelled one may still return a result."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self.over: list[Job] = []  # finished or cancelled: their results may come again
        self.built: dict[int, Result | Exception] = {}
        self._updates: list[JobUpdate] = []

    def has_capacity(self, kind: type[Job]) -> bool:
        return True

    def start(self, job: Job) -> None:
        self.jobs.append(job)
        if isinstance(job, Build):  # its files exist long before its result arrives
            self.built[id(job)] = build(job)

    def cancel(self, job: Job) -> None:
        self.over.append(job)
        self.jobs.remove(job)

    def running(self) -> list[Job]:
        return list(self.jobs)

    def poll(self) -> list[JobUpdate]:
        updates, self._updates = self._updates, []
        return updates

    def stop(self) -> None: ...

    def answer(self, job: Job, result: Result | Exception) -> None:
        if job in self.jobs:
            self.jobs.remove(job)
            self.over.append(job)
        self._updates.append(Failed(job, result) if isinstance(result, Exception) else Finished(job, result))


class FakeReplicas:
    """One replica, which serves `digest`."""

    def __init__(self) -> None:
        self.digest: str | None = None

    def replicas(self) -> list[Replica]:
        return [Replica("one", 1, self.digest)] if self.digest else []

    def wanted_replicas(self) -> int:
        return 1


def manifest_of(name: str, content: int) -> Manifest:
    """A task with this name; another `content` has other classes and other bytes."""
    digest = hashlib.sha256(f"{name}/{content}".encode()).hexdigest()
    return Manifest(name, (f"{name}-{content}-x", f"{name}-{content}-y"), (Shard("0.tar", 1, digest, 4),),
                    "2026-01-01T00:00:00Z", "manifest", 0.2)  # fmt: skip


@dataclass
class Origins:
    """Which data every prompt was made from, by the bytes of its tensors."""

    made_from: dict[bytes, frozenset[str]] = field(default_factory=dict)
    trained: int = 0

    def of(self, pool: PromptPool) -> frozenset[str]:
        """Identities whose data is in anything of the pool."""
        found = self.made_from.get(_bytes(pool.g_prompt), frozenset())
        return found.union(*(self.made_from[_bytes(task.e_prompt)] for task in pool.tasks))

    def train(self, job: Learn) -> Learned:
        manifest = job.manifest
        identity = manifest.identity
        self.trained += 1
        fresh = torch.full((1, 2, 1, 4), float(self.trained))
        base = decode(job.base)[1] if job.base else PromptPool(INFO, (0,), (1,), fresh)
        g_prompt = base.g_prompt if base.tasks else fresh
        read = {identity} | self.of(base)
        if not base.tasks:
            self.made_from[_bytes(g_prompt)] = frozenset({identity})
        e_prompt = torch.full((1, 2, 1, 4), self.trained + 0.5)
        self.made_from[_bytes(e_prompt)] = frozenset(read)
        rows = torch.ones(len(manifest.classes), 4)
        task = TaskPrompt(manifest.task, manifest.classes, e_prompt, rows, rows, rows, manifest_sha256=identity)
        return Learned(encode(replace(base, g_prompt=g_prompt, tasks=(task,)), 0, None)[1], b"held-out")


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.numpy().tobytes()


def build(job: Build) -> Result | Exception:
    """The version builder without the evaluation."""
    files = StateDir(job.state)
    shutil.rmtree(files.candidates, ignore_errors=True)
    try:
        old = files.store.read(job.parent) if job.parent else None
        if job.kind == "forget":
            assert old is not None
            new = old.without_task(job.name)
            if not new.tasks:
                new = replace(new, g_prompt=torch.zeros(1, 2, 1, 4))
            return _candidate(job, files, new)
        added, stale = [], []
        for each in job.tasks if old and old.tasks else job.tasks[:1]:
            trained = files.read_trained(each.identity)
            if old and old.tasks and not torch.equal(old.g_prompt, trained.g_prompt):
                stale.append(each.task)
                continue
            old = old.with_task(trained.tasks[0]) if old and old.tasks else trained
            added.append(each.task)
        if not added or old is None:
            return Built(None, None, {}, stale=tuple(stale))
        return replace(_candidate(job, files, old), added=tuple(added), stale=tuple(stale))
    except (PoolError, OSError) as error:
        return error


def _candidate(job: Build, files: StateDir, pool: PromptPool) -> Built:
    parent = job.parent.version if job.parent else None
    written = files.store.write(pool, job.version, parent, cards=files.candidates)
    return Built(Pointer(written.version, written.digest), parent, {"held_out": 0, "tasks": {}})


def refuse(job: Build, found: Built, how: str) -> Result | Exception:
    """All tasks that no operator wants are too weak, or only the first of them: the others are built without them."""
    weak = [each for each in job.tasks if each.task in found.added and not each.approved]
    weak = weak[:1] if how == "refused first" else weak
    refused = {each.task: GateRejection("too weak", {}) for each in weak}
    strong = tuple(each for each in job.tasks if each.task in found.added and each not in weak)
    again = build(replace(job, tasks=strong)) if strong else replace(found, candidate=None, added=())
    return replace(again, refused=refused, stale=found.stale) if isinstance(again, Built) else again


@dataclass(frozen=True)
class Snapshot:
    """An idle daemon and its environment: many lives can begin with it, and none pays for how it came about."""

    files: Mapping[str, bytes]
    folders: Mapping[str, Manifest]
    origins: Origins
    digest: str | None


@cache
def learned_before(*names: str) -> Snapshot:
    """A daemon that has learned these tasks, one version each."""
    model = Model()
    try:
        for name in names:
            model.drop(name, name, 0)
            model.settle()
        model.ledger.close()  # its log becomes part of the file
        state = model.config.state.dir
        files = {str(path.relative_to(state)): path.read_bytes() for path in state.rglob("*") if path.is_file()}
        return Snapshot(files, model.bucket.folders, model.origins, model.serving.digest)
    finally:
        model.close()


class Model:
    """One daemon, its environment, and the invariants that every pass must keep."""

    def __init__(self, begin: Snapshot | None = None) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="mqmk-model-", dir=FAST if Path(FAST).is_dir() else None))
        self.config = Config(
            state=State(self.folder / "state"),
            bucket=BucketSettings(url=str(self.folder / "bucket")),
            ray=Ray(address="none"),
            retry=Retry(attempts=2, first_seconds=0.0, max_seconds=0.0),
        )
        self.bucket, self.serving, self.origins = FakeBucket(), FakeReplicas(), Origins()
        self._pools: dict[Pointer, PromptPool] = {}
        if begin:
            self._restore(begin)
        self.crash_after: int | None = None
        self._hit = failpoints.hit
        failpoints.hit = self._maybe_crash  # type: ignore[assignment]
        self.files = StateDir(self.config.state.dir)
        self.start()

    def _restore(self, begin: Snapshot) -> None:
        for name, data in begin.files.items():
            path = self.config.state.dir / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        self.bucket.folders |= begin.folders
        self.origins = Origins({**begin.origins.made_from}, begin.origins.trained)
        self.serving.digest = begin.digest

    def close(self) -> None:
        failpoints.hit = self._hit  # type: ignore[assignment]
        self.ledger.close()
        shutil.rmtree(self.folder)

    def _maybe_crash(self, point: str) -> None:
        if self.crash_after is not None:
            self.crash_after -= 1
            if self.crash_after < 0:
                self.crash_after = None
                raise Killed(point)

    def start(self) -> None:
        """Start a new process on the state of the last one."""
        self.ledger = Ledger(self.config.ledger_file)
        self.workers = LateWorkers()
        self.orchestrator = Orchestrator(
            self.config, self.ledger, self.bucket, self.files, self.workers, self.serving,  # type: ignore[arg-type]
        )  # fmt: skip

    def restart(self) -> None:
        self.ledger.close()
        self.start()
        self.run()

    def run(self) -> None:
        """One pass; restarts after a kill in the middle."""
        try:
            self.orchestrator.run_pass()
        except Killed:
            self.restart()
        self.check()

    def crash(self, after: int) -> None:
        """Run a pass that is killed at one of the next durable steps, or after it if it has fewer."""
        self.crash_after = after
        self.run()
        if self.crash_after is not None:
            self.crash_after = None
            self.restart()

    def drop(self, folder: str, name: str, content: int) -> None:
        self.bucket.folders[folder] = manifest_of(name, content)

    def command(self, kind: str, subject: str) -> None:
        self.ledger.enqueue_command(kind, subject)

    def likely_commands(self) -> dict[str, list[str]]:
        """Kind -> subjects, of commands that are not refused at once."""
        current, tasks = self.files.store.current(), self.ledger.tasks()
        aside = (TaskState.QUARANTINED, TaskState.CONFLICT, TaskState.FORGOTTEN)
        found = {
            "rollback": [str(number) for number in self.servable() if not current or number != current.version],
            "promote": [task.name for task in tasks if task.state is TaskState.HELD],
            "forget": [task.name for task in tasks if task.state is not TaskState.FORGOTTEN],
            "retry": [task.name for task in tasks if task.state in aside or task.failures],
        }
        return {kind: [*dict.fromkeys(subjects)] for kind, subjects in found.items() if subjects}

    def has_ended(self, job: Job) -> bool:
        """Whether something else has happened to one of its tasks since it was started."""
        return any(self.ledger.task(number).attempt != attempt for number, attempt in attempts_of(job).items())

    def finish_late(self, job: Job, how: str) -> None:
        """Let a worker answer that was cancelled or has answered before."""
        has_ended, before = self.has_ended(job), self.ledger.tasks()
        self.finish(job, how)
        self.orchestrator.collect_results()
        assert not has_ended or self.ledger.tasks() == before, f"a late {type(job).__name__} changed {self.rows()}"

    def finish(self, job: Job, how: str = "well") -> None:
        """Let a worker finish."""
        if how == "died":
            self.workers.answer(job, WorkerDied("the worker died"))
        elif how == "rejected":
            self.workers.answer(job, TaskRejected("bad-sample", "not an image"))
        else:
            self.workers.answer(job, self._result(job, how))

    def _result(self, job: Job, how: str) -> Result | Exception:
        match job:
            case Validate():
                assert job.manifest is not None
                classes = job.manifest.classes
                samples = dict.fromkeys(classes, 4)
                return Validated(job.manifest, {"samples": samples, "held_out": samples, "warnings": []})
            case Learn():
                return self.origins.train(job)
            case Build():
                found = self.workers.built[id(job)]
                is_refused = how.startswith("refused") and job.kind == "learn" and job in self.workers.running()
                return refuse(job, found, how) if is_refused and isinstance(found, Built) else found

    def settle(self) -> None:
        """Let every job succeed until the daemon is idle."""
        for _ in range(60):
            for job in self.workers.running():
                self.finish(job)
            self.run()
            if not self.workers.running() and self.orchestrator.is_idle:
                break
        else:
            raise AssertionError(f"it never becomes idle: {self.rows()}")
        current = self.files.store.current()
        self.serving.digest = current.digest if current else None
        self.run()
        found = problems(self.config.state.dir, self.folder / "bucket", keep=self.config.pools.keep)
        assert not found, found

    # Invariants after every pass

    def rows(self) -> list[tuple[int, str, str, str]]:
        return [(task.id, task.name, str(task.state), (task.identity or "")[:6]) for task in self.ledger.tasks()]

    def check(self) -> None:
        current = self.files.store.current()
        served = {(task.name, task.manifest_sha256) for task in self._read(current).tasks} if current else set()
        rows = {(task.name, task.identity) for task in self.ledger.tasks(*IN_POOL)}
        assert rows == served, f"rows {self.rows()}, served {served}"
        idle = [job for job in self.workers.running() if self.has_ended(job)]
        assert not idle, f"nobody waits for {idle}: {self.rows()}"
        gone = self.ledger.tasks(TaskState.FORGOTTEN)
        servable = {number: self._read(at) for number, at in self.servable().items()} if gone else {}
        for task in gone:
            assert not task.failures and not task.reason, f"{task.name} is FORGOTTEN and failed: {task.reason}"
            held = [number for number, each in servable.items() if task.identity in _identities(each)]
            assert not held, f"{task.name} is FORGOTTEN and in versions {held}"
            assert not self.files.held_out(task.identity or "").exists(), f"{task.name}: held-out images are left"
            assert not self.files.work(task.identity or "").exists(), f"{task.name}: its work is left"
        if gone:
            self._check_exactness(gone, servable)

    def _read(self, at: Pointer) -> PromptPool:
        """Read once: a version never changes, and `settle` compares its bytes with its digest."""
        if at not in self._pools:
            self._pools[at] = self.files.store.read(at)
        return self._pools[at]

    def servable(self) -> dict[int, Pointer]:
        """Every version that an operator could roll back to."""
        there = self.files.store.paths()
        sql = "SELECT version, digest FROM versions WHERE step = 'PUBLISHED' AND withdrawn IS NULL ORDER BY version"
        with closing(self.ledger._db.execute(sql)) as found:
            return {number: Pointer(number, digest) for number, digest in found if number in there}

    def _check_exactness(self, gone: Sequence[TaskRow], servable: Mapping[int, PromptPool]) -> None:
        """No prompt that can be served was made from the data of a task that was forgotten exactly."""
        exact = self.exact
        for task in gone:
            if task.identity and exact.get(task.id):
                left = [number for number, pool in servable.items() if task.identity in self.origins.of(pool)]
                assert not left, f"{task.name} was forgotten 'exactly' and versions {left} were made from its data"

    @property
    def exact(self) -> dict[int, bool]:
        """Task -> whether it was last reported as forgotten exactly."""
        found: dict[int, bool] = {}
        sql = "SELECT event, task, detail FROM events WHERE event IN (?, ?) ORDER BY number"
        with closing(self.ledger._db.execute(sql, ("task.forgotten", "command.forget"))) as rows:
            events = [(event, task, json.loads(detail)) for event, task, detail in rows]
        for event, task, detail in events:
            if event == "task.forgotten":
                found[task] = bool(detail.get("exact"))
            elif "forgotten; exactly" not in str(detail.get("answer")):
                continue
            elif task is not None:  # several tasks may have the name
                found[task] = True
            else:
                named = [each for each in self.ledger.tasks_named(detail["subject"]) if each.state == "FORGOTTEN"]
                found |= {each.id: True for each in named[-1:]}
        return found


def _identities(pool: PromptPool) -> set[str]:
    return {task.manifest_sha256 for task in pool.tasks}


def answers(ledger: Ledger) -> list[tuple[str, Any]]:
    """The outcome of every command."""
    with closing(ledger._db.execute("SELECT kind, answer FROM commands ORDER BY id")) as found:
        return [tuple(row) for row in found]
