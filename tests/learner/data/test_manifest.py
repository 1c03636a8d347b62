"""TASK.json: the contract, a faithful round trip, every way of being refused, and identity by content."""

import contextlib
import dataclasses
import io
import json
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import shards as tars

from mqmk.learner.data.manifest import Manifest, Shard, ShardSurvey, derive_manifest, label_reader, parse_manifest
from mqmk.learner.data.shards import survey_shard
from mqmk.learner.data.validation import validate_task
from mqmk.learner.errors import TaskRejected

SHA = "ab" * 32
GOOD = {
    "schema": 1,
    "task": "birds",
    "classes": ["heron", "owl"],
    "shards": [{"name": "birds-000000.tar", "bytes": 123, "sha256": SHA, "samples": 64}],
    "created": "2026-01-01T00:00:00Z",
}


def encoded(**changes):
    return json.dumps(GOOD | changes).encode()


def one_shard(**changes):
    return encoded(shards=[GOOD["shards"][0] | changes])


def test_the_file_of_the_contract_is_read_as_written():
    manifest = parse_manifest(encoded())
    assert manifest == Manifest(
        task="birds",
        classes=("heron", "owl"),
        shards=(Shard("birds-000000.tar", 123, SHA, 64),),
        created="2026-01-01T00:00:00Z",
        completeness="manifest",
        holdout=0.2,
    )
    assert manifest.samples == 64


def test_a_manifest_survives_a_round_trip():
    manifest = parse_manifest(encoded(classes=["œuf", "日本"], completeness="settled", holdout=0))
    assert parse_manifest(manifest.to_bytes()) == manifest
    assert json.loads(manifest.to_bytes())["schema"] == 1


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (encoded(schema=2), 'expected "schema": 1, got 2; upgrade'),
        (encoded(schema=True), 'expected "schema": 1, got True'),
        (b"{}", 'expected "schema": 1, got None'),
        (b"[]", "expected TASK.json as a JSON object"),
        (b"\x80\x04pickle", "expected a JSON object"),
        (b"[" * 100_000, "expected a JSON object"),
        (b'{"schema": 1, "schema": 1}', "every field once"),
        (b'{"schema": 1, "holdout": NaN}', "NaN is not a JSON number"),
        (b'{"schema": 1, "holdout": ' + b"9" * 5000 + b"}", "expected a JSON object"),
        (json.dumps({"schema": 1, "task": "birds"}).encode(), "expected the fields classes, shards, task"),
        (encoded(hold_out=0.5), "no other fields than .*got .'hold_out'."),
        (encoded(task=".."), "expected a task name"),
        (encoded(task="a/b"), "expected a task name"),
        (encoded(task=""), "expected a task name"),
        (encoded(task="birds\n"), "expected a task name"),
        (encoded(task=7), "expected task as a string"),
        (encoded(task="x" * 201), "expected a task name"),
        (encoded(classes=[]), "expected 1 to 100,000 classes, got 0"),
        (encoded(classes="heron"), "expected classes as a JSON list"),
        (encoded(classes=["heron", ""]), "expected class names"),
        (encoded(classes=["heron", " owl"]), "expected class names"),
        (encoded(classes=["heron", "\ud800"]), "expected class names"),
        (encoded(classes=["heron", 1]), "expected a class as a string"),
        (encoded(classes=["heron", "heron"]), "expected every class once"),
        (encoded(shards=[]), "expected 1 to 100,000 shards"),
        (encoded(shards={}), "expected shards as a JSON list"),
        (encoded(shards=["a.tar"]), "expected a shard as a JSON object"),
        (encoded(shards=GOOD["shards"] * 2), "expected every shard name once"),
        (encoded(shards=[*GOOD["shards"], GOOD["shards"][0] | {"name": "b.tar"}]), "every shard content once"),
        (one_shard(name="../birds.tar"), "expected shard names like"),
        (one_shard(name="/etc/birds.tar"), "expected shard names like"),
        (one_shard(name="..tar"), "expected shard names like"),
        (one_shard(name="pipe:touch birds.tar"), "expected shard names like"),
        (one_shard(name="birds.tar.gz"), "expected shard names like"),
        (one_shard(bytes=-1), "1 to 1,099,511,627,776 bytes, got -1"),
        (one_shard(bytes=2**63), "1 to 1,099,511,627,776 bytes"),
        (one_shard(bytes=1.5), "expected a shard's bytes as an integer"),
        (one_shard(bytes=True), "expected a shard's bytes as an integer"),
        (one_shard(samples=0), "samples, got 0"),
        (one_shard(samples=10**9), "samples, got 1000000000"),
        (one_shard(sha256="AB" * 32), "64 lower-case hex digits"),
        (one_shard(url="https://x"), "no other fields"),
        (encoded(holdout=1), "holdout as a fraction"),
        (encoded(holdout=-0.1), "holdout as a fraction"),
        (encoded(holdout="half"), "holdout as a number"),
        (encoded(holdout=10**400), "holdout as a fraction"),
        (encoded(holdout=-(10**400)), "holdout as a fraction"),
        (encoded(created="\ud800"), "a date in created"),
        (encoded(completeness="maybe"), "completeness as one of"),
        (encoded(created=None), "expected created as a string"),
    ],
)  # fmt: skip
def test_a_bad_file_is_refused_with_its_reason(data, reason):
    with pytest.raises(TaskRejected, match=reason) as refused:
        parse_manifest(data)
    assert refused.value.code == "bad-manifest"


