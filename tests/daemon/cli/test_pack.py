"""`mqmk-daemon pack` says what it packed, what it left out, and what is probably not meant."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from support import shards as tars

from mqmk.daemon.cli.pack import SHOWN, pack


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for seed, name in enumerate(["heron/a.png", "heron/b.png", "萨克斯管 sax/c.png", "萨克斯管 sax/d.png"]):
        path = tmp_path / "photos" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(tars.image_bytes(seed))
    return tmp_path / "photos"


def typed(photos: Path, *options: str) -> Result:
    return CliRunner().invoke(pack, [str(photos), str(photos.parent / "tasks"), "--task", "birds", *options])


def test_classes_are_printed_with_their_counts(photos: Path):
    done = typed(photos)
    assert done.stdout.splitlines() == [
        "       2  heron",
        "       2  萨克斯管 sax",
        f"{photos.parent}/tasks/birds: 4 images of 2 classes in 1 shard",
    ]
    assert done.stderr == ""


def test_warnings_and_skipped_files_are_separated_from_the_table(photos: Path):
    (photos / "heron" / "bad.jpg").write_bytes(b"hello")
    (photos / "owl").mkdir()
    (photos / "owl" / "only.png").write_bytes(tars.image_bytes(9))
    assert typed(photos).exit_code == 1
    done = typed(photos, "--skip-bad")
    said = done.stderr.splitlines()
    assert said[0].startswith(f"skipped {photos}/heron/bad.jpg: expected a JPEG, PNG or WebP image")
    assert said[1] == "1 file skipped"
    assert said[2].startswith("warning: only one image of owl: the daemon will quarantine the task")
    assert len(said) == 3 and len(done.stdout.splitlines()) == 4


def test_as_json_the_manifest_comes_with_what_it_does_not_say(photos: Path):
    (photos / "heron" / "x.gif").write_bytes(tars.image_bytes(7, kind="GIF"))
    (photos / "heron" / "bad.jpg").write_bytes(b"hello")
    document = json.loads(typed(photos, "--skip-bad", "--format", "gif", "--json").stdout)
    assert document["task"] == "birds" and document["shards"][0]["samples"] == 5
    assert document["counts"] == {"heron": 3, "萨克斯管 sax": 2}
    assert [each["path"] for each in document["skipped"]] == [f"{photos}/heron/bad.jpg"]
    assert document["warnings"] == []


def test_a_long_table_is_cut(photos: Path):
    for number in range(SHOWN):
        for seed in range(2):
            path = photos / f"{number:03d}" / f"{seed}.png"
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(tars.image_bytes(100 + 2 * number + seed))
    lines = typed(photos).stdout.splitlines()
    assert len(lines) == SHOWN + 2 and lines[-2] == "          and 2 more (--json lists all)"
