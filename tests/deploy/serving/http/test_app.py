"""The HTTP contract of one replica, without Ray."""

import asyncio
import base64
import io
import json
import os
import random
import threading
import zlib
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from starlette.testclient import TestClient
from support.serving.answers import version_of
from support.serving.fingerprints import empty_pool, image_bytes, marked_pool, publish
from support.serving.service_specs import changed, spec_of

from mqmk.deploy.serving.api_keys import ApiKeys, hash_key
from mqmk.deploy.serving.http.app import build_api
from mqmk.deploy.serving.http.schemas import PoolBody, TaskBody
from mqmk.deploy.serving.inference import PredictOptions, PredictResult, Service
from mqmk.deploy.serving.pools.live_pool import LivePool
from mqmk.matcher.backbone import load_backbone
from mqmk.matcher.images import decode, prepare
from mqmk.matcher.pool_store import PoolStore
from mqmk.matcher.predictor import PredictSettings, name_answers, predict

IMAGE = image_bytes(0)
KINDS = [image_bytes(seed, kind=kind) for seed in range(2) for kind in ("PNG", "JPEG", "WEBP", "GIF")]


@pytest.fixture(scope="module")
def vit():
    return load_backbone()


def make(vit, pools: Path, **changes) -> Service:
    live_pool = LivePool(PoolStore(pools), vit, PredictSettings())
    live_pool.poll()
    return Service(vit, live_pool, spec_of(pools, **changes))


@pytest.fixture(scope="module")
def pools(vit, tmp_path_factory):
    folder = tmp_path_factory.mktemp("served") / "pools"
    publish(folder, marked_pool(vit, 1), 1)
    return folder


@pytest.fixture(scope="module")
def client(vit, pools):
    with TestClient(build_api(make(vit, pools)), raise_server_exceptions=False) as opened:
        yield opened


def test_an_answer_has_every_part_of_the_contract(client):
    answer = client.post("/predict", content=IMAGE, headers={"X-Request-Id": "mine"})
    assert answer.status_code == 200
    assert answer.headers["x-request-id"] == "mine"
    body = answer.json()
    assert list(body) == ["id", "label", "probability", "task", "match", "top", "pool_version", "matcher", "queries"]
    assert list(body["match"]) == ["score", "margin", "runner_up", "unknown"]
    assert list(body["top"][0]) == ["label", "task", "probability"]
    assert body["id"] == "mine"
    assert body["top"][0]["label"] == body["label"]
    assert body["match"]["unknown"] is None
    assert version_of(body) == 1


@pytest.mark.parametrize("path", ["/predict", "/v2/models/mqmk/infer"])
def test_an_answer_says_where_its_time_went(client, path):
    v2 = {"inputs": [{"name": "image", "shape": [1], "datatype": "BYTES", "data": [base64.b64encode(IMAGE).decode()]}]}
    answer = client.post(path, content=IMAGE) if path == "/predict" else client.post(path, json=v2)
    assert answer.status_code == 200
    spent = dict(part.split(";dur=") for part in answer.headers["server-timing"].split(", "))
    assert list(spent) == ["decode", "queue", "match", "total"]
    assert 0 < float(spent["decode"]) + float(spent["queue"]) + float(spent["match"]) <= float(spent["total"])


def test_a_refusal_does_not_say_where_its_time_went(client):
    assert "server-timing" not in client.post("/predict", content=b"hello").headers


def test_an_answer_is_what_the_predictor_says(client, vit):
    images = prepare(decode(IMAGE), vit.info)[None]
    for matcher in ("mqmk", "mqmk-ei", "cascade", "sqmk"):
        pool = marked_pool(vit, 1)
        (expected,) = name_answers(pool, predict(vit, pool, images, PredictSettings(matcher)))
        body = client.post(f"/predict?matcher={matcher}", content=IMAGE).json()
        assert (body["label"], body["task"], body["matcher"]) == (expected.label, expected.task, matcher)
        assert body["probability"] == pytest.approx(expected.probability, abs=1e-5)
        assert body["match"]["margin"] == pytest.approx(expected.margin, abs=1e-5)
        assert body["queries"] == expected.num_queries


