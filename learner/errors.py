"""What can go wrong with a task's data or with the settings it is to be learned by.

MqmkError                    every error of this project that a user can act on (mqmk.matcher.errors)
└── LearnerError             a task could not be read, made or learned
    ├── SettingsError        settings that cannot work with this backbone; no task is to blame
    ├── TaskRejected         data that must not be trained on: it has a code, a reason and a place
    └── PackError            images that cannot be packed into shards
"""

from mqmk.matcher.errors import MqmkError


class LearnerError(MqmkError):
    """A task could not be read, made or learned."""


class SettingsError(LearnerError):
    """Settings that cannot work with this backbone; no task is to blame."""


class TaskRejected(LearnerError):  # noqa: N818 - what happened to the task; the ledger says it with the same word
    """Data that must not be trained on; `code` is stable and for machines, the message is for people."""

    def __init__(
        self, code: str, reason: str, shard: str | None = None, member: str | None = None, offset: int | None = None
    ) -> None:
        super().__init__(code, reason, shard, member, offset)  # all of them, so that a copy from a worker is whole
        self.code, self.reason, self.shard, self.member, self.offset = code, reason, shard, member, offset

    def __str__(self) -> str:
        place = [part for part in (self.shard, self.member) if part]
        if self.offset is not None:
            place.append(f"byte {self.offset:,}")
        return f"{', '.join(place)}: {self.reason} [{self.code}]" if place else f"{self.reason} [{self.code}]"


class PackError(LearnerError):
    """Images that cannot be packed into shards."""
