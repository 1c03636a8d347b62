"""`predict` and `evaluate`: answers about files, from a service over HTTP and from a pool on disk."""

import json
import shutil
import socket
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from daemon_parts import RELEASED
from daemon_parts import class_folders as sketch_folders
from plain_server import served
from ports import free_port

from mqmk.daemon.cli import cli
from mqmk.daemon.config_sources import KEY_VARIABLE
from mqmk.daemon.errors import DaemonError
from mqmk.daemon.picture_files import class_folders, pictures_of
from mqmk.daemon.score import owners_of, scored
from mqmk.daemon.served_pool import Reply, ServedPool
from mqmk.daemon.told import Told
from mqmk.deploy.reports import DEPLOYED
from mqmk.matcher.backbone import load_backbone
from mqmk.matcher.errors import PoolError

POOLS = RELEASED / "pools"


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
def pictures(tmp_path: Path) -> Path:
    """Class folders of both tasks, three drawings each."""
    for task in ("birds", "sea"):
        shutil.copytree(sketch_folders(task, 3), tmp_path / "pictures", dirs_exist_ok=True)
    return tmp_path / "pictures"


def test_the_service_and_the_pool_on_disk_give_the_same_answers(url, pictures):
    ways = (("--url", url), ("--local", POOLS))
    over_http, stored = (run("predict", pictures, "--json", *way).document for way in ways)
    assert (over_http["asked"], stored["asked"]) == (url, str(next(POOLS.glob("2-*"))))
    assert len(over_http["answers"]) == len(stored["answers"]) == 30
    for one, other in zip(over_http["answers"], stored["answers"], strict=True):
        assert one.pop("id")
        for values in (one, other):
            values["match"] |= {name: pytest.approx(values["match"][name], abs=1e-5) for name in ("score", "margin")}
            values["probability"] = pytest.approx(values["probability"], abs=1e-5)
            values["top"] = [row["label"] for row in values["top"]]
        assert other == one


def test_a_table_shows_file_label_task_margin_and_whether_it_is_unknown(url, pictures):
    done = run("predict", pictures / "owl" / "000.png", "--url", url)
    assert done.code == 0
    heading, row = [line for line in done.said.splitlines() if "label" in line or "000.png" in line]
    assert [word.strip() for word in heading.strip("┃").split("┃")] == [
        "file", "label", "probability", "task", "margin", "unknown"
    ]  # fmt: skip
    cells = [cell.strip() for cell in row.strip("│").split("│")]
    said = run("predict", pictures / "owl" / "000.png", "--url", url, "--json").document["answers"][0]
    expected = [said["label"], f"{said['probability']:.1%}", said["task"], f"{said['match']['margin']:.3f}", "no"]
    assert cells[1:] == expected


def test_matcher_and_top_k_are_asked_for(url, pictures):
    for way in (("--url", url), ("--local", RELEASED)):
        options = ("--matcher", "sqmk", "--top-k", 2)
        (answer,) = run("predict", pictures / "owl/000.png", *options, *way, "--json").document["answers"]
        assert (answer["matcher"], len(answer["top"])) == ("sqmk", 2)
        assert "next best" in run("predict", pictures / "owl/000.png", *options, *way).said
    assert run("predict", pictures, "--matcher", "perfect").code == 2


def test_files_without_an_answer_are_listed_with_the_reason_and_the_others_are_answered(url, pictures):
    (pictures / "owl" / "bad.png").write_bytes(b"no picture")
    for way in (("--url", url), ("--local", POOLS)):
        done = run("predict", pictures / "owl", *way)
        assert done.code == 1
        assert done.complained.startswith(f"{pictures / 'owl' / 'bad.png'}: ")
        assert "expected a JPEG, PNG or WebP picture" in done.complained
        assert done.said.count(".png") == 3
        found = run("predict", pictures / "owl", *way, "--json")
        assert (found.code, len(found.document["answers"]), len(found.document["errors"])) == (1, 3, 1)


def test_the_address_is_the_one_the_service_of_the_state_directory_was_started_with(url, pictures, tmp_path):
    state = tmp_path / "state"
    (state / "replicas").mkdir(parents=True)
    (state / "replicas" / DEPLOYED).write_text(json.dumps({"settings": "x", "url": url}))
    assert run("predict", pictures / "owl/000.png", "--state", state).code == 0


def test_without_a_service_it_says_so_at_once_and_what_to_do(pictures, tmp_path):
    done = run("predict", pictures, "--set", f"serve.port={free_port()}", "--state", tmp_path / "state")
    assert isinstance(done.error, DaemonError)
    assert "does not answer" in str(done.error)
    assert "--local" in str(done.error)
    assert isinstance(run("predict", pictures, "--url", "localhost").error, DaemonError)
    assert run("predict", pictures, "--url", "http://x", "--local", POOLS).code == 2


def test_before_anything_was_learned_it_says_so(vit, pictures, tmp_path):
    with served(vit, tmp_path / "pools") as empty:
        for command in ("predict", "evaluate"):
            assert "nothing has been learned yet" in str(run(command, pictures, "--url", empty).error)
    with pytest.raises(PoolError, match="found neither"):
        raise run("predict", pictures, "--local", tmp_path).error


def test_the_key_comes_from_the_environment(vit, pictures):
    with served(vit, POOLS, "secret") as locked:
        asked = ("predict", pictures / "owl/000.png", "--url", locked)
        for environment in ({}, {KEY_VARIABLE: "wrong"}):
            assert f"put the key into the variable {KEY_VARIABLE}" in str(run(*asked, **environment).error)
        assert run(*asked, **{KEY_VARIABLE: "secret"}).code == 0


