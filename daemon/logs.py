"""Logging: each line is a sentence, an event name and ids, as JSON or for people.

    log = logging.getLogger(__name__)
    log.info("trained birds in 12 s", extra=event("task.trained", task="birds", seconds=12.1))

Lines go to standard error; keeping and rotating them is left to systemd or whatever started the daemon. Passwords in
URLs are redacted in every line, also in those of other packages.
"""

import json
import logging
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final, TextIO

from mqmk.daemon.config.sections import Log
from mqmk.daemon.redaction import redact

OURS: Final = "mqmk"
FIELDS: Final = ("time", "level", "event", "message", "logger", "error")
"""The fields of a JSON line besides ids; an id of such a name gets a trailing underscore."""


def event(name: str, /, **ids: object) -> Mapping[str, Any]:
    """For `extra`: the event name, and the ids of what it is about."""
    return {"event": name, "ids": ids}


def configure_logging(settings: Log, stream: TextIO | None = None) -> None:
    """Send every log line of this process to the stream; from other packages, only warnings."""
    stream = stream or sys.stderr
    handler = logging.StreamHandler(stream)
    handler.setFormatter(HumanLines() if _is_human_readable(settings, stream) else JsonLines())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger(OURS).setLevel(settings.level.upper())
    logging.captureWarnings(True)


def redirect_console_loggers() -> None:
    """Make packages that log to the console (Ray, torch) log through our handler.

    Call it after importing them, because that is when they add their handlers.
    """
    for logger in list(logging.root.manager.loggerDict.values()):
        if isinstance(logger, logging.Logger) and any(map(_is_console, logger.handlers)):
            logger.handlers[:] = [handler for handler in logger.handlers if not _is_console(handler)]
            logger.propagate = True
            logger.setLevel(logging.NOTSET)


def _is_console(handler: logging.Handler) -> bool:
    return isinstance(handler, logging.StreamHandler) and handler.stream in (sys.stderr, sys.stdout)


class JsonLines(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        """The line of a record."""
        line: dict[str, Any] = {
            "time": _time(record).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "event": getattr(record, "event", "log"),
            "message": redact(record.getMessage()),
            "logger": record.name,
        }
        line |= {f"{name}_" if name in FIELDS else name: value for name, value in _ids(record).items()}
        if record.exc_info:
            line["error"] = redact(self.formatException(record.exc_info))
        return json.dumps(line, default=str)


class HumanLines(logging.Formatter):
    """`05:06:07 trained birds in 12 s  [task.trained task=birds seconds=12.1]`, with the level where it matters."""

    def format(self, record: logging.LogRecord) -> str:
        """The line of a record; only a traceback takes more lines."""
        level = "" if record.levelno == logging.INFO else f"{record.levelname} "
        facts = [getattr(record, "event", record.name), *(f"{name}={value}" for name, value in _ids(record).items())]
        line = f"{_time(record).astimezone():%H:%M:%S} {level}{redact(record.getMessage())}  [{' '.join(facts)}]"
        trace = redact(self.formatException(record.exc_info)).splitlines() if record.exc_info else []
        return "\n".join(map(_escape, (line, *trace)))


def _escape(line: str) -> str:
    """One line without control characters that a terminal would interpret."""
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in line)


def _is_human_readable(settings: Log, stream: TextIO) -> bool:
    return settings.format == "human" or (settings.format == "auto" and stream.isatty())


def _time(record: logging.LogRecord) -> datetime:
    return datetime.fromtimestamp(record.created, UTC)


def _ids(record: logging.LogRecord) -> Mapping[str, object]:
    found: Mapping[str, object] = getattr(record, "ids", {})
    return {name: redact(value) if isinstance(value, str) else value for name, value in found.items()}
