"""The page in a real browser: draw and see the answer; a task that is learned meanwhile shows up by itself."""

import os
import re
import shutil
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from support.servers.http_server import served
from support.serving.fingerprints import empty_pool, image_bytes, marked_pool, publish, task

from mqmk.matcher.backbone import load_backbone

playwright = pytest.importorskip("playwright.sync_api", exc_type=ImportError)
CHROMIUM = shutil.which("chromium")
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip


EXPECTED_REFUSAL = re.compile(r"Failed to load resource: .* status of (401|415) ")
"""What the browser itself writes about an answer that the page shows to its user."""


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
    opened.on("console", lambda message: EXPECTED_REFUSAL.search(message.text) or complaints.append(message.text))
    opened.on("pageerror", lambda error: complaints.append(str(error)))
    yield opened
    opened.close()
    assert not complaints


@contextmanager
def shown(page, vit, folder, path="/", keys=()):
    """What a service shows; closed before it ends, because the page asks it all the time.

    MQMK_SCREENSHOTS names a folder for what it looked like.
    """
    with served(vit, folder, *keys) as url:
        page.goto(f"{url}{path}")
        yield
        if images := os.environ.get("MQMK_SCREENSHOTS"):
            page.screenshot(path=Path(images) / f"{folder.name}.png", full_page=True)
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
        page.locator("#file").set_input_files({"name": "a.png", "mimeType": "image/png", "buffer": image_bytes()})
        playwright.expect(page.locator("#label")).to_contain_text("label-v1-")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        page.locator("#matcher").select_option("mqmk-ei")
        playwright.expect(page.locator("#how")).to_contain_text("mqmk-ei, 2 queries")


HAND_OVER = """([event, field, files]) => {
  const given = new DataTransfer();
  for (const [name, type, bytes] of files) given.items.add(new File([new Uint8Array(bytes)], name, {type}));
  const options = {bubbles: true, cancelable: true, [field]: given};
  dispatchEvent(event === "drop" ? new DragEvent(event, options) : new ClipboardEvent(event, options));
}"""
GOOD = ("a.png", "image/png", list(image_bytes()))
TEXT = ("notes.txt", "text/plain", list(b"hello"))
DAMAGED = ("photo.heic", "image/heic", list(b"no image at all"))


def drop(page, *files) -> None:
    page.evaluate(HAND_OVER, ["drop", "dataTransfer", list(files)])


def is_blank(page) -> bool:
    """Whether nothing but white is on the paper."""
    look = "() => paper.getContext('2d').getImageData(0, 0, paper.width, paper.height).data.every(byte => byte === 255)"
    return page.evaluate(look)


@pytest.mark.parametrize(("event", "field"), [("drop", "dataTransfer"), ("paste", "clipboardData")])
def test_an_image_that_is_dropped_or_pasted_is_shown_and_answered(page, vit, tmp_path, event, field):
    publish(tmp_path, marked_pool(vit, 1), 1)
    with shown(page, vit, tmp_path):
        page.evaluate(HAND_OVER, [event, field, [GOOD]])
        playwright.expect(page.locator("#label")).to_contain_text("label-v1-")
        playwright.expect(page.locator("#paper")).to_have_attribute("data-image", "1")


@pytest.mark.parametrize(
    ("given", "says"),
    [(TEXT, "notes.txt is not an image"), (DAMAGED, "expected a JPEG, PNG or WebP"), (None, "No file found")],
    ids=["a text", "another format", "no file"],
)
def test_what_is_refused_takes_the_old_image_and_its_answer_away(page, vit, tmp_path, given, says):
    publish(tmp_path, marked_pool(vit, 1), 1)
    with shown(page, vit, tmp_path):
        drop(page, GOOD)
        playwright.expect(page.locator("#details")).to_be_visible()
        playwright.expect(page.locator("#paper")).to_have_attribute("data-image", "1")
        drop(page, *([given] if given else []))
        playwright.expect(page.locator("#how")).to_contain_text(says)
        playwright.expect(page.locator("#how")).to_have_class("warn")
        playwright.expect(page.locator("#details")).to_be_hidden()
        playwright.expect(page.locator("#paper")).not_to_have_attribute("data-image", "1")
        assert page.locator("#label").text_content() == "…" and is_blank(page)
        drop(page, GOOD)
        playwright.expect(page.locator("#label")).to_contain_text("label-v1-")
        playwright.expect(page.locator("#how")).to_have_class("soft")


