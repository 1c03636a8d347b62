"""What docs/security.md says of the HTTP API, tried: who gets in, and what a stranger can make it say or write."""

import logging
from pathlib import Path
from urllib.parse import quote

import pytest
from starlette.testclient import TestClient
from support.serving.fingerprints import image_bytes, marked_pool, publish
from support.serving.recorded import RecordingMetrics

from mqmk.daemon.config.load import load
from mqmk.daemon.errors import ConfigError
from mqmk.deploy.serving.api_key_file import add_key, revoke_key
from mqmk.deploy.serving.api_keys import CHECK_SECONDS, ApiKeys, KeyFile, hash_key
from mqmk.deploy.serving.http.app import build_api
from mqmk.deploy.serving.inference import Service
from mqmk.deploy.serving.pools.live_pool import LivePool
from mqmk.deploy.serving.settings import ServiceSpec
from mqmk.deploy.serving.telemetry.recorder import RequestMetrics
from mqmk.matcher.backbone import load_backbone
from mqmk.matcher.pool_store import PoolStore
from mqmk.matcher.predictor import PredictSettings

PAGES = Path(__file__).resolve().parents[4] / "deploy" / "serving" / "http" / "pages"
KEY = "a-key-that-is-a-canary"
ESCAPES = "\x1b[2J\r\n05:06:07 all is well\u2028"
OPEN = {"/", "/docs", "/openapi.json", "/healthz", "/readyz", "/v2/health/live", "/v2/health/ready"}
"""What anybody may ask for."""


@pytest.fixture(scope="module")
def recorded() -> RecordingMetrics:
    return RecordingMetrics()


@pytest.fixture(scope="module")
def service(recorded, tmp_path_factory):
    vit, pools = load_backbone(), tmp_path_factory.mktemp("served") / "pools"
    publish(pools, marked_pool(vit, 1), 1)
    live_pool = LivePool(PoolStore(pools), vit, PredictSettings())
    live_pool.poll()
    spec = ServiceSpec(pools)
    return Service(vit, live_pool, spec, None, RequestMetrics(recorded, spec, every_seconds=0))


@pytest.fixture(scope="module")
def guarded(service):
    with TestClient(build_api(service, ApiKeys((hash_key(KEY),)))) as client:
        yield client


def test_without_a_key_nothing_but_pages_and_health_is_answered(guarded):
    documented = guarded.get("/openapi.json").json()["paths"]
    assert {"/predict", "/feedback", "/pool", "/v2/models/mqmk/infer"} < set(documented)
    for path in OPEN | set(documented):
        for method in documented.get(path, ["get"]):
            status = guarded.request(method, path, content=b"x").status_code
            assert (status == 401) is (path not in OPEN), (method, path, status)
    for path in ("/nonsense", "/predict/", "/./predict", "/v2/health/live/../../models/mqmk", "/PREDICT"):
        assert guarded.post(path, content=image_bytes(0)).status_code == 401


def test_a_key_that_was_revoked_is_refused_by_a_running_service(service, tmp_path):
    file, now = tmp_path / "keys", [0.0]
    shop, lab = add_key(file, "shop"), add_key(file, "lab")
    with TestClient(build_api(service, KeyFile(file, lambda: now[0]))) as client:
        asked = [client.get("/pool", headers={"X-Api-Key": key}).status_code for key in (shop, lab)]
        revoke_key(file, "shop")
        now[0] += CHECK_SECONDS
        asked += [client.get("/pool", headers={"X-Api-Key": key}).status_code for key in (shop, lab)]
    assert asked == [200, 200, 401, 200]


def test_an_address_that_others_can_reach_is_refused_without_keys(tmp_path):
    for host in ("0.0.0.0", "::", "192.0.2.1", "example.org"):
        with pytest.raises(ConfigError, match="is reachable from other machines"):
            load(environ={"MQMK_SERVE_HOST": host}, folder=tmp_path)
    given = {"MQMK_SERVE_HOST": "0.0.0.0", "MQMK_SERVE_API_KEYS": "keys"}
    assert load(environ=given, folder=tmp_path).config.serve.api_keys


def test_a_key_is_never_revealed(guarded, caplog):
    caplog.set_level(logging.DEBUG)
    wrong = f"{KEY}-wrong"
    replies = [guarded.get("/pool", headers={"X-Api-Key": key}) for key in (KEY, wrong)]
    replies += [guarded.get(f"/pool?key={KEY}"), guarded.get("/pool", headers={"Authorization": f"Basic {KEY}"})]
    assert [reply.status_code for reply in replies] == [200, 401, 401, 401]
    assert not [reply for reply in replies if KEY in reply.text or KEY in str(reply.headers)]
    ours = [record.getMessage() for record in caplog.records if record.name.startswith("mqmk")]
    assert not [line for line in ours if KEY in line]


def test_what_a_stranger_sends_becomes_no_log_line_and_no_series(service, recorded, caplog):
    caplog.set_level(logging.INFO)
    with TestClient(build_api(service)) as client:
        answer = client.post("/predict", content=image_bytes(0), headers={"X-Request-Id": "mine"}).json()
        told = client.post("/feedback", json={"id": answer["id"], "label": ESCAPES})
        assert told.status_code == 200 and told.json()["label"] == ESCAPES  # within JSON, where it is harmless
        assert "\x1b" not in told.text
        for method, path in (
            ("GET", f"/{quote(ESCAPES)}"),
            ("POST", "/predict?matcher=%1b%0a"),
            ("GET", "/%3Cscript%3E"),
        ):
            reply = client.request(method, path, content=b"x")
            assert 400 <= reply.status_code < 500
            assert reply.headers["content-type"] == "application/json"
            assert "\x1b" not in reply.text and "<script>" not in reply.text
    service.export()
    recorded.flush()
    labels = {label for series in (*recorded.counters, *recorded.values, *recorded.gauges) for label in series}
    assert all(label.isprintable() and "<" not in label and "mine" not in label for label in labels), labels
    ours = [record.getMessage() for record in caplog.records if record.name.startswith("mqmk")]
    assert not [line for line in ours if "all is well" in line or "mine" in line]


def test_the_pages_never_take_text_for_markup():
    """And whatever a page shows, its policy lets it load nothing and tell nobody else."""
    for path in sorted(PAGES.glob("*.html")):
        text = path.read_text()
        for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
            assert way not in text, (path.name, way)


def test_the_pages_cannot_be_framed_and_load_nothing_from_elsewhere(guarded):
    for path in ("/", "/docs"):
        policy = guarded.get(path).headers["content-security-policy"]
        for rule in ("default-src 'none'", "connect-src 'self'", "frame-ancestors 'none'", "base-uri 'none'"):
            assert rule in policy