def test_several_images_get_a_list_of_answers_in_their_order(client):
    given_images = [image_bytes(seed) for seed in range(5)]
    files = [("image", (f"{seed}.png", data)) for seed, data in enumerate(given_images)]
    bodies = client.post("/predict?top_k=1", files=files, headers={"X-Request-Id": "five"}).json()
    assert [body["id"] for body in bodies] == [f"five.{place}" for place in range(5)]
    for data, body in zip(given_images, bodies, strict=True):
        alone = client.post("/predict", content=data).json()
        assert body["label"] == alone["label"]
        assert body["match"]["score"] == pytest.approx(alone["match"]["score"], abs=1e-5)
        assert len(body["top"]) == 1


def test_one_image_in_a_form_is_answered_as_one(client):
    assert client.post("/predict", files={"image": ("a.jpg", image_bytes(kind="JPEG"))}).json()["pool_version"] == 1


def test_scores_of_every_task_come_on_request(client):
    match = client.post("/predict?scores=true&matcher=mqmk", content=IMAGE).json()["match"]
    assert [row["task"] for row in match["scores"]][:2] == ["task-v1", match["runner_up"]]
    assert len(match["scores"]) == 4
    assert match["scores"][0]["score"] - match["scores"][1]["score"] == pytest.approx(match["margin"], abs=1e-5)


def test_another_format_is_answered_where_the_owner_allows_it(vit, pools):
    with TestClient(build_api(make(vit, pools, formats=("gif",)))) as opened:
        assert opened.post("/predict", content=image_bytes(kind="GIF")).status_code == 200
        refused = opened.post("/predict", content=image_bytes(kind="BMP"))
    assert refused.status_code == 415 and "expected a JPEG, PNG, WebP or GIF image, got BMP" in refused.json()["error"]


def test_a_form_may_call_the_image_a_file(client):
    assert client.post("/predict", files={"file": IMAGE}).status_code == 200


def huge_header() -> bytes:
    data = bytearray(image_bytes())
    data[16:24] = (9000).to_bytes(4, "big") * 2  # width and height of the PNG; its checksum comes after the check
    data[29:33] = zlib.crc32(bytes(data[12:29])).to_bytes(4, "big")
    return bytes(data)


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        (b"", 400, "got neither"),
        (b"hello", 415, "expected a JPEG, PNG or WebP image"),
        (image_bytes(kind="GIF"), 415, "expected a JPEG, PNG or WebP image, got GIF: not supported; convert it to PNG"),
        (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", 415, "got HEIC: not supported; convert it to JPEG"),
        (image_bytes()[:-300], 422, "unreadable image"),
        (b"x" * (16 * 2**20 + 1), 413, "expected at most 16,777,216 bytes"),
        (huge_header(), 413, "expected at most 40,000,000 pixels"),
    ],
    ids=["nothing", "text", "gif", "heic", "cut short", "too many bytes", "too many pixels"],
)
def test_what_is_no_image_is_refused_with_a_reason(client, body, status, says):
    answer = client.post("/predict", content=body)
    assert answer.status_code == status
    assert list(answer.json()) == ["error", "code"]
    assert says in answer.json()["error"]


def test_a_body_without_a_length_is_cut_off_at_the_limit(vit, pools):
    sent = []

    def endless():
        for _ in range(1000):
            sent.append(1)
            yield b"x" * 1000

    with TestClient(build_api(make(vit, pools, request_bytes=5000))) as client:
        assert client.post("/predict", content=endless()).status_code == 413


@pytest.mark.parametrize(
    "query", ["matcher=nope", "matcher=perfect", "top_k=0", "top_k=101", "top_k=x", "scores=perhaps"]
)
def test_a_value_out_of_range_is_422_and_names_the_field(client, query):
    answer = client.post(f"/predict?{query}", content=IMAGE)
    assert answer.status_code == 422
    assert query.split("=")[0] in answer.json()["error"]


