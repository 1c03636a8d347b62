"""The interface between the daemon and its workers, and a worker that needs no Ray."""

from typing import Protocol

from mqmk.daemon.jobs import EpochProgress, Failed, Finished, Job, JobUpdate, Learn, ProgressUpdate
from mqmk.daemon.workers.runner import JobRunner


class Workers(Protocol):
    """Workers that run jobs. A job may be started twice; its result is the same."""

    def has_capacity(self, kind: type[Job]) -> bool:
        """Whether a job of this kind can be started now."""

    def start(self, job: Job) -> None:
        """Start a job on a free worker."""

    def poll(self) -> list[JobUpdate]:
        """What happened since the last call; never waits."""

    def running(self) -> list[Job]:
        """Jobs that are running."""

    def cancel(self, job: Job) -> None:
        """End a job that is no longer needed; `poll` reports nothing more about it."""

    def stop(self) -> None:
        """Drop every job and stop the workers."""


class InlineWorkers:
    """One worker in the daemon's own process: a job is over when `start` returns."""

    def __init__(self, runner: JobRunner) -> None:
        self._runner = runner
        self._updates: list[JobUpdate] = []

    def has_capacity(self, kind: type[Job]) -> bool:
        return True

    def start(self, job: Job) -> None:
        def report(progress: EpochProgress) -> None:
            assert isinstance(job, Learn)
            self._updates.append(ProgressUpdate(job, progress))

        try:
            result = self._runner.run(job, report)
        except Exception as error:  # the daemon decides what it means
            self._updates.append(Failed(job, error))
        else:
            self._updates.append(Finished(job, result))

    def poll(self) -> list[JobUpdate]:
        found, self._updates = self._updates, []
        return found

    def running(self) -> list[Job]:
        return []

    def cancel(self, job: Job) -> None:
        """No job is ever running between two calls."""

    def stop(self) -> None:
        self._runner.close()
