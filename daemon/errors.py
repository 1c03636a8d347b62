"""What can go wrong around the daemon.

MqmkError                    every error of this project that a user can act on (mqmk.matcher.errors)
└── DaemonError              something around the daemon
    ├── ConfigError          a setting is unknown or wrong
    ├── LedgerError          the ledger cannot be opened or does not hold what was asked for
    ├── PassingError         something outside did not work; `passing` if trying again may help
    │   ├── BucketError      the bucket cannot be read or changed
    │   └── RegistryError    MLflow refused or was not reached
    ├── RayError             Ray could not be started, reached or stopped
    └── WorkerDied           a worker ended before its job did
"""

from mqmk.matcher.errors import MqmkError


class DaemonError(MqmkError):
    """Something around the daemon."""


class ConfigError(DaemonError):
    """A setting is unknown or wrong."""


class LedgerError(DaemonError):
    """The ledger cannot be opened or does not hold what was asked for."""


class PassingError(DaemonError):
    """Something outside did not work; `passing` if trying again may help."""

    def __init__(self, message: str, passing: bool = False) -> None:
        super().__init__(message, passing)  # both, so that a copy from a worker is whole
        self.passing = passing

    def __str__(self) -> str:
        return str(self.args[0])


class BucketError(PassingError):
    """The bucket cannot be read or changed."""


class RegistryError(PassingError):
    """MLflow refused or was not reached."""


class RayError(DaemonError):
    """Ray could not be started, reached or stopped."""


class WorkerDied(DaemonError):  # noqa: N818 - what happened
    """A worker ended before its job did."""