def test_unknown_paths_and_methods_are_errors_of_the_same_shape(client):
    assert client.get("/nowhere").status_code == 404
    assert client.get("/predict").status_code == 405
    assert list(client.get("/predict").json()) == list(client.get("/nowhere").json()) == ["error", "code"]
    assert client.post("/v2/models/other/infer").status_code == 404


@pytest.mark.parametrize("request_id", ["a b", "x" * 129, "\x7f"])
def test_an_id_that_cannot_be_echoed_is_refused(client, request_id):
    assert client.post("/predict", content=IMAGE, headers={"X-Request-Id": request_id}).status_code == 400


def test_without_an_id_one_is_made(client):
    answers = [client.post("/predict", content=IMAGE) for _ in range(2)]
    ids = {answer.json()["id"] for answer in answers}
    assert len(ids) == 2
    assert ids == {answer.headers["x-request-id"] for answer in answers}


def test_before_anything_is_learned_the_answer_is_503_with_advice(vit, tmp_path):
    for learned in (None, empty_pool(vit)):
        if learned:
            publish(tmp_path / "pools", learned, 1)
        with TestClient(build_api(make(vit, tmp_path / "pools"))) as client:
            answer = client.post("/predict", content=IMAGE)
            assert answer.status_code == 503
            assert "put a task into the bucket" in answer.json()["error"]
            assert int(answer.headers["retry-after"]) > 0
            assert client.get("/v2/health/live").status_code == 200
            assert client.get("/v2/health/ready").status_code == 503
            assert client.get("/v2/models/mqmk/ready").json()["ready"] is False
            assert client.get("/pool").json()["tasks"] == []


def test_probes_say_that_it_lives_and_whether_it_can_answer(vit, tmp_path):
    pools = tmp_path / "pools"
    service = make(vit, pools)
    with TestClient(build_api(service, ApiKeys((hash_key("secret"),)))) as client:  # and need no key
        assert (client.get("/healthz").status_code, client.get("/healthz").json()) == (200, {"ok": True})
        for path in ("/readyz", "/v2/health/ready"):
            waiting = client.get(path)
            assert (waiting.status_code, waiting.json()["code"]) == (503, "nothing_learned")
            assert "put a task into the bucket" in waiting.json()["error"]
        publish(pools, marked_pool(vit, 1), 1)
        service.live_pool.poll()
        assert client.get("/readyz").json() == {"ready": True, "pool_version": 1, "current": True}
        publish(pools, marked_pool(vit, 2), 2)
        next(pools.glob("versions/2-*.json")).write_text("{}")
        service.live_pool.poll()
        assert client.get("/readyz").json() == {"ready": True, "pool_version": 1, "current": False}


def test_an_error_has_a_word_for_programs(client):
    found = {
        client.post("/predict", content=b"").json()["code"],
        client.post("/predict", content=b"hello").json()["code"],
        client.post("/predict?top_k=0", content=IMAGE).json()["code"],
        client.post("/feedback", json={"id": "never", "label": "x"}).json()["code"],
        client.get("/nowhere").json()["code"],
        client.get("/predict").json()["code"],
    }
    expected = {"bad_request", "wrong_media_type", "unprocessable", "not_remembered", "not_found", "method_not_allowed"}
    assert found == expected


def test_an_image_with_too_many_pixels_is_reported_once(vit, pools):
    with TestClient(build_api(make(vit, pools, pixels=1000))) as client:
        found = client.post("/predict", content=IMAGE)
    assert found.status_code == 413
    assert found.json()["error"].count("expected at most 1,000 pixels") == 1
    assert found.json()["error"].startswith("expected at most 1,000 pixels, got ")


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"[]", "expected a JSON object with a list `inputs`"),
        (b"7", "expected a JSON object"),
        (b'{"inputs": 3}', "with a list `inputs`"),
        (b'{"inputs": ["image"]}', 'expected one input, named "image"'),
        (b'{"inputs": [{"name": "image"}]}', "'shape' is missing"),
        (b"{", "not JSON"),
    ],
)
def test_a_tensor_request_of_another_shape_is_rejected_with_what_was_expected(client, body, says):
    found = client.post("/v2/models/mqmk/infer", content=body)
    assert found.status_code == 400
    assert says in found.json()["error"] and "TypeError" not in found.json()["error"]


