"""The errors of the daemon.

MqmkError                    every error of this project that a user can act on (mqmk.matcher.errors)
└── DaemonError              an error of the daemon
    ├── ConfigError          a setting is unknown or wrong
    ├── LedgerError          the ledger cannot be opened or has no such row
    │   └── OutdatedError    the task has moved on since it was read
    ├── ExternalError        a dependency failed; `transient` if a retry may help
    │   ├── BucketError      the bucket cannot be read or changed
    │   └── RegistryError    MLflow refused a request or is unreachable
    ├── RayError             Ray could not be started, reached or stopped
    └── WorkerDied           a worker ended before its job did
"""

from mqmk.matcher.errors import MqmkError


class DaemonError(MqmkError):
    """An error of the daemon."""


class ConfigError(DaemonError):
    """A setting is unknown or wrong."""


class LedgerError(DaemonError):
    """The ledger cannot be opened or has no such row."""


class OutdatedError(LedgerError):
    """The task has moved on since it was read: the operation no longer applies."""


class ExternalError(DaemonError):
    """A dependency failed; `transient` if a retry may help."""

    def __init__(self, message: str, transient: bool = False) -> None:
        super().__init__(message, transient)  # both, so that it survives pickling by a worker
        self.transient = transient

    def __str__(self) -> str:
        return str(self.args[0])


class BucketError(ExternalError):
    """The bucket cannot be read or changed."""


class RegistryError(ExternalError):
    """MLflow refused a request or is unreachable."""


class RayError(DaemonError):
    """Ray could not be started, reached or stopped."""


class WorkerDied(DaemonError):  # noqa: N818 - what happened
    """A worker ended before its job did."""
