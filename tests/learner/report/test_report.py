"""The report is one file that shows the document's numbers, loads nothing, and fits a phone."""

import dataclasses
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from support.builders import frozen, random_pool, random_timm_vit

from mqmk.learner.bench.accuracy import AccuracySettings, Run, to_json
from mqmk.learner.data.streams import StreamSettings
from mqmk.learner.data.tasks import InMemory
from mqmk.learner.evaluation.evaluate import Evaluation
from mqmk.learner.evaluation.projection import project_2d
from mqmk.learner.evaluation.query_table import HeldOut, QueryTable, extend
from mqmk.learner.report.accuracy_report import plain_passes, write_report
from mqmk.learner.report.markup import Markup, join, tag
from mqmk.matcher.pool import PromptPool

CHROMIUM = Path("/usr/bin/chromium")
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
CLASSES = (3, 2, 4)
MATCHERS = ("sqmk", "mqmk", "mqmk-ei", "cascade", "perfect")
EVIL = "<script>alert(1)</script>"
SECTIONS = ("summary", "lines", "confusion", "forgetting", "map", "classes", "ablations", "cost", "settings")


class Page(HTMLParser):
    """What a page holds: tags with their attributes, and the text of every table row."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.rows: list[list[str]] = []
        self._in_cell = False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        self._in_cell = tag in ("td", "th") or (self._in_cell and tag not in ("table", "p"))

    def handle_endtag(self, tag):
        self._in_cell = self._in_cell and tag not in ("td", "th")

    def handle_data(self, data):
        if self._in_cell:
            self.rows[-1][-1] += data


@pytest.fixture
def vit():
    return frozen(random_timm_vit())


def noise(images: int, classes: int) -> InMemory:
    return InMemory(torch.randint(0, 256, (images, 3, 12, 12), dtype=torch.uint8), torch.arange(images) % classes)


def a_run(vit, classes=CLASSES, joint=None) -> Run:
    """As if tasks had been learned one after another; the pool is random."""
    whole = random_pool(classes, vit=vit)
    evil = dataclasses.replace(whole.tasks[0], classes=(EVIL, *whole.tasks[0].classes[1:]))
    tasks = (evil, dataclasses.replace(whole.tasks[1], name='"><img src=x onerror=alert(2)>'), *whole.tasks[2:])
    held_out, table, tallies = HeldOut.empty(12), QueryTable.empty(vit.dim), []
    for number, count in enumerate(classes):
        pool: PromptPool = dataclasses.replace(whole, tasks=tasks[: number + 1])
        held_out = held_out.with_task(number, noise(4 * count, count))
        table = extend(table, vit, pool, held_out)
        evaluation = Evaluation(pool, table, held_out)
        tallies.append({name: evaluation.tally(name) for name in MATCHERS})
    return Run(tuple(tallies), evaluation, 0.4321, joint, 3.0, 1.0)


def report(folder: Path, vit, runs):
    stream = StreamSettings(Path("images"), len(runs[0].tallies))
    settings = AccuracySettings(stream, matchers=MATCHERS, ablations=True)
    document = to_json(settings, vit, runs, seconds=5.0)
    path = folder / "report.html"
    write_report(path, settings, vit, runs, document)
    return path, document


@pytest.fixture
def written(tmp_path, vit):
    return report(tmp_path, vit, [a_run(vit, joint=0.8765), a_run(vit, joint=0.8765)])


def test_the_page_holds_every_section_and_links_to_it(written):
    page = Page(written[0].read_text())
    ids = [attributes["id"] for name, attributes in page.tags if name == "section"]
    assert ids == list(SECTIONS)
    assert [attributes["href"] for name, attributes in page.tags if name == "a"] == [f"#{each}" for each in SECTIONS]
    assert [name for name, _ in page.tags].count("details") == 3 + 2  # tasks, words, settings


def test_nothing_is_loaded_from_anywhere(written):
    text = written[0].read_text()
    for _, attributes in Page(text).tags:
        for key in ("src", "href", "xlink:href", "action", "data", "srcset"):
            assert (attributes.get(key) or "#").startswith(("#", "data:image/png;base64,"))
    assert not re.search(r"https?://|url\(|@import|<link|<script", text)


def test_names_never_become_markup(written):
    text = written[0].read_text()
    page = Page(text)
    assert EVIL not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert not any(key.startswith("on") for _, attributes in page.tags for key in attributes)
    assert any(row and row[0] == EVIL for row in page.rows)


def test_the_table_shows_the_numbers_of_the_document(written):
    path, document = written
    rows = {row[0]: row[1:] for row in reversed(Page(path.read_text()).rows) if len(row) == 7}
    for name, figures in document["matchers"].items():
        for place, key in enumerate(("matching_rate", "accuracy_task", "accuracy_all", "forgetting", "recall_at_3")):
            assert rows[name][place] == f"{100 * figures[key]:.1f} % ± {100 * figures[f'{key}_spread']:.1f}"
        assert rows[name][5] == f"{figures['queries']:.1f}"
    assert "43.2 %" in rows["no prompts + nearest class mean"]
    assert "87.6 %" in rows["joint"] or "87.7 %" in rows["joint"]


def test_forgetting_is_shown_task_by_task_and_its_mean_is_the_documents(written):
    path, document = written
    (mean,) = [row for row in Page(path.read_text()).rows if row and row[0] == "mean"]
    assert mean[3] == f"{100 * document['matchers']['mqmk']['forgetting']:.1f} %"
    assert mean[6] == f"{100 * document['matchers']['mqmk-ei']['forgetting']:.1f} %"


def test_one_seed_shows_no_spread_and_no_joint_row_that_was_not_run(tmp_path, vit):
    path, _ = report(tmp_path, vit, [a_run(vit)])
    rows = Page(path.read_text()).rows
    assert "joint" not in [row[0] for row in rows if row]
    assert not any("±" in cell for row in rows for cell in row)


def test_one_task_of_one_class_makes_a_report_too(tmp_path, vit):
    run = a_run(vit, (1, 1))
    short = dataclasses.replace(run, tallies=run.tallies[:1], evaluation=run.evaluation)
    first = dataclasses.replace(run.evaluation.pool, tasks=run.evaluation.pool.tasks[:1])
    held_out = HeldOut.empty(12).with_task(0, noise(2, 1))
    alone = Evaluation(first, extend(QueryTable.empty(vit.dim), vit, first, held_out), held_out)
    path, _ = report(tmp_path, vit, [dataclasses.replace(short, evaluation=alone)])
    assert EVIL not in path.read_text()


def test_a_plane_keeps_every_point_and_is_the_same_again():
    few, many = torch.randn(4, 16), torch.randn(40, 16)
    for points in (few, many):
        assert project_2d(points).shape == (len(points), 2)
        assert torch.equal(project_2d(points), project_2d(points))


def test_a_query_of_the_given_task_costs_one_pass_and_sharing_makes_many_cheaper(vit):
    assert plain_passes("perfect", 1.0, vit, first_e_layer=2) == pytest.approx(1)
    assert plain_passes("sqmk", 2.0, vit, first_e_layer=2) == pytest.approx(2)
    assert 1 < plain_passes("mqmk", 10.0, vit, first_e_layer=2) < 10
    assert plain_passes("mqmk", 10.0, vit, first_e_layer=0) > plain_passes("mqmk", 10.0, vit, first_e_layer=2)


def test_only_markup_is_left_as_it_is():
    assert tag("b", "1 < 2", title='"') == '<b title="&quot;">1 &lt; 2</b>'
    assert join("<", Markup("<br>"), None, 3) == "&lt;<br>3"
    assert tag("details", open=True, hidden=False) == "<details open></details>"


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("classes", [CLASSES, (1,) * 20], ids=["3-tasks", "20-tasks"])
def test_a_browser_shows_it_without_errors_and_without_scrolling_sideways(tmp_path, vit, width, classes):
    playwright = pytest.importorskip("playwright.sync_api")
    if not CHROMIUM.exists():
        pytest.skip("needs a browser: apt-get install chromium")
    path, _ = report(tmp_path, vit, [a_run(vit, classes)])
    troubles: list[str] = []
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=str(CHROMIUM), args=FLAGS)
        page = browser.new_page(viewport={"width": width, "height": 900})
        page.on("console", lambda message: troubles.append(message.text))
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("dialog", lambda dialog: (troubles.append(dialog.message), dialog.dismiss()))
        page.on("request", lambda request: troubles.append(request.url) if request.url.startswith("http") else None)
        page.goto(path.as_uri())
        page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
        across = page.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
        shown = [page.locator(f"section#{name} h2").is_visible() for name in SECTIONS]
        images = page.evaluate("[...document.images].every(image => image.naturalWidth > 0)")
        browser.close()
    assert troubles == []
    assert across[0] <= across[1]
    assert all(shown)
    assert images