def test_feedback_is_judged_against_the_answer_and_counted_once(vit, pools):
    service = make(vit, pools)
    with TestClient(build_api(service)) as client:
        body = client.post("/predict", content=IMAGE, headers={"X-Request-Id": "seen"}).json()
        told = client.post("/feedback", json={"id": "seen", "label": body["label"]}).json()
        assert (told["correct"], told["matched"], told["task"], told["counted"]) == (True, True, "task-v1", True)
        assert client.post("/feedback", json={"id": "seen", "label": body["label"]}).json()["counted"] is False
        client.post("/predict", content=IMAGE, headers={"X-Request-Id": "again"})
        told = client.post("/feedback", json={"id": "again", "label": "kept0-a"}).json()
        assert (told["correct"], told["matched"]) == (False, False)
        client.post("/predict", content=IMAGE, headers={"X-Request-Id": "third"})
        assert client.post("/feedback", json={"id": "third", "label": "zebra"}).json()["matched"] is None
        assert client.post("/feedback", json={"id": "never", "label": "x"}).status_code == 404
    expected = {"right": 1, "wrong": 2, "matched": 1, "mismatched": 1, "label_unknown": 1, "id_unknown": 1}
    assert dict(service.answers.counts) == expected | {"repeated": 1}
    assert dict(service.answers.matched) == {"task-v1": 1}


def test_only_the_last_answers_are_remembered(vit, pools):
    with TestClient(build_api(make(vit, pools, remembered_answers=2))) as client:
        for name in ("one", "two", "three"):
            client.post("/predict", content=IMAGE, headers={"X-Request-Id": name})
        codes = [
            client.post("/feedback", json={"id": name, "label": "x"}).status_code for name in ("one", "two", "three")
        ]
        assert codes == [404, 200, 200]


@pytest.mark.parametrize(
    ("body", "status"),
    [(b"{", 400), (b"[]", 422), (b'{"id": 1, "label": "x"}', 422), (b'{"id": "x"}', 422), (b"[" * 9999, 400),
     (b'{"id": "' + b"x" * 40000 + b'", "label": "y"}', 413)],
)  # fmt: skip
def test_feedback_that_is_not_understood_is_refused(client, body, status):
    assert client.post("/feedback", content=body).status_code == status


def test_the_longest_label_fits_however_it_is_escaped(client):
    body = json.dumps({"id": "\N{OWL}" * 1000, "label": "\N{OWL}" * 1000})
    assert len(body) > 24000
    assert client.post("/feedback", content=body).status_code == 404  # read and understood, but nobody asked that


def test_the_pool_lists_what_was_learned_and_is_sent_again_only_when_it_changed(client):
    answer = client.get("/pool")
    body = answer.json()
    assert (body["pool_version"], body["classes"], body["matcher"]) == (1, 8, "mqmk")
    assert [task["name"] for task in body["tasks"]] == ["kept0", "kept1", "kept2", "task-v1"]
    tag = answer.headers["etag"]
    for condition in (tag, f"W/{tag}", f'"other", {tag}'):
        again = client.get("/pool", headers={"If-None-Match": condition})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
    assert client.get("/pool", headers={"If-None-Match": '"other"'}).json() == body


def names_of(page: dict) -> list[str]:
    return [task["name"] for task in page["tasks"]]


def test_the_pool_is_listed_in_pages_that_link_to_the_next(client):
    assert client.get("/pool").json()["next"] is None
    pages, query = [], "?limit=3&order=newest"
    while query:
        page = client.get(f"/pool{query}").json()
        assert PoolBody.model_validate(page, strict=True).model_dump() == page
        query, pages = page["next"], [*pages, page]
    assert [names_of(page) for page in pages] == [["task-v1", "kept2", "kept1"], ["kept0"]]
    totals = {(page["num_tasks"], page["num_classes"], page["classes"], page["found"]) for page in pages}
    assert totals == {(4, 8, 8, 4)}
    assert names_of(client.get("/pool?offset=99").json()) == []


