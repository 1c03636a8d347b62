"""The daemon's one loop: discover, validate, train, evaluate, gate, publish, roll out. Plain Python.

A pass looks at the ledger, starts what can be started, and takes in what workers finished; it never waits. Every step
may be killed and run again: its output is named by content or announced in the ledger before it is made.
"""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from mqmk.daemon import crash_points
from mqmk.daemon.bucket import Bucket, Sighting
from mqmk.daemon.config import Config
from mqmk.daemon.errors import BucketError, DaemonError
from mqmk.daemon.jobs import Build, Built, Failed, Finished, Job, Learn, Learned, Reported, Stale, Validate, Validated
from mqmk.daemon.ledger import IN_POOL, Ledger, State, TaskRow
from mqmk.daemon.logs import event
from mqmk.daemon.operators import Operators
from mqmk.daemon.pool_mirror import PoolMirror
from mqmk.daemon.publication import Publication
from mqmk.daemon.records import Records
from mqmk.daemon.state_files import StateFiles
from mqmk.daemon.verdicts import GiveUp, TryAgain, judge
from mqmk.daemon.workers import Workers
from mqmk.learner.errors import TaskRejected
from mqmk.learner.manifest import Manifest, parse_manifest
from mqmk.matcher.durable import replace_file
from mqmk.matcher.pool_files import PoolFiles, encode

log = logging.getLogger(__name__)
LIVE = (State.DISCOVERED, State.VALIDATED, State.TRAINING, State.TRAINED, State.HELD, *IN_POOL)
"""A task in one of these states owns its name, its classes and its content."""


@dataclass(frozen=True)
class Replica:
    """One copy of the served model, and the version it answers with."""

    id: str
    pool_version: int | None
    digest: str | None
    last_failure: str | None = None


class Serving(Protocol):
    """Who answers requests."""

    def replicas(self) -> list[Replica]:
        """Every live copy; none where nothing is served."""