@given(data=st.data())
def test_no_bytes_make_parsing_fail_in_any_other_way(data):
    broken = bytearray(encoded())
    for _ in range(data.draw(st.integers(1, 4))):
        broken[data.draw(st.integers(0, len(broken) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(TaskRejected):
        parse_manifest(bytes(broken))


def test_identity_is_the_content_and_never_the_name():
    first, second = Shard("a.tar", 10, "aa" * 32, 1), Shard("b.tar", 20, "bb" * 32, 2)
    manifest = Manifest("birds", ("heron", "owl"), (first, second))
    renamed = Manifest(
        "vögel", ("heron", "owl"), (dataclasses.replace(second, name="0.tar"), first), "later", "settled"
    )
    assert renamed.identity == manifest.identity
    assert len(manifest.identity) == 64
    for other in (
        dataclasses.replace(manifest, classes=("owl", "heron")),
        dataclasses.replace(manifest, shards=(first,)),
        dataclasses.replace(manifest, shards=(first, dataclasses.replace(second, sha256="cc" * 32))),
    ):
        assert other.identity != manifest.identity


@pytest.mark.parametrize(
    ("label", "number"),
    [("heron", 0), ("owl", 1), ("7", 2), ("0", 0), ("1", 1), ("3", None), ("-1", None), ("crow", None), ("", None)],
)
def test_a_label_is_a_class_name_or_else_an_index(label, number):
    assert label_reader(("heron", "owl", "7"))(label) == number


def survey(labels, name="a.tar", sha="aa"):
    return ShardSurvey(Shard(name, 10, sha * 32, len(labels)), frozenset(labels))


def test_a_derived_manifest_sorts_the_classes_it_found_and_says_that_it_settled():
    manifest = derive_manifest("birds", [survey(["owl", "heron"], "b.tar"), survey(["crow"], "a.tar", "bb")])
    assert manifest.classes == ("crow", "heron", "owl")
    assert manifest.completeness == "settled"
    assert [shard.name for shard in manifest.shards] == ["a.tar", "b.tar"]


def test_integer_labels_without_a_class_list_become_classes_of_their_own_names():
    manifest = derive_manifest("digits", [survey(["10", "9", "2"])])
    assert manifest.classes == ("2", "9", "10")
    assert [label_reader(manifest.classes)(label) for label in ("2", "9", "10")] == [0, 1, 2]


def test_shards_without_a_manifest_are_surveyed_and_then_validate():
    labels = [*["heron"] * 6, *["owl"] * 6]
    datas = tars.tar(tars.files(labels)), tars.tar(tars.files(labels, start=100))
    names = ["birds-000000.tar", "birds-000001.tar"]
    manifest = derive_manifest("birds", (survey_shard(name, tars.opener(*datas)) for name in names))
    assert manifest.shards == tars.manifest(*datas, samples=12).shards
    assert manifest.identity == tars.manifest(*datas, samples=12).identity
    assert validate_task(manifest, tars.opener(*datas)).samples == {"heron": 12, "owl": 12}


def test_json_labels_are_found_too():
    members = [("a.json", b'{"label": 3}'), ("a.png", tars.image_bytes(0)), ("b.json", b'{"label": "owl"}')]
    data = tars.tar([*members, ("b.png", tars.image_bytes(1))])
    assert survey_shard("birds-000000.tar", tars.opener(data)).labels == {"3", "owl"}


@pytest.mark.parametrize(
    ("data", "code"),
    [(tars.tar([]), "wrong-count"), (tars.tar([("a.cls", b"\x07"), ("a.png", b"")]), "unknown-class")],
)
def test_a_shard_that_cannot_make_a_manifest_is_refused(data, code):
    with pytest.raises(TaskRejected) as refused:
        survey_shard("x.tar", lambda _: io.BytesIO(data))
    assert (refused.value.code, refused.value.shard) == (code, "x.tar")


def test_a_rejection_names_its_place_and_survives_the_way_from_a_worker():
    error = TaskRejected("wrong-hash", "expected a, got b", "x.tar", "0001.png", 1536)
    assert str(error) == "x.tar, 0001.png, byte 1,536: expected a, got b [wrong-hash]"
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.code, copy.offset) == (str(error), "wrong-hash", 1536)