def test_of_several_files_the_page_says_which_one_it_shows(page, vit, tmp_path):
    publish(tmp_path, marked_pool(vit, 1), 1)
    with shown(page, vit, tmp_path):
        drop(page, GOOD, TEXT, DAMAGED)
        playwright.expect(page.locator("#label")).to_contain_text("label-v1-")
        playwright.expect(page.locator("#note")).to_have_text("Only the first of 3 files is shown: a.png")
        drop(page, GOOD)
        playwright.expect(page.locator("#note")).to_have_text("Draw, drop or paste an image.")


def test_a_key_is_asked_for_in_the_page_and_not_again_and_again(page, vit, tmp_path):
    publish(tmp_path, marked_pool(vit, 1), 1)
    dialogs, asked = [], []
    page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
    page.on("request", lambda request: "/pool?" in request.url and asked.append(request.url))
    with shown(page, vit, tmp_path, keys=("right",)):
        playwright.expect(page.locator("#asks")).to_have_text("This service requires an API key.")
        page.wait_for_timeout(2000)  # longer than the page waits before it looks again
        assert (dialogs, len(asked)) == ([], 1)
        page.locator("#secret").fill("wrong")
        page.get_by_role("button", name="Use this key").click()
        playwright.expect(page.locator("#asks")).to_have_text("The service did not accept this API key.")
        drop(page, GOOD)
        playwright.expect(page.locator("#how")).to_contain_text("expected a valid API key")
        page.locator("#secret").fill("right")
        page.get_by_role("button", name="Use this key").click()
        playwright.expect(page.locator("#key")).to_be_hidden()
        playwright.expect(page.locator("#state")).to_contain_text("version 1 · 4 tasks")
        playwright.expect(page.locator("#label")).to_contain_text("label-v1-")
        assert dialogs == []


def many_tasks(vit, number: int):
    tasks = (task(f"task-{each:04}", (f"bird-{each:04}", f"fish-{each:04}"), vit, seed=each) for each in range(number))
    return replace(empty_pool(vit), tasks=tuple(tasks))


def test_a_large_pool_is_shown_a_page_at_a_time_and_searched_by_the_service(page, vit, tmp_path):
    publish(tmp_path, many_tasks(vit, 130), 1)
    with shown(page, vit, tmp_path):
        rows = page.locator("#tasks > div")
        playwright.expect(page.locator("#state")).to_contain_text("130 tasks · 260 classes")
        playwright.expect(page.locator("#range")).to_have_text("1 to 50 of 130")
        playwright.expect(rows).to_have_count(50)
        playwright.expect(rows.first).to_contain_text("task-0129")
        for seen in ("51 to 100 of 130", "101 to 130 of 130"):
            page.locator("#older").click()
            playwright.expect(page.locator("#range")).to_have_text(seen)
        playwright.expect(rows.last).to_contain_text("task-0000")
        assert page.locator("#older").is_disabled() and page.locator(".new").count() == 0
        page.locator("#search").fill("FISH-0042")
        playwright.expect(rows).to_have_count(1)
        playwright.expect(rows).to_contain_text("task-0042")
        page.locator("#search").fill("no such name")
        playwright.expect(page.locator("#tasks")).to_have_text("No task or class has this in its name.")


def test_the_right_class_is_suggested_and_sent_as_feedback(page, vit, tmp_path):
    publish(tmp_path, many_tasks(vit, 130), 1)
    with shown(page, vit, tmp_path):
        drop(page, GOOD)
        playwright.expect(page.locator("#labels option")).to_have_count(1)  # what else the answer named
        page.locator("#true").fill("fish-")
        playwright.expect(page.locator("#labels option")).to_have_count(20)
        page.locator("#true").fill("Fish-0007")
        playwright.expect(page.locator("#labels option")).to_have_text(["fish-0007"])
        page.locator("#true").fill("fish-0007")
        with page.expect_response("**/feedback") as told:
            page.get_by_role("button", name="Send").click()
        assert told.value.json()["label"] == "fish-0007"
        playwright.expect(page.locator("#thanks")).to_have_text("Thank you.")


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
