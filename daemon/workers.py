"""Who does the jobs: the door between the daemon and its workers, and workers that need no Ray."""

from typing import Protocol

from mqmk.daemon.jobs import Failed, Finished, Job, Learn, News, Progressed, Reported
from mqmk.daemon.workshop import Workshop


class Workers(Protocol):
    """Workers that take jobs and send news. A job may be started twice; what it answers is the same."""

    def room_for(self, kind: type[Job]) -> bool:
        """Whether a job of this kind can be started now."""

    def start(self, job: Job) -> None:
        """Give a job to a free worker."""

    def news(self) -> list[News]:
        """What happened since this was last asked; never waits."""

    def busy(self) -> list[Job]:
        """Jobs that are under way."""

    def stop(self) -> None:
        """Drop every job and let the workers go."""


class InlineWorkers:
    """One worker, the daemon's own process: a job is done when `start` returns."""

    def __init__(self, workshop: Workshop) -> None:
        self._workshop = workshop
        self._news: list[News] = []

    def room_for(self, kind: type[Job]) -> bool:
        return True

    def start(self, job: Job) -> None:
        def report(progress: Progressed) -> None:
            assert isinstance(job, Learn)
            self._news.append(Reported(job, progress))

        try:
            result = self._workshop.do(job, report)
        except Exception as error:  # whatever it is, the daemon decides what it means
            self._news.append(Failed(job, error))
        else:
            self._news.append(Finished(job, result))

    def news(self) -> list[News]:
        found, self._news = self._news, []
        return found

    def busy(self) -> list[Job]:
        return []

    def stop(self) -> None:
        self._workshop.close()