def test_a_search_finds_tasks_by_their_own_names_and_those_of_their_classes(client):
    assert names_of(client.get("/pool?search=KEPT1").json()) == ["kept1"]
    assert names_of(client.get("/pool?search=label-v1-B").json()) == ["task-v1"]
    page = client.get("/pool?search=kept&limit=2").json()
    assert (names_of(page), page["found"], page["num_tasks"]) == (["kept0", "kept1"], 3, 4)
    assert names_of(client.get(f"/pool{page['next']}").json()) == ["kept2"]
    assert names_of(client.get("/pool", params={"search": "no such & name"}).json()) == []


@pytest.mark.parametrize("query", ["limit=0", "limit=1001", "offset=-1", "order=random", "search=" + "x" * 201])
def test_a_page_that_cannot_be_had_is_refused(client, query):
    answer = client.get(f"/pool?{query}")
    assert (answer.status_code, answer.json()["code"]) == (422, "unprocessable")


def test_the_tasks_of_a_pool_are_turned_into_json_once(vit, pools, monkeypatch):
    with TestClient(build_api(make(vit, pools))) as client:
        before = client.get("/pool").json()
        monkeypatch.setattr(TaskBody, "model_dump", None)
        assert client.get("/pool").json() == before


def test_the_calibration_may_be_of_one_matcher(vit, tmp_path):
    pool = marked_pool(vit, 1).with_matching({"unknown": {"mqmk": {"threshold": 2.0}}})
    publish(tmp_path / "pools", pool, 1)
    with TestClient(build_api(make(vit, tmp_path / "pools"))) as client:
        found = {name: client.post(f"/predict?matcher={name}", content=IMAGE).json() for name in ("mqmk", "mqmk-ei")}
    assert [found[name]["match"]["unknown"] for name in found] == [True, None]


def test_a_full_queue_is_429_and_the_others_are_still_answered(vit, pools):
    service = make(vit, pools, max_queue=4, max_images=4)
    go, compute = threading.Event(), service._compute
    service._batcher._compute = lambda key, items: (go.wait(20), compute(key, items))[1]

    async def crowd() -> list[object]:
        asked = [service.predict(f"r{number}", [service.from_bytes(IMAGE)], PredictOptions()) for number in range(10)]
        waiting = asyncio.gather(*asked, return_exceptions=True)
        await asyncio.sleep(0.3)
        go.set()
        return await waiting

    results = asyncio.run(crowd())
    assert sum(isinstance(result, PredictResult) for result in results) == 4
    refused = [result for result in results if isinstance(result, Exception)]
    assert {(error.status, error.retry_after) for error in refused} == {(429, 1)}
    service.close()


def test_an_answer_that_takes_too_long_is_503(vit, pools):
    service = make(vit, pools, timeout_seconds=0.2)
    go = threading.Event()
    service._batcher._compute = lambda *_: go.wait(20)
    with TestClient(build_api(service)) as client:
        answer = client.post("/predict", content=IMAGE)
        go.set()
    assert answer.status_code == 503
    assert "no answer within 0.2 s" in answer.json()["error"]
    assert answer.headers["retry-after"]


def test_a_request_keeps_its_pool_through_a_swap(vit, tmp_path):
    publish(tmp_path, marked_pool(vit, 1), 1)
    service = make(vit, tmp_path, max_batch=2)
    compute = service._compute

    def swap_meanwhile(key, items):
        publish(tmp_path, marked_pool(vit, 2), 2)
        service.live_pool.poll()
        return compute(key, items)

    service._batcher._compute = swap_meanwhile
    with TestClient(build_api(service)) as client:
        files = [("image", (f"{seed}.png", image_bytes(seed % 2))) for seed in range(7)]
        before = client.post("/predict", files=files).json()
        after = client.post("/predict", files=files).json()
    assert {version_of(body) for body in before} == {1}
    assert {version_of(body) for body in after} == {2}


