"""What the daemon says while it runs: each line a sentence, an event name and ids; as JSON lines or for people.

    log = logging.getLogger(__name__)
    log.info("learned birds in 12 s", extra=event("task.trained", task="birds", seconds=12.1))

Lines go to standard error; keeping and rotating them is the business of systemd or whoever started the daemon.
Passwords in URLs are hidden in all of them, whoever wrote the line.
"""

import json
import logging
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final, TextIO

from mqmk.daemon.config import Log
from mqmk.daemon.passwords import hidden

OURS: Final = "mqmk"
FIELDS: Final = ("time", "level", "event", "message", "logger", "error")
"""What a JSON line may hold besides ids; an id of such a name gets an underscore behind it."""


def event(name: str, /, **ids: object) -> Mapping[str, Any]:
    """For `extra`: the name that machines look for, and what the sentence is about."""
    return {"event": name, "ids": ids}


def set_up(settings: Log, stream: TextIO | None = None) -> None:
    """Send every log line of this process to the stream; from other people's packages, only warnings."""
    stream = stream or sys.stderr
    handler = logging.StreamHandler(stream)
    handler.setFormatter(HumanLines() if _for_people(settings, stream) else JsonLines())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger(OURS).setLevel(settings.level.upper())
    logging.captureWarnings(True)


class JsonLines(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """The line of a record."""
        line: dict[str, Any] = {
            "time": _time(record).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "event": getattr(record, "event", "log"),
            "message": hidden(record.getMessage()),
            "logger": record.name,
        }
        line |= {f"{name}_" if name in FIELDS else name: value for name, value in _ids(record).items()}
        if record.exc_info:
            line["error"] = hidden(self.formatException(record.exc_info))
        return json.dumps(line, default=str)


class HumanLines(logging.Formatter):
    """`05:06:07 learned birds in 12 s  [task.trained task=birds seconds=12.1]`, with the level where it matters."""

    def format(self, record: logging.LogRecord) -> str:
        """The line of a record; only a traceback takes more lines."""
        level = "" if record.levelno == logging.INFO else f"{record.levelname} "
        facts = [getattr(record, "event", record.name), *(f"{name}={value}" for name, value in _ids(record).items())]
        line = f"{_time(record).astimezone():%H:%M:%S} {level}{hidden(record.getMessage())}  [{' '.join(facts)}]"
        trace = hidden(self.formatException(record.exc_info)).splitlines() if record.exc_info else []
        return "\n".join(map(_plain, (line, *trace)))


def _plain(line: str) -> str:
    """One line, and nothing that a terminal would obey."""
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in line)


def _for_people(settings: Log, stream: TextIO) -> bool:
    return settings.format == "human" or (settings.format == "auto" and stream.isatty())


def _time(record: logging.LogRecord) -> datetime:
    return datetime.fromtimestamp(record.created, UTC)


def _ids(record: logging.LogRecord) -> Mapping[str, object]:
    found: Mapping[str, object] = getattr(record, "ids", {})
    return {name: hidden(value) if isinstance(value, str) else value for name, value in found.items()}
