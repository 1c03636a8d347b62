"""What can go wrong with a task's data.

MqmkError                    every error of this project that a user can act on (mqmk.matcher.errors)
└── LearnerError             a task could not be read, made or learned
    ├── TaskRejected         data that must not be trained on: it has a code, a reason and a place
    └── PackError            pictures that cannot be packed into shards
"""

from mqmk.matcher.errors import MqmkError


class LearnerError(MqmkError):
    """A task could not be read, made or learned."""


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
    """Pictures that cannot be packed into shards."""
