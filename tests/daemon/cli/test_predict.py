"""`predict` and `evaluate`: answers about files, from a service over HTTP and from a pool on disk."""

import json
import re
import shutil
import socket
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from support.daemons.daemon import class_folders as sketch_folders
from support.daemons.daemon import upgraded_release
from support.servers.http_server import served

from mqmk.daemon.cli.main import cli
from mqmk.daemon.client.evaluation_page import render_evaluation
from mqmk.daemon.client.http import HttpClient, Reply
from mqmk.daemon.client.http_predictor import HttpPredictor
from mqmk.daemon.client.image_files import class_folders, find_images
from mqmk.daemon.client.predictor import PredictionResult
from mqmk.daemon.client.scoring import MOST_CONFUSIONS, MOST_MISTAKES, find_owners, score_results, unknown_share
from mqmk.daemon.config.load import API_KEY_VARIABLE
from mqmk.daemon.errors import DaemonError
from mqmk.daemon.ledger.ledger import Ledger
from mqmk.daemon.ports import free_port
from mqmk.deploy.serving.telemetry.heartbeat import DEPLOYED
from mqmk.learner.evaluation.calibration_fit import calibration_error
from mqmk.matcher.backbone import load_backbone
from mqmk.matcher.errors import PoolError

POOLS = upgraded_release() / "pools"


@dataclass(frozen=True)
class Done:
    """What a command said."""

    code: int
    said: str
    complained: str
    error: BaseException | None

    @property
    def document(self) -> dict[str, Any]:
        return json.loads(self.said)


def run(*words: object, **environment: str) -> Done:
    found = CliRunner().invoke(cli, [str(word) for word in words], env={"COLUMNS": "200", **environment})
    error = found.exception if not isinstance(found.exception, SystemExit) else None
    return Done(found.exit_code, found.stdout, found.stderr, error)


@pytest.fixture(scope="module")
def vit():
    return load_backbone()


