"""Paths, names and links in the docs exist, and every recipe of CONTRIBUTING.md fits the example it tells to follow."""

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CODE_PAGES = [ROOT / name for name in ("CONTRIBUTING.md", "ARCHITECTURE.md")]
FOLDERS = ("matcher", "learner", "daemon", "deploy", "tests", "docs", "src")
PAGES = [
    path
    for path in sorted(ROOT.rglob("*.md"))
    if path.relative_to(ROOT).parts[0] in (path.name, *FOLDERS)  # neither .venv nor build
]
PATH = re.compile(rf"(?:{'|'.join(FOLDERS)}|\.ci|\.github)/[\w./-]*")
NAME = re.compile(r"[A-Z_]{4,}|_[a-z0-9]+|_?[a-z]+(?:_[a-z0-9]+)+|(?:[A-Z][a-z]+){2,}")  # CONSTANT, name_of, ClassName


def prose(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def spans(text: str) -> list[str]:
    """What stands between backticks, outside of code blocks."""
    return re.findall(r"`([^`\n]+)`", prose(text))


@cache
def source() -> str:
    """All code but this folder's, where a name may be made up."""
    parts = [ROOT / part for part in FOLDERS[:4]] + [ROOT / "tests" / "support"]
    return "\n".join(path.read_text() for part in parts for path in part.rglob("*.py"))


def missing_paths(text: str) -> list[str]:
    return [span for span in spans(text) if PATH.fullmatch(span) and not (ROOT / span).exists()]


def missing_names(text: str) -> list[str]:
    names = {span for span in spans(text) if NAME.fullmatch(span)}
    return sorted(name for name in names if not re.search(rf"\b{name}\b", source()))


def recipes(text: str) -> list[tuple[str, list[str], list[str]]]:
    """Title, the words to follow, and the files in the first column of the table."""
    found = []
    for part in text.split("\n### ")[1:]:
        follow = re.search(r"^Follow (.*)$", part, re.MULTILINE)
        assert follow, part
        rows = [row.split("|")[1] for row in part.splitlines() if row.startswith("| `")]
        found.append((part.splitlines()[0], spans(follow[1]), [path for row in rows for path in spans(row)]))
    return found


RECIPES = recipes((ROOT / "CONTRIBUTING.md").read_text())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_path_on_the_page_exists(page):
    if page.name != "CHANGELOG.md":  # which tells of what is gone
        assert missing_paths(page.read_text()) == []


@pytest.mark.parametrize("page", CODE_PAGES, ids=lambda page: page.name)
def test_every_name_on_the_page_is_in_the_code(page):
    assert missing_names(page.read_text()) == []


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=lambda page: page.name)
def test_metrics_and_log_events_on_the_page_are_in_the_code(page):
    named = [
        span for span in spans(page.read_text()) if re.fullmatch(r"mqmk_[a-z_]+[a-z]|(?:daemon|task)\.[a-z_]+", span)
    ]
    assert [name for name in named if name not in source()] == []


def test_the_runbook_names_panels_as_the_dashboards_do():
    titles = re.findall(r'dashboard,\s+"([^"]+)"', (ROOT / "docs" / "runbook.md").read_text())
    assert titles
    assert [title for title in titles if f'"{title}"' not in source()] == []


def test_the_recipes_are_those_that_contributors_need():
    assert [title for title, _, _ in RECIPES] == [
        "A matcher", "A benchmark", "A method to compare with", "A metric", "A setting", "An operator command",
    ]  # fmt: skip


@pytest.mark.parametrize(("title", "words", "files"), RECIPES, ids=[title for title, _, _ in RECIPES])
def test_the_example_of_a_recipe_is_in_every_file_of_its_list(title, words, files):
    assert words and len(files) >= 2
    for file in files:
        text = (ROOT / file).read_text()
        assert any(re.search(rf"\b{word}\b", text) for word in words), f"{title}: {file} has none of {words}"


def walk(heading: str) -> list[str]:
    """The files of one walk of ARCHITECTURE.md, each once, in order; those in the last column are asides."""
    (part,) = [part for part in (ROOT / "ARCHITECTURE.md").read_text().split("\n## ") if part.startswith(heading)]
    rows = [row.rsplit("|", 2)[0] for row in part.splitlines() if row.startswith("|")]
    return list(dict.fromkeys(span for row in rows for span in spans(row) if PATH.fullmatch(span)))


@pytest.mark.parametrize(("heading", "most"), [("A task", 18), ("A request", 9)])
def test_a_walk_is_short(heading, most):
    assert most - 4 <= len(walk(heading)) <= most


def headings(path: Path) -> set[str]:
    """Anchors as GitHub makes them."""
    titles = re.findall(r"^#+ +(.*)$", prose(path.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_lead_somewhere(page):
    text = prose(page.read_text())
    for link in re.findall(r"\]\(([^)\s]+)\)|<img src=\"([^\"]+)\"", text):
        target, _, anchor = "".join(link).partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), f"{page.name}: {link}"
        if anchor:
            assert anchor in headings(path), f"{page.name}: {link}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_merge_was_left_half_done(page):
    assert not re.search(r"^(<<<<<<<|>>>>>>>) ", page.read_text(), re.MULTILINE)


def test_what_does_not_exist_would_be_noticed():
    text = "`daemon/no_such_file.py`, `no_such_function`, `_no_such`, `NoSuchClass`, `daemon/app.py`, `run_pass`."
    assert missing_paths(text) == ["daemon/no_such_file.py"]
    assert missing_names(text) == ["NoSuchClass", "_no_such", "no_such_function"]
