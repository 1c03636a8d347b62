"""`mqmk-daemon report`: one page that says what the ledger says, and loads nothing."""

import re
import shutil
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.daemons.daemon import RELEASED, daemon, drop, small_config

from mqmk.daemon.cli.main import cli
from mqmk.daemon.config.sections import Config, Gate, State
from mqmk.daemon.errors import DaemonError
from mqmk.daemon.ledger.ledger import Ledger
from mqmk.daemon.ledger.ledger import State as TaskState
from mqmk.daemon.status.figures import Share
from mqmk.daemon.status.html_report import MAX_TASKS, TaskHistory, read_history, render_report
from mqmk.learner.report.render import per_cent

CHROMIUM = Path("/usr/bin/chromium")
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
         "--disable-background-networking", "--disable-component-update"]  # fmt: skip
EVIL = "<script>alert(1)</script>"


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return Path(shutil.copytree(RELEASED, tmp_path / "state"))


def rows_of(page: str) -> list[list[str]]:
    """The text of every table row."""
    rows = re.findall(r"<tr>(.*?)</tr>", page, re.DOTALL)
    return [[re.sub(r"<[^>]+>", "", cell) for cell in re.findall(r"<t[hd].*?</t[hd]>", row)] for row in rows]


def test_the_page_shows_what_the_ledger_says(state):
    config = Config(state=State(state))
    ledger = Ledger(config.ledger_file)
    first, second = (row.evaluation for row in ledger.versions())
    ledger.close()
    done = CliRunner().invoke(cli, ["report", "--state", str(state)])
    assert done.stdout.strip() == str(state / "report.html")
    page = (state / "report.html").read_text()
    then, now = first["tasks"]["birds"], second["tasks"]["birds"]
    figures = (then["accuracy"], now["accuracy"], then["accuracy"] - now["accuracy"], then["matching_rate"],
               now["matching_rate"])  # fmt: skip
    rows = rows_of(page)
    assert ["birds", "1", *(f"{100 * each:.1f} %" for each in figures)] in rows
    images = {name: sum(row.values()) for name, row in second["confusion"].items()}
    names, total = ("matching_rate", "accuracy"), sum(images.values())
    shares = [sum(images[task] * row[name] for task, row in second["tasks"].items()) / total for name in names]
    rates = [f"{100 * value:.1f} % ±{Share(value, total).points}" for value in shares]
    assert ["2 (current)", "learn sea", "2", second["matcher"], *rates, "–", str(total)] in rows
    assert "did not record single classes" in page
    wrong = second["confusion"]["sea"]["birds"]
    assert f"sea, matched to birds: {wrong} of {sum(second['confusion']['sea'].values())} images" in page


def test_the_page_loads_nothing_and_runs_nothing(state):
    out = state / "elsewhere.html"
    CliRunner().invoke(cli, ["report", "--state", str(state), "--out", str(out)])
    page = unescape(out.read_text())
    assert "default-src 'none'" in page
    assert not re.findall(r"<(script|link|iframe|object)|https?://|@import|url\(", page)


def test_a_task_that_is_held_is_shown_with_its_reason_and_names_stay_text(tmp_path):
    parts = daemon(small_config(tmp_path, gate=Gate(accuracy_floor=0.0, fresh_process=False)))
    drop(tmp_path / "bucket", "birds")
    parts.run()
    parts.ledger.add_task(EVIL, "tasks/x", "f", TaskState.HELD, reason=f"because {EVIL}")
    page = render_report(read_history(parts.config, parts.ledger))
    recorded = parts.ledger.version(1).evaluation
    parts.close()
    assert ["1 (current)", "learn birds", "1"] in [row[:3] for row in rows_of(page)]
    assert f"<dt>calibration error</dt><dd>{per_cent(recorded['calibration_error'])}</dd>" in page
    for label, row in recorded["classes"].items():
        accuracy = Share(row["right"] / row["images"], row["images"])
        cells = [label, f"{per_cent(accuracy.value)} ±{accuracy.points}", str(row["right"]), str(row["images"])]
        assert cells in rows_of(page)
    for true, answered, images in recorded["mistaken_classes"]:
        assert [true, answered, str(images)] in rows_of(page)
    assert EVIL not in page
    assert "because &lt;script&gt;" in page
    assert "5 classes in 1 task<" in page


def test_before_the_first_version_it_says_so(tmp_path):
    parts = daemon(small_config(tmp_path))
    with pytest.raises(DaemonError, match="nothing has been learned yet"):
        read_history(parts.config, parts.ledger)
    parts.close()
    with pytest.raises(DaemonError, match="no daemon has run in"):
        raise CliRunner().invoke(cli, ["report", "--state", str(tmp_path / "absent")]).exception


def test_many_tasks_get_a_list_of_mistakes_instead_of_a_map(state):
    config = Config(state=State(state))
    ledger = Ledger(config.ledger_file)
    found = read_history(config, ledger)
    ledger.close()
    rows = [replace(found.kept[0].row, name=f"task{number}") for number in range(50)]
    confused = {row.name: {row.name: 5, rows[place - 1].name: place % 7} for place, row in enumerate(rows)}
    current = replace(found.current, evaluation={**found.current.evaluation, "confusion": confused})
    page = render_report(replace(found, kept=[TaskHistory(row, {}, {}) for row in rows], current=current))
    mistakes = [row for row in rows_of(page) if len(row) == 4 and row[0].startswith("task")]
    assert len(mistakes) == MAX_TASKS
    assert mistakes[0][2:] == ["6", f"{100 * 6 / 11:.1f} %"]
    assert "matched to task" not in page


@pytest.mark.parametrize("width", [390, 1280])
def test_a_browser_shows_every_column_of_every_table(state, width):
    playwright = pytest.importorskip("playwright.sync_api")
    if not CHROMIUM.exists():
        pytest.skip("needs a browser: apt-get install chromium")
    ledger = Ledger(state / "ledger.sqlite")
    many = {"samples": {f"class number {number}": 30 for number in range(20)}}
    ledger.add_task("household", "h", "f", TaskState.QUARANTINED, reason="cut off " * 30, report=many)
    ledger.close()
    CliRunner().invoke(cli, ["report", "--state", str(state)])
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=str(CHROMIUM), args=FLAGS)
        page = browser.new_page(viewport={"width": width, "height": 900})
        page.goto((state / "report.html").as_uri())
        cut = page.evaluate(
            "[...document.querySelectorAll('.scroll')].map(each => each.scrollWidth - each.clientWidth)"
        )
        align = page.evaluate("[...document.querySelectorAll('td.text')].map(each => getComputedStyle(each).textAlign)")
        rules = page.evaluate(
            "[...document.querySelectorAll('td details')].map(each => getComputedStyle(each).borderTop)"
        )
        browser.close()
    assert len(cut) >= 4 and max(cut) <= 0
    assert set(align) == {"left"}
    assert rules and all(each.startswith("0px") for each in rules)