def test_a_busy_service_is_asked_again(tmp_path):
    replies = [Reply(429, b"", 3.0), Reply(503, b"", 5.0), Reply(200, b'{"label": "owl"}', 0.0)]
    pauses: list[float] = []

    class Busy(ServedPool):
        def _request(self, path: str, body: bytes | None = None) -> Reply:
            return replies.pop(0)

    (tmp_path / "a.png").write_bytes(b"x")
    pool = Busy("http://127.0.0.1:1", pause=pauses.append)
    assert pool._told(tmp_path / "a.png") == Told(tmp_path / "a.png", answer={"label": "owl"})
    assert pauses == [3.0, 5.0]


def test_a_service_that_went_away_ends_the_asking(tmp_path):
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))  # never listens
        (tmp_path / "a.png").write_bytes(b"x")
        pool = ServedPool(f"http://127.0.0.1:{deaf.getsockname()[1]}", patience=0.3, pause=lambda _: None)
        with pytest.raises(DaemonError, match="does not answer"):
            pool._told(tmp_path / "a.png")


def test_folders_stand_for_the_pictures_below_them(tmp_path):
    names = ("b.JPG", "a.png", "notes.txt", ".hidden.png", "deep/er/c.webp", ".git/d.png")
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    found = [str(path.relative_to(tmp_path)) for path in pictures_of([tmp_path, tmp_path / "a.png"])]
    assert found == ["a.png", "b.JPG", "deep/er/c.webp"]
    assert pictures_of([tmp_path / "notes.txt"]) == [tmp_path / "notes.txt"]  # whoever names it means it
    (tmp_path / "empty").mkdir()
    with pytest.raises(DaemonError, match="found none"):
        pictures_of([tmp_path / "empty"])
    with pytest.raises(DaemonError, match="a folder for each class"):
        class_folders(tmp_path / "deep" / "er")


def test_an_evaluation_counts_what_predict_answers(url, pictures):
    answers = run("predict", pictures, "--url", url, "--json").document["answers"]
    right = Counter(Path(one["file"]).parent.name for one in answers if one["label"] == Path(one["file"]).parent.name)
    birds = {path.name for path in sketch_folders("birds", 3).iterdir()}
    own = [one["task"] == ("birds" if Path(one["file"]).parent.name in birds else "sea") for one in answers]
    for way in (("--url", url), ("--local", POOLS)):
        found = run("evaluate", pictures, *way, "--json").document
        assert (found["pictures"], found["pool_versions"], found["matchers"]) == (30, [2], ["mqmk-ei"])
        assert found["accuracy"] == pytest.approx(right.total() / 30)
        assert found["matching_rate"] == pytest.approx(sum(own) / 30)
        assert {row["label"]: row["right"] for row in found["classes"] if row["right"]} == dict(right)
        assert found["unknown_share"] == pytest.approx(sum(one["match"]["unknown"] for one in answers) / 30)
    said = run("evaluate", pictures, "--url", url).said
    assert f"accuracy {right.total() / 30:.1%} of 30 pictures" in said
    assert f"matching rate {sum(own) / 30:.1%}" in said


def test_classes_that_were_not_learned_are_told_apart(url, pictures):
    shutil.copytree(sketch_folders("fruit", 3) / "banana", pictures / "banana")
    found = run("evaluate", pictures, "--url", url, "--json").document
    (banana,) = [row for row in found["classes"] if row["label"] == "banana"]
    assert (banana["tasks"], banana["pictures"], banana["accuracy"]) == ([], 3, None)
    assert found["pictures"] == 30
    assert "of 3 pictures of classes that were not learned" in run("evaluate", pictures, "--url", url).said
    shutil.copytree(pictures / "banana", pictures / "alone" / "banana")
    assert "expected folders named after learned classes (flamingo" in str(
        run("evaluate", pictures / "alone", "--url", url).error
    )


def test_an_evaluation_with_a_bad_file_exits_with_1_and_leaves_it_out(url, pictures):
    (pictures / "owl" / "bad.png").write_bytes(b"no picture")
    done = run("evaluate", pictures, "--url", url)
    assert done.code == 1
    assert "bad.png" in done.complained
    assert "of 30 pictures" in done.said


def answer(label: str, task: str, unknown: bool | None = False) -> dict[str, Any]:
    return {"label": label, "task": task, "match": {"unknown": unknown}, "pool_version": 1, "matcher": "mqmk"}


def test_figures_are_shares_of_pictures_and_means_of_classes():
    files = {"owl": [Path("1"), Path("2"), Path("3")], "crab": [Path("4")]}
    owners = owners_of(files, {"birds": ["owl"], "more birds": ["owl"], "sea": ["crab"]})
    said = [answer("owl", "birds"), answer("owl", "more birds"), answer("crab", "sea"), answer("owl", "birds", True)]
    score = scored(files, owners, [Told(Path(str(place)), each) for place, each in enumerate(said, start=1)])
    assert (score.accuracy, score.accuracy_by_class) == (2 / 4, (2 / 3 + 0) / 2)
    assert (score.matching_rate, score.unknown_share) == (2 / 4, 1 / 4)
    assert score.classes[0].mistaken_for == "crab"
    untold = scored(files, owners, [Told(Path(str(n)), answer("owl", "birds", None)) for n in range(1, 5)])
    assert untold.unknown_share is None