def test_keys_are_asked_for_where_there_are_some(vit, pools):
    keys = ApiKeys((hash_key("secret"), hash_key("other")))
    with TestClient(build_api(make(vit, pools), keys)) as client:
        for headers in ({}, {"X-Api-Key": "wrong"}, {"Authorization": "Basic secret"}):
            answer = client.post("/predict", content=IMAGE, headers=headers)
            assert (answer.status_code, list(answer.json())) == (401, ["error", "code"])
        for headers in ({"X-Api-Key": "secret"}, {"Authorization": "Bearer other"}):
            assert client.post("/predict", content=IMAGE, headers=headers).status_code == 200
        assert client.get("/pool").status_code == 401
        assert [client.get(path).status_code for path in ("/", "/docs", "/v2/health/live")] == [200] * 3


def test_the_pages_need_nothing_from_the_network(client):
    for path in ("/", "/docs"):
        page = client.get(path)
        assert page.headers["content-type"].startswith("text/html")
        assert "default-src 'none'" in page.headers["content-security-policy"]
        assert "http://" not in page.text
        assert "https://" not in page.text
    document = client.get("/openapi.json").json()
    assert {"/predict", "/feedback", "/pool", "/v2/models/mqmk/infer"} <= set(document["paths"])


@pytest.mark.parametrize("mode", ["L", "1", "RGBA", "LA", "P", "I;16", "CMYK"])
def test_every_kind_of_pixel_is_answered(client, mode):
    data = io.BytesIO()
    Image.new(mode, (20, 30)).save(data, "JPEG" if mode == "CMYK" else "PNG")
    assert client.post("/predict", content=data.getvalue()).status_code == 200


@settings(max_examples=200)
@given(
    body=st.one_of(
        st.binary(max_size=200),
        st.tuples(st.integers(0, len(IMAGE) - 1), st.binary(min_size=1, max_size=30)).map(
            lambda cut: IMAGE[: cut[0]] + cut[1] + IMAGE[cut[0] + len(cut[1]) :]
        ),
    ),
    content_type=st.sampled_from(
        ["", "image/png", "application/json", "multipart/form-data", "multipart/form-data; boundary=x"]
    ),
    path=st.sampled_from(["/predict", "/feedback", "/v2/models/mqmk/infer"]),
    length=st.sampled_from([None, "0", "5", "x", "99999999999999999999", "-1"]),
)
def test_whatever_is_sent_is_answered_or_refused(client, body, content_type, path, length):
    headers = {"Content-Type": content_type} | ({} if length is None else {"Inference-Header-Content-Length": length})
    answer = client.post(path, content=body, headers=headers)
    assert answer.status_code in (200, 400, 404, 413, 415, 422), answer.text
    if answer.status_code != 200:
        assert list(answer.json()) == ["error", "code"]


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def malformed(chance: random.Random) -> bytes:
    """An image of any kind with a few bytes changed, cut off or left out."""
    data = bytearray(chance.choice(KINDS))
    for _ in range(chance.randint(1, 20)):
        data[chance.randrange(len(data))] = chance.randrange(256)
    return bytes(data[chance.randrange(40) if chance.random() < 0.3 else 0 : chance.randrange(1, len(data))])


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_two_thousand_malformed_images_are_refused_and_leave_no_memory_behind(client):
    chance, seen, after = random.Random(0), Counter(), 0
    for number in range(2000):
        data = malformed(chance)
        if number % 2:
            answer = client.post("/predict", content=data)
        else:
            answer = client.post("/predict", files=[("image", ("a", data)), ("image", ("b", IMAGE))])
        seen[answer.status_code] += 1
        if number == 500:
            after = resident_bytes()
    assert set(seen) <= {200, 400, 413, 415, 422}
    assert seen[200] < 200
    assert resident_bytes() - after < 40 * 2**20


def infer(client, tensor: dict, **fields):
    return client.post("/v2/models/mqmk/infer", json={"inputs": [tensor]} | fields)