class Orchestrator:
    """All parts are handed in."""

    def __init__(
        self,
        config: Config,
        ledger: Ledger,
        bucket: Bucket,
        files: StateFiles,
        workers: Workers,
        records: Records,
        serving: Serving,
        clock: Callable[[], float] = time.time,
        mirror: PoolMirror | None = None,
    ) -> None:
        self.config, self.ledger, self.bucket, self.files = config, ledger, bucket, files
        self.workers, self.records, self.serving, self.clock = workers, records, serving, clock
        self.mirror = mirror
        self.publication = Publication(ledger, files)
        self.operators = Operators(ledger, files, self.publication)
        self._reconciled_at = 0.0
        self._passed_over: frozenset[str] = frozenset()

    def run_pass(self) -> bool:
        """One turn of everything; says whether anything happened."""
        before = self.ledger.last_event()
        self.publication.finish_what_was_planned()
        self.operators.obey()
        self.discover()
        self.take_in()
        self.validate()
        self.train()
        self.publish()
        self.copy_out()
        self.roll_out()
        self.records.catch_up(self.operators, self.clock())
        self.tidy()
        return self.ledger.last_event() != before

    @property
    def idle(self) -> bool:
        """Nothing is under way and nothing waits to be done."""
        waiting = self.ledger.tasks(State.DISCOVERED, State.VALIDATED, State.TRAINING, State.TRAINED)
        return not waiting and not self.workers.busy() and not self.ledger.pending()

    # Discover

    def discover(self) -> None:
        """New tasks in the bucket become rows. What was acted on is not looked at again until the next reconcile."""
        everything = self.clock() - self._reconciled_at >= self.config.bucket.reconcile_seconds
        reopened = {task.folder for task in self.ledger.tasks(State.QUARANTINED, State.CONFLICT)}
        seen = self.ledger.sightings()
        known = {folder: mark for folder, mark in seen.items() if folder not in reopened}
        try:
            for sighting in self.bucket.look(known, everything=everything):
                if seen.get(sighting.folder) != sighting.fingerprint:
                    self._discovered(sighting)
            self._tell_problems(frozenset(self.bucket.problems))
            if everything:
                self._reconciled_at = self.clock()
            self._healthy("bucket")
        except BucketError as error:
            self._unhealthy("bucket", str(error))

    def _tell_problems(self, found: frozenset[str]) -> None:
        for problem in sorted(found - self._passed_over):
            log.warning(f"passed over in the bucket: {problem}", extra=event("bucket.passed-over"))
        self._passed_over = found

    def _discovered(self, sighting: Sighting) -> None:
        crash_points.reached("discover.before")
        data = self.bucket.manifest(sighting)
        try:
            manifest = parse_manifest(data) if data is not None else None
        except TaskRejected as error:
            self._quarantined_at_once(sighting, error)
        else:
            self._known_or_new(sighting, manifest, data)
        crash_points.reached("discover.after")

    def _known_or_new(self, sighting: Sighting, manifest: Manifest | None, data: bytes | None) -> None:
        twin = self.ledger.with_identity(manifest.identity) if manifest else None
        if twin:
            self.ledger.see(sighting.folder, sighting.fingerprint, twin)
            return
        name = manifest.task if manifest else sighting.folder
        if stays := self._conflict(name):
            reason = f"task {name} is {stays.state} with other content; rename this one, or forget {name} first"
            values: dict[str, Any] = {"reason": reason, "code": "conflict"}
            task = self._enter(sighting, name, State.CONFLICT, manifest, data, **values)
        else:
            task = self._enter(sighting, name, State.DISCOVERED, manifest, data)
        log.info(f"{task.state} {name} in the bucket", extra=event("task.discovered", task=name, reason=task.reason))

    def _conflict(self, name: str, but: TaskRow | None = None) -> TaskRow | None:
        same = [task for task in self.ledger.named(name) if task.state in LIVE and (but is None or task.id != but.id)]
        return same[0] if same else None

    def _enter(self, sighting: Sighting, name: str, state: State, manifest: Manifest | None, data: bytes | None,
               **values: Any) -> TaskRow:  # fmt: skip
        """A new row, or the row of a folder whose rejected content was replaced."""
        values |= {"manifest": data, "identity": manifest.identity if manifest else None}
        known = self.ledger.sighted(sighting.folder)
        if known is None or known.state not in (State.QUARANTINED, State.CONFLICT):
            return self.ledger.add_task(name, sighting.folder, sighting.fingerprint, state, **values)
        self.ledger.see(sighting.folder, sighting.fingerprint, known, "task.replaced")
        values["fingerprint"] = sighting.fingerprint
        return self.ledger.move(known, state, "task.discovered", name=name, report=None, **values)

    def _quarantined_at_once(self, sighting: Sighting, error: TaskRejected) -> None:
        values = {"reason": str(error), "code": error.code}
        self._enter(sighting, sighting.folder, State.QUARANTINED, None, None, **values)
        log.warning(f"quarantined {sighting.folder}: {error}", extra=event("task.quarantined", task=sighting.folder))

    # Validate and train

    def validate(self) -> None:
        """Each discovered task is read once by a worker."""
        for task in self._due(State.DISCOVERED):
            job = Validate(task.id, task.name, task.folder, task.manifest, self._classes(task))
            self._start(task, job)

    def train(self) -> None:
        """Tasks are learned side by side; before the first version only one, because it makes the g-prompt."""
        for task in self._due(State.TRAINING):  # a worker died, or the daemon did
            self._resume(task)
        for task in self._due(State.VALIDATED):
            if not self.workers.room_for(Learn) or not self._may_begin():
                return
            crash_points.reached("train.before")
            self.files.clear_work(_identity(task))
            if base := self._base():
                self.files.save_base(_identity(task), base)
            task = self.ledger.move(task, State.TRAINING, "task.training")
            crash_points.reached("train.after")
            log.info(f"learning {task.name}", extra=event("task.training", task=task.name))
            self._resume(task)

    def _may_begin(self) -> bool:
        alone = self.files.store.current() is None or self.config.train.g_prompt == "always"
        alone = alone or self.config.train.start == "previous"
        return not (alone and self.ledger.tasks(State.TRAINING, State.TRAINED))

    def _base(self) -> PoolFiles | None:
        """All that training needs of the current pool: the g-prompt, and the prompt that a new one begins as."""
        current = self.files.store.current()
        if current is None:
            return None
        pool = self.files.store.read(current)
        if not pool.tasks:
            return None
        first = pool.tasks[-1:] if self.config.train.start == "previous" else pool.tasks[:1]
        return encode(replace(pool, tasks=first, matching={}), 0, None)[1]

    def _resume(self, task: TaskRow) -> None:
        identity = _identity(task)
        if self.files.trained(identity):  # it was done when the daemon was killed
            self._trained(task)
            return
        assert task.manifest is not None
        job = Learn(task.id, task.name, task.folder, task.manifest, task.report or {}, self.files.base(identity),
                    task.split, self.files.checkpoint(identity))  # fmt: skip
        self._start(task, job)

    def _start(self, task: TaskRow, job: Job) -> None:
        if self.workers.room_for(type(job)) and not any(busy.task == task.id for busy in self.workers.busy()):
            self.workers.start(job)
            self.take_in()

    def _due(self, state: State) -> list[TaskRow]:
        """Tasks in a state whose time has come and that no worker has."""
        busy = {job.task for job in self.workers.busy()}
        return [t for t in self.ledger.tasks(state) if t.not_before <= self.clock() and t.id not in busy]

    def _classes(self, but: TaskRow) -> dict[str, str]:
        """Every class that another task owns, and that task."""
        owners = [task for task in self.ledger.tasks(*LIVE) if task.id != but.id and task.report]
        return {name: task.name for task in owners for name in (task.report or {})["samples"]}

    # What workers finished

    def take_in(self) -> None:
        """News from the workers."""
        for news in self.workers.news():
            task = self.ledger.task(news.job.task)
            match news:
                case Reported(progress=progress) if task.state is State.TRAINING:
                    crash_points.reached("checkpoint.before")
                    self.files.save_checkpoint(_identity(task), progress.checkpoint)
                    self.ledger.set_progress(task, progress.detail)
                    self.ledger.note("task.epoch", task, progress.detail)
                    crash_points.reached("checkpoint.after")
                    log.info(_epoch(progress.detail), extra=event("task.epoch", **progress.detail))
                case Finished(job=job, result=result):
                    self._finished(task, job, result)
                case Failed(job=Build() as job) if self._is_outdated(job):  # its parent may be gone from the store
                    pass
                case Failed(error=error):
                    self._failed(task, error)

    def _finished(self, task: TaskRow, job: Job, result: Validated | Learned | Built | Stale) -> None:
        match result:
            case Validated():
                self._validated(task, result)
            case Learned() if task.state is State.TRAINING:
                self._learned(task, result)
            case Built() if isinstance(job, Build):
                self._built(task, job, result)
            case Stale() if task.state is State.TRAINED:
                self.files.clear_work(_identity(task))
                self.ledger.move(task, State.VALIDATED, "task.stale", reason=result.reason)

    def _validated(self, task: TaskRow, found: Validated) -> None:
        if task.state is not State.DISCOVERED:
            return
        manifest = parse_manifest(found.manifest)
        twin = self.ledger.with_identity(manifest.identity)
        shared = sorted(set(manifest.classes) & self._classes(task).keys())
        crash_points.reached("validate.before")
        if twin and twin.id != task.id:
            reason = f"the same content as task {twin.name}, which is {twin.state}"
            self.ledger.move(task, State.CONFLICT, "task.same-content", reason=reason, code="same-content")
        elif shared and self.config.bucket.overlap == "reject":  # another task was validated in the meantime
            self._failed(task, TaskRejected("class-overlap", f"{', '.join(shared[:5])}: known from another task"))
        else:
            self.ledger.move(task, State.VALIDATED, "task.validated", {"warnings": list(found.report["warnings"])},
                             manifest=found.manifest, report=found.report, identity=manifest.identity)  # fmt: skip
        crash_points.reached("validate.after")

    def _learned(self, task: TaskRow, found: Learned) -> None:
        identity = _identity(task)
        crash_points.reached("learned.before")
        self.files.held_out(identity).parent.mkdir(parents=True, exist_ok=True)
        replace_file(self.files.held_out(identity), found.held_out)
        crash_points.reached("learned.held-out")
        self.files.save_trained(identity, found.prompt)
        crash_points.reached("learned.prompt")
        self._trained(task)

    def _trained(self, task: TaskRow) -> None:
        self.ledger.move(task, State.TRAINED, "task.trained")
        crash_points.reached("learned.after")
        log.info(f"learned {task.name}", extra=event("task.trained", task=task.name))

    def _failed(self, task: TaskRow, error: Exception) -> None:
        found = judge(error, task.attempts, task.split, self.config.retry)
        if isinstance(found, GiveUp) and task.state in IN_POOL:  # to be forgotten: it is served until that works
            found = TryAgain(self.config.retry.max_seconds, found.reason)
        if isinstance(found, GiveUp):
            self.ledger.move(task, State.QUARANTINED, "task.quarantined", reason=found.reason, code=found.code)
            log.warning(f"quarantined {task.name}: {found.reason}", extra=event("task.quarantined", task=task.name))
            return
        if found.part:
            self._unhealthy(found.part, found.reason)
        self.ledger.move(task, task.state, "task.will-retry", reason=found.reason, attempts=task.attempts + 1,
                         not_before=self.clock() + found.seconds, split=task.split * found.split)  # fmt: skip
        log.warning(f"{task.name}: {found.reason}; next try in {found.seconds:.0f} s",
                    extra=event("task.will-retry", task=task.name))  # fmt: skip

    # Publish, roll out, tidy

    def publish(self) -> None:
        """One version at a time: a forgotten task first, then trained ones in order of completion."""
        if any(isinstance(job, Build) for job in self.workers.busy()) or not self.workers.room_for(Build):
            return
        forgetting = self.operators.to_forget()
        if forgetting and forgetting.not_before <= self.clock():
            self._build(forgetting, "forget")
        elif due := self._due(State.TRAINED):
            self._build(min(due, key=lambda task: task.updated_at), "learn")

    def _build(self, task: TaskRow, kind: str) -> None:
        current = self.files.store.current()
        version = self.ledger.next_version()
        parent = current.folder if current else None
        job = Build(task.id, kind, task.name, _identity(task), version, parent, task.approved, self.files.folder)
        self.workers.start(job)
        self.take_in()

    def _built(self, task: TaskRow, job: Build, found: Built) -> None:
        if self._is_outdated(job):
            return
        if found.refused and job.kind == "forget":
            self._failed(task, DaemonError(f"the version without {task.name} is not fit to be served: {found.refused}"))
            return
        if found.refused:
            crash_points.reached("hold.before")
            metrics = found.evaluation["tasks"].get(task.name, {})
            self.ledger.move(task, State.HELD, "task.held", reason=found.refused, code="gate", metrics=metrics)
            crash_points.reached("hold.after")
            log.warning(f"held {task.name}: {found.refused}", extra=event("task.held", task=task.name))
            return
        self.publication.publish(found, job.kind, task)
        self.bucket.wake()

    def _is_outdated(self, job: Build) -> bool:
        """Rolled back in the meantime: it is built again on what is current now."""
        current = self.files.store.current()
        return (current.folder if current else None) != job.parent or self.ledger.next_version() != job.version

    def copy_out(self) -> None:
        """Replicas that do not see this machine's folders find the current version on S3."""
        if self.mirror:
            self.mirror.follow(self.clock())

    def roll_out(self) -> None:
        """A version is SERVING when every live replica answers with it."""
        replicas, current = self.serving.replicas(), self.files.store.current()
        if not current or not replicas or any(replica.digest != current.digest for replica in replicas):
            return
        for task in self.ledger.tasks(State.PUBLISHED):
            seconds = self.clock() - task.discovered_at
            self.ledger.move(task, State.SERVING, "task.serving", {"seconds": seconds, "version": current.version})
            log.info(f"serving {task.name}", extra=event("task.serving", task=task.name, seconds=round(seconds, 1)))

    def tidy(self) -> None:
        """What `pools.keep` and `bucket.after_learning` ask for, the latter as its own recorded step."""
        if self.config.pools.keep:
            self.publication.drop_old(self.config.pools.keep, recorded=self.config.mlflow.enabled)
        how = self.config.bucket.after_learning
        for task in self.ledger.untidied() if how != "keep" else []:
            crash_points.reached("tidy.before")
            try:
                self.bucket.finish(task.folder, task.fingerprint, how)
            except BucketError as error:
                if error.passing:
                    self._unhealthy("bucket", str(error))
                    return
                said: tuple[str, dict[str, str]] = ("task.not-tidied", {"reason": str(error)})  # such as: changed since
            else:
                said = ("task.tidied", {"how": how})
            crash_points.reached("tidy.done")
            self.ledger.mark(task, tidied=True)
            self.ledger.note(said[0], task, said[1])
            crash_points.reached("tidy.after")

    def _healthy(self, part: str) -> None:
        if self.ledger.set_health(part, True):
            log.info(f"{part} works", extra=event("health.up", part=part))

    def _unhealthy(self, part: str, detail: str) -> None:
        if self.ledger.set_health(part, False, detail):
            log.warning(f"{part} does not work: {detail}", extra=event("health.down", part=part))


def _identity(task: TaskRow) -> str:
    assert task.identity is not None
    return task.identity


def _epoch(detail: Mapping[str, Any]) -> str:
    return f"{detail['task']}: epoch {detail['epoch']} of {detail['epochs']}, loss {detail['loss']:.3f}"
