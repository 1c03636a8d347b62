"""A log line is a sentence, an event name and ids, for machines or for people, and always one line."""

import io
import json
import logging
import re
import sys
import warnings
from collections.abc import Callable, Iterator

import pytest

from mqmk.daemon.config.sections import Log
from mqmk.daemon.logs import configure_logging, event, redirect_console_loggers

log = logging.getLogger("mqmk.daemon.somewhere")


class Terminal(io.StringIO):
    """A stream that says it is one."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    root, ours = logging.getLogger(), logging.getLogger("mqmk")
    before = root.handlers[:], root.level, ours.level
    yield
    logging.captureWarnings(False)
    root.handlers[:], root.level = before[:2]
    root.setLevel(before[1])
    ours.setLevel(before[2])


def said(speak: Callable[[], object], settings: Log | None = None, stream: io.StringIO | None = None) -> str:
    """What is written to the stream meanwhile."""
    stream = stream or io.StringIO()
    configure_logging(settings or Log(format="json"), stream)
    speak()
    return stream.getvalue()


def learned() -> None:
    log.info("learned %s in 12 s", "birds", extra=event("task.trained", task="birds", seconds=12.1))


def failed() -> None:
    try:
        raise ValueError("no such shard")
    except ValueError:
        log.exception("could not read %s", "birds", extra=event("task.failed", task="birds"))


def test_a_json_line_holds_sentence_event_and_ids():
    line = json.loads(said(learned))
    assert re.fullmatch(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line.pop("time"))
    assert line == {
        "level": "info", "event": "task.trained", "message": "learned birds in 12 s",
        "logger": "mqmk.daemon.somewhere", "task": "birds", "seconds": 12.1,
    }  # fmt: skip


def test_a_line_for_people_begins_with_time_and_sentence():
    line = said(learned, Log(format="human"))
    assert re.fullmatch(r"\d\d:\d\d:\d\d learned birds in 12 s  \[task.trained task=birds seconds=12.1\]\n", line)


def test_a_line_for_people_names_its_level_where_it_matters():
    line = said(lambda: log.warning("disk is full", extra=event("disk.full")), Log(format="human"))
    assert re.search(r"\d WARNING disk is full  \[disk.full\]$", line.strip())


@pytest.mark.parametrize(("stream", "is_json"), [(Terminal, False), (io.StringIO, True)])
def test_auto_is_for_people_on_a_terminal_and_json_elsewhere(stream, is_json):
    assert said(learned, Log(format="auto"), stream()).startswith("{") is is_json


def test_an_error_brings_its_traceback_inside_the_one_json_line():
    text = said(failed)
    assert len(text.splitlines()) == 1
    line = json.loads(text)
    assert line["level"] == "error"
    assert line["error"].endswith("ValueError: no such shard")


def test_an_error_shows_people_its_traceback_below_the_line():
    first, *rest = said(failed, Log(format="human")).splitlines()
    assert "ERROR could not read birds  [task.failed task=birds]" in first
    assert rest[-1] == "ValueError: no such shard"


@pytest.mark.parametrize("style", ["json", "human"])
def test_a_name_with_line_breaks_or_escapes_cannot_forge_a_line(style):
    evil = "birds\n05:06:07 all is well\x1b[2J\u2028"
    text = said(lambda: log.info("found %s", evil, extra=event("task.found", task=evil)), Log(format=style))
    assert len(text.splitlines()) == 1
    assert "\x1b" not in text


def test_an_id_cannot_hide_a_field_of_the_line():
    line = json.loads(said(lambda: log.info("x", extra=event("a.b", level="low", time=1, message="y"))))
    assert (line["level"], line["message"]) == ("info", "x")
    assert (line["level_"], line["time_"], line["message_"]) == ("low", 1, "y")


def test_an_id_of_any_type_is_written():
    line = json.loads(said(lambda: log.info("x", extra=event("a.b", path=__import__("pathlib").Path("/p")))))
    assert line["path"] == "/p"


def test_the_level_is_ours_and_others_are_heard_from_warnings_on():
    def speak() -> None:
        log.debug("ours, fine")
        logging.getLogger("somebody.else").info("theirs, fine")
        logging.getLogger("somebody.else").warning("theirs, bad")

    lines = [json.loads(line) for line in said(speak, Log("json", "debug")).splitlines()]
    assert [line["message"] for line in lines] == ["ours, fine", "theirs, bad"]
    assert lines[1]["event"] == "log"
    assert [line for line in said(speak, Log("json", "error")).splitlines() if "ours" in line] == []


def test_python_warnings_become_log_lines():
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        line = json.loads(said(lambda: warnings.warn("old thing", UserWarning, stacklevel=1)))
    assert "old thing" in line["message"]


def test_setting_up_twice_does_not_say_everything_twice():
    configure_logging(Log(format="json"), io.StringIO())
    assert len(said(learned).splitlines()) == 1


def test_lines_go_to_standard_error(capsys):
    configure_logging(Log(format="json"))
    learned()
    captured = capsys.readouterr()
    assert not captured.out
    assert "task.trained" in captured.err
    assert sys.stderr


def test_packages_that_write_to_the_console_by_themselves_write_our_lines(tmp_path):
    loud, child = logging.getLogger("loud"), logging.getLogger("loud.child")
    kept = logging.FileHandler(tmp_path / "own.log")
    loud.handlers[:], loud.propagate = [logging.StreamHandler(sys.stderr), kept], False
    loud.setLevel(logging.INFO)

    def speak() -> None:
        redirect_console_loggers()
        for each in (loud, child):
            each.info("fine")
            each.warning("bad")

    try:
        lines = [json.loads(line) for line in said(speak).splitlines()]
    finally:
        kept.close()
        loud.handlers[:] = []
    assert [(line["logger"], line["message"]) for line in lines] == [("loud", "bad"), ("loud.child", "bad")]
    assert (tmp_path / "own.log").read_text() == "bad\nbad\n"