def test_version_2_of_the_protocol_gives_the_same_answers(client):
    data = [image_bytes(0), image_bytes(1)]
    encoded = [base64.b64encode(one).decode() for one in data]
    tensor = {"name": "image", "datatype": "BYTES", "shape": [2], "data": encoded}
    body = infer(client, tensor, id="two").json()
    found = {row["name"]: row["data"] for row in body["outputs"]}
    expected = [client.post("/predict", content=one).json() for one in data]
    assert (body["model_name"], body["model_version"], body["id"]) == ("mqmk", "1", "two")
    assert found["label"] == [one["label"] for one in expected]
    assert found["probability"] == pytest.approx([one["probability"] for one in expected], abs=1e-5)
    assert found["pool_version"] == [1, 1]
    assert client.post("/feedback", json={"id": "two.1", "label": "x"}).status_code == 200


def test_pixels_may_be_sent_as_a_tensor(client):
    pixels = Image.open(io.BytesIO(IMAGE))
    flat = list(pixels.tobytes())
    tensor = {"name": "image", "datatype": "UINT8", "shape": [1, 56, 56, 3], "data": flat}
    outputs = [{"name": "label"}]
    body = infer(client, tensor, outputs=outputs, parameters={"matcher": "mqmk"}).json()
    label = client.post("/predict?matcher=mqmk", content=IMAGE).json()["label"]
    assert body["outputs"] == [{"name": "label", "datatype": "BYTES", "shape": [1], "data": [label]}]


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"name": "other"}, 400), ({"datatype": "FP32"}, 400), ({"shape": [2]}, 400), ({"shape": [0]}, 400),
        ({"shape": "x"}, 400), ({"data": ["not base64!"]}, 400), ({"data": [base64.b64encode(b"hello").decode()]}, 415),
        ({"datatype": "UINT8", "shape": [1, 10**5, 10**5, 3], "data": []}, 413),
        ({"datatype": "UINT8", "shape": [1, 1, 1, 3], "data": [1, 2, 300]}, 400),
        ({"parameters": {"binary_data_size": 5}}, 400),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_are_refused(client, change, status):
    encoded = base64.b64encode(IMAGE).decode()
    tensor = {"name": "image", "datatype": "BYTES", "shape": [1], "data": [encoded]}
    answer = infer(client, tensor | change)
    assert (answer.status_code, list(answer.json())) == (status, ["error", "code"])
    assert infer(client, tensor, outputs=[{"name": "nope"}]).status_code == 400
    assert infer(client, tensor, parameters={"matcher": "nope"}).status_code == 422


def test_settings_refuse_an_open_door(tmp_path):
    from mqmk.deploy.serving.errors import ServeError

    with pytest.raises(ServeError, match="is reachable from other machines, and no API keys are set"):
        spec_of(tmp_path, host="0.0.0.0")
    assert spec_of(tmp_path, host="0.0.0.0", open=True).serve.url == "http://127.0.0.1:8000"
    one = spec_of(tmp_path)
    assert one.digest("1") == replace(one).digest("1") != changed(one, max_batch=4).digest("1")


@pytest.mark.parametrize(
    ("path", "headers", "body", "status"),
    [
        ("/feedback", {}, b'{"id": "told", "label": "\\ud800"}', 422),
        ("/v2/models/mqmk/infer", {"Inference-Header-Content-Length": "0" * 12 + "9" * 5000}, b"{}", 400),
        ("/v2/models/mqmk/infer", {}, b'{"inputs": [{"name": "image", "datatype": "\\ud800", "shape": [1]}]}', 400),
        ("/predict/", {}, IMAGE, 404),
    ],
    ids=["half a letter", "a long number", "half a letter in the answer", "a slash too many"],
)
def test_what_cannot_be_told_back_is_refused_and_not_an_unexpected_error(client, path, headers, body, status):
    client.post("/predict", content=IMAGE, headers={"X-Request-Id": "told"})
    answer = client.post(path, content=body, headers=headers, follow_redirects=False)
    assert (answer.status_code, list(answer.json())) == (status, ["error", "code"])


def test_an_id_that_would_fill_the_memory_is_refused(client):
    encoded = base64.b64encode(IMAGE).decode()
    tensor = {"name": "image", "datatype": "BYTES", "shape": [1], "data": [encoded]}
    assert infer(client, tensor, id="x" * 128).status_code == 200
    answer = infer(client, tensor, id="x" * 129)
    assert (answer.status_code, "at most 128 characters" in answer.json()["error"]) == (400, True)
