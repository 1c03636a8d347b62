"""How MLflow is told to be quiet and quick, and which tracking URIs are taken, before anything of it is imported."""

import logging
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final

from mqmk.daemon.errors import RegistryError
from mqmk.daemon.passwords import hidden

ANSWER_SECONDS: Final = 8
TRANSFER_SECONDS: Final = 120
_TIMEOUT: Final = "MLFLOW_HTTP_REQUEST_TIMEOUT"
_ENVIRONMENT: Final = {  # MLflow takes these from the environment only; what the operator has set stays
    _TIMEOUT: str(ANSWER_SECONDS),
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",  # a repeated POST may create twice; whoever asks again here looks first
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_LOGGING_LEVEL": "ERROR",
}


def be_quiet_and_quick() -> None:
    """Nothing on the terminal, nothing sent home, no waiting for minutes."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    for name in ("alembic", "mlflow"):
        logging.getLogger(name).setLevel(logging.ERROR)


@contextmanager
def patience() -> Iterator[None]:
    """Files take longer than questions."""
    before = os.environ[_TIMEOUT]
    os.environ[_TIMEOUT] = str(max(int(before), TRANSFER_SECONDS))
    try:
        yield
    finally:
        os.environ[_TIMEOUT] = before


def database_path(tracking_uri: str) -> Path | None:
    """The SQLite file, None for a server."""
    if tracking_uri.startswith(("http://", "https://")):
        return None
    path = tracking_uri.removeprefix("sqlite:///").partition("?")[0]
    if not tracking_uri.startswith("sqlite:///") or path in ("", ":memory:"):
        raise RegistryError(
            "expected an MLflow tracking URI such as sqlite:///state/mlflow.db or https://mlflow.example.org, got "
            f"{hidden(tracking_uri)}; for another database start `mlflow server --backend-store-uri ...`, and give its "
            "URL",
            passing=False,
        )
    return Path(path)


def expect_readable(database: Path) -> None:
    """MLflow itself would try for 100 s to open a file that it cannot."""
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("PRAGMA schema_version")
