"""The page in a real browser: draw and see the answer; a task that is learned meanwhile shows up by itself."""

import os
import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest
from fingerprints import empty_pool, marked_pool, picture, publish, task
from plain_server import served

from mqmk.matcher.backbone import load_backbone

playwright = pytest.importorskip("playwright.sync_api", exc_type=ImportError)
CHROMIUM = shutil.which("chromium")
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip


@pytest.fixture(scope="module")
def vit():
    return load_backbone()


@pytest.fixture(scope="module")
def browser():
    if not CHROMIUM:
        pytest.skip("no browser here: apt-get install chromium")
    with playwright.sync_playwright() as player:
        opened = player.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield opened
        opened.close()


@pytest.fixture
def page(browser, request):
    """A page whose console must stay empty."""
    options = {"color_scheme": "light", "viewport": {"width": 1100, "height": 800}} | getattr(request, "param", {})
    opened, complaints = browser.new_page(**options), []
    opened.on("console", lambda message: complaints.append(message.text))
    opened.on("pageerror", lambda error: complaints.append(str(error)))
    yield opened
    opened.close()
    assert not complaints


@contextmanager
def shown(page, vit, folder, path="/"):
    """What a service shows; closed before it ends, because the page asks it all the time.

    MQMK_SCREENSHOTS names a folder for what it looked like.
    """
    with served(vit, folder) as url:
        page.goto(f"{url}{path}")
        yield
        if pictures := os.environ.get("MQMK_SCREENSHOTS"):
            page.screenshot(path=Path(pictures) / f"{folder.name}.png", full_page=True)
        page.close()


def draw(page) -> None:
    box = page.locator("#paper").bounding_box()
    page.mouse.move(box["x"] + 60, box["y"] + 60)
    page.mouse.down()
    for x, y in ((200, 70), (190, 200), (70, 190), (60, 60)):
        page.mouse.move(box["x"] + x, box["y"] + y, steps=4)
    page.mouse.up()


def test_a_drawing_is_answered_and_a_new_task_shows_up_without_reload(page, vit, tmp_path):
    publish(tmp_path, marked_pool(vit, 1), 1)
    with shown(page, vit, tmp_path):
        playwright.expect(page.locator("#state")).to_contain_text("version 1 · 4 tasks · 8 classes")
        draw(page)
        playwright.expect(page.locator("#how")).to_contain_text("version 1")
        assert page.locator("#match .bar").count() == 4
        page.locator("#yes").click()
        playwright.expect(page.locator("#thanks")).to_have_text("Thank you.")
        publish(tmp_path, marked_pool(vit, 2), 2)
        playwright.expect(page.locator("#tasks")).to_contain_text("label-v2-a")
        playwright.expect(page.locator("#state")).to_contain_text("version 2")
        draw(page)
        playwright.expect(page.locator("#how")).to_contain_text("version 2")


@pytest.mark.parametrize(
    "page", [{"viewport": {"width": 380, "height": 780}, "color_scheme": "dark"}], indirect=True, ids=["phone"]
)
def test_a_chosen_file_is_answered_on_a_phone_in_the_dark(page, vit, tmp_path):
    publish(tmp_path, marked_pool(vit, 1), 1)
    with shown(page, vit, tmp_path):
        page.locator("#file").set_input_files({"name": "a.png", "mimeType": "image/png", "buffer": picture()})
        playwright.expect(page.locator("#label")).to_contain_text("label-v1-")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        page.locator("#matcher").select_option("mqmk-ei")
        playwright.expect(page.locator("#how")).to_contain_text("mqmk-ei, 2 queries")


HAND_OVER = """([event, field, bytes]) => {
  const given = new DataTransfer();
  given.items.add(new File([new Uint8Array(bytes)], "a.png", {type: "image/png"}));
  const options = {bubbles: true, cancelable: true, [field]: given};
  dispatchEvent(event === "drop" ? new DragEvent(event, options) : new ClipboardEvent(event, options));
}"""


@pytest.mark.parametrize(("event", "field"), [("drop", "dataTransfer"), ("paste", "clipboardData")])
def test_a_picture_that_is_dropped_or_pasted_is_shown_and_answered(page, vit, tmp_path, event, field):
    publish(tmp_path, marked_pool(vit, 1), 1)
    with shown(page, vit, tmp_path):
        page.evaluate(HAND_OVER, [event, field, list(picture())])
        playwright.expect(page.locator("#label")).to_contain_text("label-v1-")
        playwright.expect(page.locator("#paper")).to_have_attribute("data-picture", "1")


def test_names_that_look_like_markup_stay_text(page, vit, tmp_path):
    names = ("<img src=x onerror='run = 1'>", "<script>run = 1</script>")
    publish(tmp_path, empty_pool(vit).with_task(task("evil", names, vit, seed=1)), 1)
    with shown(page, vit, tmp_path):
        playwright.expect(page.locator("#tasks")).to_contain_text(", ".join(names))
        draw(page)
        playwright.expect(page.locator("#top")).to_contain_text(names[0])
        assert page.locator("#label").text_content() in names
        assert page.locator("img, body script ~ script").count() == 0
        assert page.evaluate("typeof run") == "undefined"


def test_before_anything_is_learned_the_page_says_so(page, vit, tmp_path):
    publish(tmp_path, empty_pool(vit), 1)
    with shown(page, vit, tmp_path):
        playwright.expect(page.locator("#state")).to_contain_text("nothing learned yet")


def test_the_documentation_lists_every_route(page, vit, tmp_path):
    publish(tmp_path, marked_pool(vit, 1), 1)
    with shown(page, vit, tmp_path, "/docs"):
        for path in ("/predict", "/feedback", "/pool", "/v2/models/mqmk/infer"):
            playwright.expect(page.get_by_role("heading", name=path).first).to_be_visible()
