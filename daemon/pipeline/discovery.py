"""From folders in the bucket to rows of the ledger: new, replaced, duplicate, conflicting and rejected tasks."""

import logging
from typing import Any

from mqmk.daemon import failpoints
from mqmk.daemon.bucket.scan_clock import ScanClock
from mqmk.daemon.bucket.scanner import Bucket, FoundTask
from mqmk.daemon.config.sections import Bucket as BucketSettings
from mqmk.daemon.errors import BucketError
from mqmk.daemon.ledger.ledger import LIVE, Ledger, State, TaskRow
from mqmk.daemon.logs import event
from mqmk.daemon.pipeline.health import DependencyHealth
from mqmk.learner.data.manifest import Manifest
from mqmk.learner.errors import TaskRejected

log = logging.getLogger(__name__)


class Discovery:
    """Scans the bucket when a scan is due."""

    def __init__(self, settings: BucketSettings, ledger: Ledger, bucket: Bucket, health: DependencyHealth) -> None:
        self._ledger, self._bucket, self._health = ledger, bucket, health
        self.scans = ScanClock(settings.poll_seconds, settings.max_poll_seconds, settings.reconcile_seconds)
        self._to_rescan: frozenset[str] = frozenset()
        self._skipped: frozenset[str] = frozenset()

    def discover_tasks(self) -> None:
        """Enter new and changed tasks of the bucket into the ledger; does nothing until a scan is due."""
        before, self._to_rescan = self._to_rescan, self._ledger.folders_to_rescan()
        if not self.scans.is_due(changed=self._bucket.has_changed() or not self._to_rescan <= before):
            return
        everything = self.scans.is_reconcile_due
        known = {folder: fingerprint for folder, fingerprint in self._ledger.scanned_folders().items() if fingerprint}
        try:
            found = self._bucket.scan(known, everything=everything)
        except BucketError as error:
            self.scans.record_failure()
            self._health.mark_down("bucket", str(error))
            return
        for task in found:
            failpoints.hit("discover.before")
            self._enter(task)
            failpoints.hit("discover.after")
        self.scans.record_scan(found=bool(found), reconciled=everything)
        self._log_skipped(frozenset(self._bucket.problems))
        self._health.mark_up("bucket")

    def _log_skipped(self, problems: frozenset[str]) -> None:
        for problem in sorted(problems - self._skipped):
            log.warning(f"skipped in the bucket: {problem}", extra=event("bucket.folder_skipped"))
        self._skipped = problems

    def _enter(self, found: FoundTask) -> None:
        if isinstance(found.manifest, TaskRejected):
            self._quarantine(found, found.manifest)
        elif duplicate := self._find_duplicate(found, found.manifest):
            self._record_duplicate(found, duplicate)
        else:
            self._add(found, found.manifest)

    def _quarantine(self, found: FoundTask, error: TaskRejected) -> None:
        self._write_row(found, found.folder, State.QUARANTINED, None, reason=str(error), code=error.code)
        log.warning(f"quarantined {found.folder}: {error}", extra=event("task.quarantined", task=found.folder))

    def _find_duplicate(self, found: FoundTask, manifest: Manifest | None) -> TaskRow | None:
        """The task with the same content; without a manifest, that of the same folder if it has not changed."""
        if manifest:
            return self._ledger.task_with_identity(manifest.identity)
        own = self._ledger.task_of_folder(found.folder)
        return own if own and own.state in LIVE and own.fingerprint == found.fingerprint else None

    def _record_duplicate(self, found: FoundTask, task: TaskRow) -> None:
        self._ledger.record_scan(found.folder, found.fingerprint, task)
        if task.folder != found.folder:
            log.info(f"{found.folder} has the same content as {task.name} ({task.state}): nothing to do",
                     extra=event("task.duplicate_found", task=task.name, folder=found.folder))  # fmt: skip

    def _add(self, found: FoundTask, manifest: Manifest | None) -> None:
        name = manifest.task if manifest else found.folder
        same_name = [task for task in self._ledger.tasks_named(name) if task.state in LIVE]
        if same_name:
            state = same_name[0].state
            reason = f"task {name} is {state} with other content; rename this one, or forget {name} first"
            task = self._write_row(found, name, State.CONFLICT, manifest, reason=reason, code="conflict")
        else:
            task = self._write_row(found, name, State.DISCOVERED, manifest)
        log.info(f"{task.state} {name} in the bucket", extra=event("task.discovered", task=name, reason=task.reason))

    def _write_row(
        self, found: FoundTask, name: str, state: State, manifest: Manifest | None, **values: Any
    ) -> TaskRow:
        """A new row, or the row of a folder whose rejected content was replaced."""
        if manifest:
            values |= {"manifest": manifest.to_bytes(), "identity": manifest.identity}
        else:
            values |= {"manifest": None, "identity": None}
        known = self._ledger.task_of_folder(found.folder)
        if known is None or known.state not in (State.QUARANTINED, State.CONFLICT):
            return self._ledger.add_task(name, found.folder, found.fingerprint, state, **values)
        self._ledger.record_scan(found.folder, found.fingerprint, known, "task.replaced")
        values |= {"name": name, "fingerprint": found.fingerprint, "report": None}
        return self._ledger.transition(known.id, known.state, state, known.attempt, "task.discovered", **values)
