"""MLflow's environment, to be set before it is imported, and which tracking URIs are accepted."""

import logging
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final

from mqmk.daemon.errors import RegistryError
from mqmk.daemon.redaction import redact

ANSWER_SECONDS: Final = 8
TRANSFER_SECONDS: Final = 120
_TIMEOUT: Final = "MLFLOW_HTTP_REQUEST_TIMEOUT"
_ENVIRONMENT: Final = {  # MLflow reads these from the environment only; the operator's own values stay
    _TIMEOUT: str(ANSWER_SECONDS),
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",  # a repeated POST may create twice; our own retries look first
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_LOGGING_LEVEL": "ERROR",
}


def configure_client() -> None:
    """No output, no telemetry, short timeouts."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    for name in ("alembic", "mlflow"):
        logging.getLogger(name).setLevel(logging.ERROR)


@contextmanager
def transfer_timeout() -> Iterator[None]:
    """Uploads and downloads get a longer timeout than other requests."""
    before = os.environ[_TIMEOUT]
    os.environ[_TIMEOUT] = str(max(int(before), TRANSFER_SECONDS))
    try:
        yield
    finally:
        os.environ[_TIMEOUT] = before


def database_path(tracking_uri: str) -> Path | None:
    """The SQLite file; None for a server."""
    if tracking_uri.startswith(("http://", "https://")):
        return None
    path = tracking_uri.removeprefix("sqlite:///").partition("?")[0]
    if not tracking_uri.startswith("sqlite:///") or path in ("", ":memory:"):
        raise RegistryError(
            "expected an MLflow tracking URI such as sqlite:///state/mlflow.db or https://mlflow.example.org, got "
            f"{redact(tracking_uri)}; for another database start `mlflow server --backend-store-uri ...` and use its "
            "URL",
            transient=False,
        )
    return Path(path)


def require_readable(database: Path) -> None:
    """sqlite3.Error if the file cannot be opened; MLflow itself would retry for 100 s."""
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("PRAGMA schema_version")
