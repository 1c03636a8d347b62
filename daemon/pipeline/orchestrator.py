"""The daemon's one loop: discover, validate, train, evaluate, gate, publish, roll out. Plain Python.

A pass reads the ledger, starts what can be started, and collects what workers finished; it never waits. Every step may
be killed and repeated: its output is named by content, or announced in the ledger before it is made.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from mqmk.daemon import failpoints
from mqmk.daemon.bucket.scanner import Bucket
from mqmk.daemon.config.sections import Config
from mqmk.daemon.errors import BucketError, DaemonError, OutdatedError
from mqmk.daemon.jobs import (
    Build,
    BuildTask,
    Built,
    EpochProgress,
    Failed,
    Finished,
    GateRejection,
    Job,
    JobUpdate,
    Learn,
    Learned,
    ProgressUpdate,
    Result,
    Validate,
    Validated,
    attempts_of,
)  # fmt: skip
from mqmk.daemon.ledger.ledger import IN_POOL, Ledger, State, TaskRow
from mqmk.daemon.logs import event
from mqmk.daemon.pipeline.discovery import Discovery
from mqmk.daemon.pipeline.health import DependencyHealth
from mqmk.daemon.pipeline.operator_commands import OperatorCommands
from mqmk.daemon.pipeline.publisher import Publisher
from mqmk.daemon.pipeline.retry import Quarantine, RetryLater, decide
from mqmk.daemon.pipeline.training_base import extract_base, trace_origin
from mqmk.daemon.replicas import Serving
from mqmk.daemon.state_dir import StateDir
from mqmk.daemon.words import command, plural
from mqmk.daemon.workers.pool import Workers
from mqmk.learner.data.validation import check_overlap
from mqmk.learner.errors import TaskRejected

log = logging.getLogger(__name__)
FEW: Final = 2
"""As many trained tasks get a version each, whatever `publish.together` is."""


class Orchestrator:
    """All parts are handed in."""

    def __init__(
        self,
        config: Config,
        ledger: Ledger,
        bucket: Bucket,
        files: StateDir,
        workers: Workers,
        serving: Serving,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.config, self.ledger, self.bucket, self.files = config, ledger, bucket, files
        self.workers, self.serving, self.clock = workers, serving, clock
        self.health = DependencyHealth(ledger)
        self.discovery = Discovery(config.bucket, ledger, bucket, self.health)
        self.publisher = Publisher(ledger, files)
        self.commands = OperatorCommands(ledger, files, self.publisher)
        self._is_reconciled, self._build_started = False, 0.0
        self._cleaned_up_at = -1  # the last event then: without a new one, nothing more has to go

    def run_pass(self) -> bool:
        """One pass over everything; True if anything happened."""
        before = self.ledger.last_event()
        self.recover()
        self.commands.apply_pending()
        self.cancel_outdated_jobs()
        self.discovery.discover_tasks()
        self.collect_results()
        self.validate()
        self.train()
        self.publish()
        self.confirm_rollout()
        self.clean_up()
        self.health.mark_up("disk")
        return self.ledger.last_event() != before

    @property
    def is_idle(self) -> bool:
        """Whether no job is running and nothing is left to do."""
        waiting = self.ledger.has_tasks(State.DISCOVERED, State.VALIDATED, State.TRAINING, State.TRAINED)
        return not waiting and not self.workers.running() and not self.ledger.pending_commands()

    def recover(self) -> None:
        """Finish what was announced; on the first pass, make the rows agree with CURRENT."""
        self.publisher.finish_announced()
        if not self._is_reconciled:
            self.publisher.reconcile()
            self._is_reconciled = True

    def cancel_outdated_jobs(self) -> None:
        """Cancel jobs whose task was forgotten, rolled back or retried meanwhile, and builds on another version."""
        for job in self.workers.running():
            if self._is_over(job) or (isinstance(job, Build) and self._is_outdated(job)):
                self.workers.cancel(job)
                for number in attempts_of(job):
                    detail = {"job": type(job).__name__.lower()}
                    self.ledger.append_event("task.job_cancelled", self.ledger.task(number), detail)

    def _is_over(self, job: Job) -> bool:
        """Whether the attempt of one of its tasks is over."""
        return any(self.ledger.task(number).attempt != attempt for number, attempt in attempts_of(job).items())

    # Validate and train

    def validate(self) -> None:
        """Have a worker read every discovered task once."""
        for task in self._due(State.DISCOVERED):
            if not self.workers.has_capacity(Validate):
                return
            manifest = self.ledger.manifest(task)
            known = self.ledger.owners(manifest.classes, but=task) if manifest else {}
            self._start(task, Validate(task.id, task.attempt, task.name, task.folder, manifest, known))

    def train(self) -> None:
        """Train tasks in parallel; before the first version only one, because it makes the g-prompt."""
        for task in self._due(State.TRAINING):  # a worker died, or the daemon did
            self._resume_training(task)
        for task in self._due(State.VALIDATED):
            if not self.workers.has_capacity(Learn) or not self._may_start_training():
                return
            failpoints.hit("train.before")
            self.files.clear_work(_identity(task))
            base = extract_base(self.files, start=self.config.train.start)
            if base:
                self.files.save_base(_identity(task), base)
            origin = trace_origin(self.ledger, base)
            task = self._move(task, State.TRAINING, "task.training_started", base=origin)
            failpoints.hit("train.after")
            log.info(f"training {task.name}", extra=event("task.training_started", task=task.name))
            self._resume_training(task)

    def _may_start_training(self) -> bool:
        alone = self.files.store.current() is None or self.config.train.start == "previous"
        return not (alone and self.ledger.has_tasks(State.TRAINING, State.TRAINED))

    def _resume_training(self, task: TaskRow) -> None:
        identity = _identity(task)
        if self.files.trained_folder(identity):  # the daemon was killed after training
            self._mark_trained(task)
            return
        if not self.workers.has_capacity(Learn):
            return
        manifest = self.ledger.manifest(task)
        assert manifest is not None
        job = Learn(task.id, task.attempt, task.name, task.folder, manifest, self.ledger.report(task) or {},
                    self.files.base(identity), task.split, self.files.checkpoint(identity))  # fmt: skip
        self._start(task, job)

    def _start(self, task: TaskRow, job: Job) -> None:
        if self.workers.has_capacity(type(job)) and task.id not in self._assigned_tasks():
            self.workers.start(job)
            self.collect_results()

    def _due(self, state: State) -> Iterator[TaskRow]:
        """Tasks in a state that may be worked on now and that no worker has."""
        taken = self._assigned_tasks()
        return (task for task in self.ledger.due_tasks(state, self.clock()) if task.id not in taken)

    def _assigned_tasks(self) -> set[int]:
        """Tasks that a worker has."""
        return {number for job in self.workers.running() for number in attempts_of(job)}

    # Results of workers

    def collect_results(self) -> None:
        """Apply what workers report; drop what belongs to an attempt that is over."""
        for update in self.workers.poll():
            tasks = [self.ledger.task(number) for number in attempts_of(update.job)]
            if self._is_over(update.job):
                self._drop(update)
                continue
            match update:
                case ProgressUpdate(progress=progress):
                    self._save_progress(tasks[0], progress)
                case Finished(job=Build() as job, result=Built() as result):
                    self.health.mark_up("backbone")
                    self._apply_build(tasks, job, result)
                case Finished(result=result):
                    self._apply_result(tasks[0], result)
                case Failed(job=Build() as job) if self._is_outdated(job):  # its parent may be gone from the store
                    self._drop(update)
                case Failed(error=error) if len(tasks) > 1:
                    self._try_alone(tasks, error)
                case Failed(error=error):
                    self._handle_failure(tasks[0], error)

    def _drop(self, update: JobUpdate) -> None:
        if isinstance(update, ProgressUpdate):
            return
        if isinstance(update, Finished) and isinstance(update.result, Built) and update.result.candidate:
            self.files.drop_candidate(update.result.candidate.card)
            self.publisher.has_garbage = True
        for number, attempt in attempts_of(update.job).items():
            detail = {"job": type(update.job).__name__.lower(), "attempt": attempt}
            self.ledger.append_event("task.result_dropped", self.ledger.task(number), detail)
        name = update.job.name
        log.info(f"dropped a result of {name}: its attempt is over", extra=event("task.result_dropped", task=name))

    def _save_progress(self, task: TaskRow, progress: EpochProgress) -> None:
        failpoints.hit("checkpoint.before")
        self.files.save_checkpoint(_identity(task), progress.checkpoint)
        self.ledger.set_progress(task, progress.detail)
        self.ledger.append_event("task.epoch_finished", task, progress.detail)
        failpoints.hit("checkpoint.after")
        log.info(_epoch_text(progress.detail), extra=event("task.epoch_finished", **progress.detail))

    def _apply_result(self, task: TaskRow, result: Result) -> None:
        match result:
            case Validated():
                self._apply_validation(task, result)
            case Learned():
                self.health.mark_up("backbone")
                self._save_prompt(task, result)

    def _apply_validation(self, task: TaskRow, result: Validated) -> None:
        manifest = result.manifest
        same = self.ledger.task_with_identity(manifest.identity)
        failpoints.hit("validate.before")
        if same and same.id != task.id:
            reason = f"the same content as task {same.name}, which is {same.state}"
            self._move(task, State.CONFLICT, "task.duplicate_rejected", reason=reason, code="same-content")
        else:
            try:  # its classes were not known before, or another task was validated in the meantime
                notes = check_overlap(manifest, self.ledger.owners(manifest.classes, task), self.config.bucket.overlap)
            except TaskRejected as error:
                self._handle_failure(task, error)
            else:
                warnings = [*dict.fromkeys((*notes, *result.report["warnings"]))]
                self._move(task, State.VALIDATED, "task.validated", {"warnings": warnings},
                           manifest=manifest.to_bytes(), report={**result.report, "warnings": warnings},
                           identity=manifest.identity)  # fmt: skip
        failpoints.hit("validate.after")

    def _save_prompt(self, task: TaskRow, result: Learned) -> None:
        identity = _identity(task)
        failpoints.hit("learned.before")
        self.files.save_held_out(identity, result.held_out)
        failpoints.hit("learned.held_out")
        self.files.save_trained(identity, result.prompt)
        failpoints.hit("learned.prompt")
        self._mark_trained(task)

    def _mark_trained(self, task: TaskRow) -> None:
        self._move(task, State.TRAINED, "task.trained")
        failpoints.hit("learned.after")
        log.info(f"trained {task.name}", extra=event("task.trained", task=task.name))

    def _schedule_retraining(self, task: TaskRow) -> None:
        trainings = task.stale + 1
        if trainings >= self.config.retry.attempts:
            reason = f"trained {trainings} times for a g-prompt that was replaced meanwhile"
            self._handle_failure(task, DaemonError(reason))
            return
        self.files.clear_work(_identity(task))
        reason = "the pool's g-prompt is not the one this task was trained with; it is trained again"
        self._move(task, State.VALIDATED, "task.retraining_scheduled", reason=reason, stale=trainings, base=None)

    def _handle_failure(self, task: TaskRow, error: Exception) -> None:
        """Retry, quarantine or hold; a task that is served is never quarantined."""
        decision = decide(error, task.failures, task.split, self.config.retry)
        if isinstance(decision, Quarantine) and task.state in (
            *IN_POOL,
            State.FORGOTTEN,
        ):  # leaves with a later version
            decision = RetryLater(self.config.retry.max_seconds, decision.reason)
        if isinstance(decision, RetryLater):
            self._schedule_retry(task, decision)
        elif task.version is not None:  # a rollback may serve it again
            reason = f"{decision.reason}; {command('promote', task.name)} tries again"
            self._move(task, State.HELD, "task.held", reason=reason, code=decision.code)
            log.warning(f"held {task.name}: {decision.reason}", extra=event("task.held", task=task.name))
        else:
            self._move(task, State.QUARANTINED, "task.quarantined", reason=decision.reason, code=decision.code)
            log.warning(f"quarantined {task.name}: {decision.reason}", extra=event("task.quarantined", task=task.name))

    def _try_alone(self, tasks: Sequence[TaskRow], error: Exception) -> None:
        """A version with several tasks failed, and any of them may be the reason: from now on each is built alone."""
        for task in tasks:
            decision = decide(error, task.failures, task.split, self.config.retry)
            if isinstance(decision, Quarantine):
                decision = RetryLater(0.0, f"a version with {plural(len(tasks), 'task')} failed: {decision.reason}")
            self._schedule_retry(task, decision)

    def _schedule_retry(self, task: TaskRow, retry: RetryLater) -> None:
        if retry.dependency:
            self.health.mark_down(retry.dependency, retry.reason)
        self._move(task, task.state, "task.retry_scheduled", reason=retry.reason, code=retry.dependency,
                   failures=task.failures + 1, not_before=self.clock() + retry.seconds,
                   split=task.split * retry.split)  # fmt: skip
        log.warning(f"{task.name}: {retry.reason}; retrying in {retry.seconds:.0f} s",
                    extra=event("task.retry_scheduled", task=task.name))  # fmt: skip

    # Publish, roll out, clean up

    def publish(self) -> None:
        """Build one version at a time: without a task to forget first, then with trained tasks as they completed.

        With several if many wait; but one that failed is built alone, so that it fails no other.
        """
        if any(isinstance(job, Build) for job in self.workers.running()) or not self.workers.has_capacity(Build):
            return
        to_forget = [task for task in self.commands.tasks_to_forget() if task.not_before <= self.clock()]
        if to_forget:
            self._start_build(to_forget[:1], "forget")
        elif due := sorted(self._due(State.TRAINED), key=lambda task: task.updated_at):
            sound = [task for task in due if not task.failures]
            many = len(sound) > FEW and not due[0].failures
            self._start_build(sound[: self.config.publish.together] if many else due[:1], "learn")

    def _start_build(self, tasks: Sequence[TaskRow], kind: str) -> None:
        current = self.files.store.current()
        version = self.ledger.next_version()
        subjects = [BuildTask(each.id, each.attempt, each.name, _identity(each), each.approved) for each in tasks]
        job = Build(kind, tuple(subjects), version, current, self.files.folder)
        log.info(f"building version {version}: {kind} {job.name}",
                 extra=event("version.build_started", version=version, task=job.name))  # fmt: skip
        self._build_started = self.clock()
        self.publisher.has_garbage |= any(self.files.candidates.glob("*.json"))  # the build removes abandoned ones
        self.workers.start(job)
        self.collect_results()

    def _apply_build(self, tasks: Sequence[TaskRow], job: Build, result: Built) -> None:
        seconds = self.clock() - self._build_started
        log.info(f"built version {job.version} in {seconds:.1f} s",
                 extra=event("version.built", version=job.version, seconds=round(seconds, 1)))  # fmt: skip
        if self._is_outdated(job) or (job.kind == "forget" and not self.commands.claim_forget(tasks[0])):
            self._drop(Finished(job, result))
            return
        if job.kind == "forget" and result.refused:
            reason = f"the version without {job.name} cannot be served: {result.refused[tasks[0].id].reason}"
            self._handle_failure(tasks[0], DaemonError(reason))
            return
        for task in tasks:
            if task.id in result.stale:
                self._schedule_retraining(task)
            elif task.id in result.refused:
                self._hold(task, result.refused[task.id])
        changed = [task for task in tasks if task.id in result.added] if job.kind == "learn" else tasks
        self.publisher.has_garbage |= len(changed) < len(tasks)
        if changed:
            self._publish(changed, job, result)

    def _hold(self, task: TaskRow, rejection: GateRejection) -> None:
        failpoints.hit("hold.before")
        self._move(task, State.HELD, "task.held", reason=rejection.reason, code="gate", metrics=rejection.metrics)
        failpoints.hit("hold.after")
        log.warning(f"held {task.name}: {rejection.reason}", extra=event("task.held", task=task.name))

    def _publish(self, tasks: Sequence[TaskRow], job: Build, result: Built) -> None:
        try:
            self.publisher.publish(result, job.kind, tasks)
        except OutdatedError:
            self._drop(Finished(job, result))
        self.bucket.wake()

    def _is_outdated(self, job: Build) -> bool:
        """Whether CURRENT has moved meanwhile: the version is built again on the current one."""
        current = self.files.store.current()
        return current != job.parent or self.ledger.next_version() != job.version

    def confirm_rollout(self) -> None:
        """Move published tasks to SERVING once every live replica, and as many as wanted, serves CURRENT."""
        replicas, current = self.serving.replicas(), self.files.store.current()
        if not current or len(replicas) < max(1, self.serving.wanted_replicas()):
            return
        if any(replica.digest != current.digest for replica in replicas):
            return
        for task in self.ledger.tasks(State.PUBLISHED):
            seconds = self.clock() - task.discovered_at
            self._move(task, State.SERVING, "task.rolled_out", {"seconds": seconds, "version": current.version})
            log.info(f"serving {task.name}", extra=event("task.rolled_out", task=task.name, seconds=round(seconds, 1)))

    def clean_up(self) -> None:
        """Remove versions with a forgotten task, then apply `pools.keep` and `bucket.after_learning`."""
        last = self.ledger.last_event()
        if last != self._cleaned_up_at:
            self.publisher.drop_withdrawn()
            if self.config.pools.keep:
                self.publisher.drop_old(self.config.pools.keep, recorded=self.config.mlflow.enabled)
            self.publisher.drop_evaluations()
            self._cleaned_up_at = last
        if not any(isinstance(job, Build) for job in self.workers.running()):
            self.publisher.collect_garbage()
        how = self.config.bucket.after_learning
        for task in self.ledger.tasks_to_clean_up() if how != "keep" else []:
            failpoints.hit("cleanup.before")
            try:
                self.bucket.clean_up(task.folder, task.fingerprint, how, self.ledger.manifest(task))
            except BucketError as error:
                if error.transient:
                    self.health.mark_down("bucket", str(error))
                    return
                name, detail = "task.cleanup_skipped", {"reason": str(error)}  # such as: changed since it was learned
            else:
                name, detail = "task.cleaned_up", {"how": how}
            failpoints.hit("cleanup.done")
            self.ledger.update_task(task, cleaned_up=True)
            self.ledger.append_event(name, task, detail)
            failpoints.hit("cleanup.after")

    def _move(self, task: TaskRow, to: State, event: str, detail: Mapping[str, Any] | None = None,
              **changes: Any) -> TaskRow:  # fmt: skip
        """From the state and the attempt in which the task was read."""
        return self.ledger.transition(task.id, task.state, to, task.attempt, event, detail, **changes)


def _identity(task: TaskRow) -> str:
    assert task.identity is not None
    return task.identity


def _epoch_text(detail: Mapping[str, Any]) -> str:
    return f"{detail['task']}: epoch {detail['epoch']} of {detail['epochs']}, loss {detail['loss']:.3f}"