@pytest.fixture(scope="module")
def url(vit) -> Iterator[str]:
    with served(vit, POOLS) as address:
        yield address


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Class folders of both tasks, three drawings each."""
    for task in ("birds", "sea"):
        shutil.copytree(sketch_folders(task, 3), tmp_path / "images", dirs_exist_ok=True)
    return tmp_path / "images"


def test_the_service_and_the_pool_on_disk_give_the_same_answers(url, images):
    ways = (("--url", url), ("--local", POOLS))
    over_http, stored = (run("predict", images, "--json", *way).document for way in ways)
    assert (over_http["asked"], stored["asked"]) == (url, str(POOLS))
    assert len(over_http["answers"]) == len(stored["answers"]) == 30
    for one, other in zip(over_http["answers"], stored["answers"], strict=True):
        assert one.pop("id")
        for values in (one, other):
            values["match"] |= {name: pytest.approx(values["match"][name], abs=1e-5) for name in ("score", "margin")}
            values["probability"] = pytest.approx(values["probability"], abs=1e-5)
            values["top"] = [row["label"] for row in values["top"]]
        assert other == one


def test_a_table_shows_file_label_task_margin_and_whether_it_is_unknown(url, images):
    done = run("predict", images / "owl" / "000.png", "--url", url)
    assert done.code == 0
    heading, row = (re.split(r"\s{2,}", line.strip()) for line in done.said.splitlines())
    assert heading == ["file", "label", "probability", "task", "margin", "unknown"]
    said = run("predict", images / "owl" / "000.png", "--url", url, "--json").document["answers"][0]
    expected = [said["label"], f"{said['probability']:.1%}", said["task"], f"{said['match']['margin']:.3f}", "no"]
    assert row == [str(images / "owl" / "000.png"), *expected]


def test_matcher_and_top_k_are_asked_for(url, images):
    for way in (("--url", url), ("--local", upgraded_release())):
        options = ("--matcher", "sqmk", "--top-k", 2)
        (answer,) = run("predict", images / "owl/000.png", *options, *way, "--json").document["answers"]
        assert (answer["matcher"], len(answer["top"])) == ("sqmk", 2)
        assert "next best" in run("predict", images / "owl/000.png", *options, *way).said
    assert run("predict", images, "--matcher", "perfect").code == 2


def test_files_without_an_answer_are_listed_with_the_reason_and_the_others_are_answered(url, images):
    (images / "owl" / "bad.png").write_bytes(b"no image")
    for way in (("--url", url), ("--local", POOLS)):
        done = run("predict", images / "owl", *way)
        assert done.code == 1
        assert done.complained.startswith(f"{images / 'owl' / 'bad.png'}: ")
        assert "expected a JPEG, PNG or WebP image" in done.complained
        assert done.said.count(".png") == 3
        found = run("predict", images / "owl", *way, "--json")
        assert (found.code, len(found.document["answers"]), len(found.document["errors"])) == (1, 3, 1)


def test_the_address_is_the_one_the_service_of_the_state_directory_was_started_with(url, images, tmp_path):
    state = tmp_path / "state"
    (state / "replicas").mkdir(parents=True)
    Ledger(state / "ledger.sqlite").close()
    (state / "replicas" / DEPLOYED).write_text(json.dumps({"settings": "x", "url": url}))
    assert run("predict", images / "owl/000.png", "--state", state).code == 0


def test_without_a_service_it_says_so_at_once_and_what_to_do(images, tmp_path):
    done = run("predict", images, "--set", f"serve.port={free_port()}", "--set", f"state.dir={tmp_path}")
    assert isinstance(done.error, DaemonError)
    assert "does not answer" in str(done.error)
    assert "--local" in str(done.error)
    assert isinstance(run("predict", images, "--url", "localhost").error, DaemonError)
    assert run("predict", images, "--url", "http://x", "--local", POOLS).code == 2


def test_before_anything_was_learned_it_says_so(vit, images, tmp_path):
    with served(vit, tmp_path / "pools") as empty:
        for command in ("predict", "evaluate"):
            assert "nothing has been learned yet" in str(run(command, images, "--url", empty).error)
    with pytest.raises(PoolError, match="found none"):
        raise run("predict", images, "--local", tmp_path).error


def test_the_key_comes_from_the_environment(vit, images):
    with served(vit, POOLS, "secret") as locked:
        asked = ("predict", images / "owl/000.png", "--url", locked)
        for environment in ({}, {API_KEY_VARIABLE: "wrong"}):
            assert f"set {API_KEY_VARIABLE} to an API key" in str(run(*asked, **environment).error)
        assert run(*asked, **{API_KEY_VARIABLE: "secret"}).code == 0


def test_a_busy_service_is_asked_again(tmp_path):
    replies = [Reply(429, b"", 3.0), Reply(503, b"", 5.0), Reply(502, b""), Reply(200, b'{"label": "owl"}')]
    pauses: list[float] = []

    class Busy(HttpClient):
        def _request(self, path: str, body: bytes | None = None, content_type: str | None = None) -> Reply:
            return replies.pop(0)

    (tmp_path / "a.png").write_bytes(b"x")
    predictor = HttpPredictor(Busy("http://127.0.0.1:1", sleep=pauses.append))
    expected = PredictionResult(tmp_path / "a.png", answer={"label": "owl"})
    assert predictor.predict_file(tmp_path / "a.png") == expected
    assert pauses == [3.0, 5.0, 1.0]


def tasks_in_pages(*digests: str) -> dict[str, list[str]]:
    """The tasks of a service that lists them on two pages; `digests` are those of the pages, as they are asked for."""
    seen = iter(digests)

    class Paged(HttpClient):
        def _request(self, path: str, body: bytes | None = None, content_type: str | None = None) -> Reply:
            is_last = path == "/pool?limit=1000&offset=1000"
            tasks = [{"name": "sea", "classes": ["crab"]}] if is_last else [{"name": "birds", "classes": ["owl"]}]
            following = None if is_last else "?limit=1000&offset=1000"
            return Reply(200, json.dumps({"digest": next(seen), "tasks": tasks, "next": following}).encode())

    return dict(HttpPredictor(Paged("http://127.0.0.1:1")).tasks())


def test_the_tasks_of_a_service_are_those_of_all_pages_of_one_version():
    everything = {"birds": ["owl"], "sea": ["crab"]}
    assert tasks_in_pages("a", "a") == everything
    assert tasks_in_pages("a", "b", "b", "b") == everything
    with pytest.raises(DaemonError, match="different versions"):
        tasks_in_pages(*"ababababab")


def test_a_service_that_went_away_ends_the_asking(tmp_path):
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))  # never listens
        (tmp_path / "a.png").write_bytes(b"x")
        client = HttpClient(f"http://127.0.0.1:{deaf.getsockname()[1]}", sleep=lambda _: None)
        with pytest.raises(DaemonError, match="does not answer"):
            HttpPredictor(client, retry_seconds=0.3).predict_file(tmp_path / "a.png")


def test_folders_stand_for_the_images_below_them(tmp_path):
    names = ("b.JPG", "a.png", "notes.txt", ".hidden.png", "deep/er/c.webp", ".git/d.png")
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    found = [str(path.relative_to(tmp_path)) for path in find_images([tmp_path, tmp_path / "a.png"])]
    assert found == ["a.png", "b.JPG", "deep/er/c.webp"]
    assert find_images([tmp_path / "notes.txt"]) == [tmp_path / "notes.txt"]  # whoever names it means it
    (tmp_path / "empty").mkdir()
    with pytest.raises(DaemonError, match="found none"):
        find_images([tmp_path / "empty"])
    with pytest.raises(DaemonError, match="a folder for each class"):
        class_folders(tmp_path / "deep" / "er")


def test_an_evaluation_counts_what_predict_answers(url, images):
    answers = run("predict", images, "--url", url, "--json").document["answers"]
    right = Counter(Path(one["file"]).parent.name for one in answers if one["label"] == Path(one["file"]).parent.name)
    birds = {path.name for path in sketch_folders("birds", 3).iterdir()}
    own = [one["task"] == ("birds" if Path(one["file"]).parent.name in birds else "sea") for one in answers]
    for way in (("--url", url), ("--local", POOLS)):
        found = run("evaluate", images, *way, "--json").document
        assert (found["images"], found["pool_versions"], found["matchers"]) == (30, [2], ["mqmk-ei"])
        assert found["accuracy"] == pytest.approx(right.total() / 30)
        assert found["matching_rate"] == pytest.approx(sum(own) / 30)
        assert {row["label"]: row["right"] for row in found["classes"] if row["right"]} == dict(right)
        assert found["unknown_share"] == pytest.approx(sum(one["match"]["unknown"] for one in answers) / 30)
    said = run("evaluate", images, "--url", url).said
    assert f"accuracy {right.total() / 30:.1%} (±" in said and ", 30 images), " in said
    assert f"matching rate {sum(own) / 30:.1%}" in said


def test_classes_that_were_not_learned_are_reported_separately(url, images):
    shutil.copytree(sketch_folders("fruit", 3) / "banana", images / "banana")
    found = run("evaluate", images, "--url", url, "--json").document
    (banana,) = [row for row in found["classes"] if row["label"] == "banana"]
    assert (banana["tasks"], banana["images"], banana["accuracy"]) == ([], 3, None)
    assert found["images"] == 30
    assert "of 3 images of classes that were not learned" in run("evaluate", images, "--url", url).said
    shutil.copytree(images / "banana", images / "alone" / "banana")
    alone = run("evaluate", images / "alone", "--url", url, "--json").document
    assert (alone["images"], alone["accuracy"], alone["accuracy_by_class"], alone["matching_rate"]) == (
        0,
        *[None] * 3,
    )
    assert [row["label"] for row in alone["classes"]] == ["banana"]
    said = run("evaluate", images / "alone", "--url", url).said
    assert "no image of a class that was learned; version 2, mqmk-ei" in said
    assert "of 3 images of classes that were not learned" in said


def test_an_evaluation_with_a_bad_file_exits_with_1_and_leaves_it_out(url, images):
    (images / "owl" / "bad.png").write_bytes(b"no image")
    done = run("evaluate", images, "--url", url)
    assert done.code == 1
    assert "bad.png" in done.complained
    assert ", 30 images)" in done.said


def test_an_evaluation_tells_the_calibration_error_the_confusions_and_the_most_confident_mistakes(url, images):
    answers = run("predict", images, "--url", url, "--json").document["answers"]
    true = [Path(one["file"]).parent.name for one in answers]
    right = torch.tensor([one["label"] == label for one, label in zip(answers, true, strict=True)])
    probability = torch.tensor([one["probability"] for one in answers], dtype=torch.float64)
    found = run("evaluate", images, "--url", url, "--json").document
    assert found["calibration_error"] == pytest.approx(calibration_error(probability, right)) and not right.all()
    wrong = Counter((label, one["label"]) for one, label in zip(answers, true, strict=True) if one["label"] != label)
    assert {(row["label"], row["answered"]): row["images"] for row in found["confusions"]} == dict(wrong)
    assert [row["images"] for row in found["confusions"]] == sorted(wrong.values(), reverse=True)
    assert [row["accuracy"] for row in found["classes"]] == sorted(row["accuracy"] for row in found["classes"])
    assert [row["probability"] for row in found["mistakes"]] == pytest.approx(
        sorted((one["probability"] for one, good in zip(answers, right, strict=True) if not good), reverse=True)
    )
    said = run("evaluate", images, "--url", url).said
    assert f"calibration error {found['calibration_error']:.1%}" in said
    first = found["confusions"][0]
    assert re.search(rf"{first['label']} +{first['answered']} +{first['images']}\n", said)


def test_the_page_of_an_evaluation_shows_the_mistakes_and_loads_nothing(url, images, tmp_path):
    evil = images / "<b>evil"
    shutil.copytree(sketch_folders("fruit", 3) / "banana", evil)
    page = tmp_path / "evaluation.html"
    done = run("evaluate", images, "--url", url, "--html", page, "--json")
    assert (done.code, done.complained.strip()) == (0, f"report: {page}")
    text, mistakes = page.read_text(), done.document["mistakes"]
    assert text.count('<img src="data:image/png;base64,') == len(mistakes) > 0
    for each in mistakes:
        assert f"<figcaption>{each['answered']} {100 * each['probability']:.1f} %" in text
        assert each["file"] in text
    assert "default-src 'none'" in unescape(text) and "prefers-color-scheme: dark" in text
    assert not re.findall(r"<(script|link|iframe|object)|https?://(?!127\.0\.0\.1)|@import|url\(", unescape(text))
    assert "<b>evil" not in text and "&lt;b&gt;evil" in text
    assert all(each["label"] != "<b>evil" for each in mistakes), "a class that was not learned cannot be right"


def test_what_people_see_of_an_evaluation_is_bounded_and_an_image_that_is_gone_has_no_thumbnail(tmp_path):
    names = [f"class {number}" for number in range(130)]
    files = {name: [tmp_path / f"{name}.png"] for name in names}
    owners = find_owners(names, {"many": names})
    results = [
        PredictionResult(files[name][0], answer("other", "many", probability=place / 130))
        for place, name in enumerate(names)
    ]
    score = score_results(files, owners, results)
    assert (len(score.confusions), len(score.mistakes), len(score.classes)) == (MOST_CONFUSIONS, MOST_MISTAKES, 130)
    assert score.mistakes[0].label == "class 129", "the most confident one"
    page = render_evaluation("here", score)
    assert "<img" not in page and page.count("<figcaption>") == MOST_MISTAKES


def answer(label: str, task: str, unknown: bool | None = False, probability: float = 0.5) -> dict[str, Any]:
    return {"label": label, "task": task, "match": {"unknown": unknown}, "pool_version": 1, "matcher": "mqmk",
            "probability": probability}  # fmt: skip


def test_figures_are_shares_of_images_and_means_of_classes():
    files = {"owl": [Path("1"), Path("2"), Path("3")], "crab": [Path("4")]}
    owners = find_owners(files, {"birds": ["owl"], "more birds": ["owl"], "sea": ["crab"]})
    said = [answer("owl", "birds"), answer("owl", "more birds"), answer("crab", "sea"), answer("owl", "birds", True)]
    score = score_results(
        files, owners, [PredictionResult(Path(str(place)), each) for place, each in enumerate(said, start=1)]
    )
    assert (score.accuracy, score.accuracy_by_class) == (2 / 4, (2 / 3 + 0) / 2)
    assert (score.matching_rate, score.unknown_share) == (2 / 4, 1 / 4)
    assert score.calibration_error == pytest.approx(0.5), "each image is a bin: 0.5 is as far from right as from wrong"
    assert score.classes[0].mistaken_for == "crab"
    unlearned = score_results(
        {"owl": [Path("1")]}, find_owners(["owl"], {"sea": ["crab"]}), [PredictionResult(Path("1"), said[3])]
    )
    assert (unlearned.accuracy, unlearned.matching_rate, unlearned.unknown_share) == (None, None, None)
    assert unknown_share(unlearned.unlearned) == 1.0
    assert (unlearned.calibration_error, unlearned.mistakes, unlearned.confusions) == (None, (), ())
    untold = score_results(
        files, owners, [PredictionResult(Path(str(n)), answer("owl", "birds", None)) for n in range(1, 5)]
    )
    assert untold.unknown_share is None
