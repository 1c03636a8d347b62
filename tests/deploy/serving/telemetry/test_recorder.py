"""What a replica metrics: every declared number, and each of them right. Without Ray."""

import asyncio
import threading
from dataclasses import asdict, replace

import pytest
from starlette.testclient import TestClient
from support.serving.fingerprints import image_bytes, publish
from support.serving.recorded import DECLARED, RecordingMetrics, calibrated_pool
from support.serving.service_specs import spec_of

from mqmk.deploy.serving.api_keys import ApiKeys, hash_key
from mqmk.deploy.serving.errors import ServeError
from mqmk.deploy.serving.feedback import RecentAnswers
from mqmk.deploy.serving.http.app import build_api
from mqmk.deploy.serving.inference import PredictOptions, Service
from mqmk.deploy.serving.pools.live_pool import LivePool
from mqmk.deploy.serving.telemetry.agreement import Agreement
from mqmk.deploy.serving.telemetry.declared import FEEDBACK_RESULTS, OTHER
from mqmk.deploy.serving.telemetry.ray_backend import RayMetrics
from mqmk.deploy.serving.telemetry.recorder import RequestMetrics
from mqmk.learner.evaluation.calibration_fit import build_reference
from mqmk.matcher.backbone import load_backbone
from mqmk.matcher.calibration import read_confidence
from mqmk.matcher.images import decode, prepare
from mqmk.matcher.pool_store import PoolStore
from mqmk.matcher.predictor import Prediction, PredictSettings, name_answers, predict

STAGES = ("decode", "queue", "match")


@pytest.fixture(scope="module")
def vit():
    return load_backbone()


@pytest.fixture(scope="module")
def calibrated(vit):
    return calibrated_pool(vit, 1)


@pytest.fixture
def pools(calibrated, tmp_path):
    folder = tmp_path / "pools"
    publish(folder, calibrated, 1)
    return folder


class Replica:
    """A service that metrics, and what it measured."""

    def __init__(self, vit, pools, keys=None, **changes) -> None:
        spec = spec_of(pools, **{"agreement_share": 0.0} | changes)
        self.recorded = RecordingMetrics()
        self.live_pool = LivePool(PoolStore(pools), vit, PredictSettings())
        self.live_pool.poll()
        self.service = Service(
            vit, self.live_pool, spec, metrics=RequestMetrics(self.recorded, spec, every_seconds=0.0)
        )
        self.service.export()
        self.keys = keys

    def __enter__(self) -> TestClient:
        self._client = TestClient(build_api(self.service, self.keys), raise_server_exceptions=False)
        return self._client.__enter__()

    def __exit__(self, *error: object) -> None:
        self._client.__exit__(*error)
        self.service._agreement.close(wait=True)
        self.service.export()
        self.service.close()


def answer_of(vit, pool, matcher: str) -> Prediction:
    image = prepare(decode(image_bytes()), vit.info)[None]
    return name_answers(pool, predict(vit, pool, image, PredictSettings(matcher)))[0]


def test_everything_that_is_declared_is_exported(vit, pools):
    replica = Replica(vit, pools, agreement_share=1.0)
    with replica as client:
        assert client.post("/predict?matcher=cascade", content=image_bytes()).status_code == 200
    assert replica.recorded.names == set(DECLARED)


def test_counters_and_gauges_are_shown_before_the_first_request(vit, pools):
    replica = Replica(vit, pools)
    shown = replica.recorded.names
    assert {name for name, metric in DECLARED.items() if metric.kind != "histogram"} == shown
    assert not any(replica.recorded.counters.values())
    assert replica.recorded.counters.keys() >= {
        *(("mqmk_feedback_total", verdict) for verdict in FEEDBACK_RESULTS),
        *(("mqmk_requests_total", "predict", code, "mqmk") for code in ("200", "429", "500", "503")),
        *(("mqmk_labelled_matches_total", "kept1", result) for result in ("matched", "mismatched")),
        ("mqmk_estimated_answers_total", "task-v1"),
        ("mqmk_agreement_answers_total", "mqmk", "different"),
    }
    assert replica.recorded.gauges["mqmk_inflight_limit_images",] == 256


def test_before_anything_is_learned_requests_are_counted_without_a_matcher(vit, tmp_path):
    replica = Replica(vit, tmp_path / "pools")
    assert ("mqmk_requests_total", "predict", "503", "none") in replica.recorded.counters
    with replica as client:
        client.post("/predict", content=image_bytes())
    assert replica.recorded.counters["mqmk_requests_total", "predict", "503", "none"] == 1


def test_requests_are_counted_by_route_code_and_matcher(vit, pools):
    replica = Replica(vit, pools, ApiKeys((hash_key("secret"),)))
    with replica as client:
        client.post("/predict", content=image_bytes())  # no key
        client.headers["X-Api-Key"] = "secret"
        client.post("/predict", content=image_bytes())
        client.post("/predict?matcher=cascade", content=image_bytes())
        client.post("/predict?matcher=nope", content=image_bytes())
        client.post("/predict", content=b"hello")
        client.post("/v2/models/mqmk/infer", content=b"{}")
        client.post("/feedback", json={"id": "never", "label": "x"})
        client.get("/nowhere")
        replica.service._batcher._compute = lambda *_: 1 / 0
        client.post("/predict", content=image_bytes())
    counted = {
        series[1:]: count for series, count in replica.recorded.counters.items() if series[0].endswith("sts_total")
    }
    assert {series: count for series, count in counted.items() if count} == {
        ("predict", "401", "none"): 1,
        ("predict", "200", "mqmk"): 1,
        ("predict", "200", "cascade"): 1,
        ("predict", "422", "none"): 1,
        ("predict", "415", "mqmk"): 1,
        ("infer", "400", "none"): 1,
        ("feedback", "404", "none"): 1,
        ("other", "404", "none"): 1,
        ("predict", "500", "mqmk"): 1,
    }
    observed = replica.recorded.values["mqmk_request_duration_seconds", "total"]
    assert len(observed) == 3, "two answers and a failure, no rejection"


def test_a_client_that_went_away_is_no_failure_of_ours(vit, pools):
    replica, go = Replica(vit, pools), threading.Event()
    replica.service._batcher._compute = lambda *_: go.wait(20)
    body = {"type": "http.request", "body": image_bytes(), "more_body": False}

    async def receive():
        return body

    async def send(_):
        raise AssertionError("nothing is answered")

    async def scene():
        scope = {"type": "http", "method": "POST", "path": "/predict", "raw_path": b"/predict", "query_string": b"",
                 "headers": [], "http_version": "1.1", "scheme": "http", "root_path": ""}  # fmt: skip
        asked = asyncio.create_task(build_api(replica.service)(scope, receive, send))
        await asyncio.sleep(0.2)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)

    asyncio.run(scene())
    go.set()
    replica.service.export()
    assert replica.recorded.counters["mqmk_requests_total", "predict", "499", "mqmk"] == 1
    assert ("mqmk_request_duration_seconds", "total") not in replica.recorded.values
    replica.service.close()


def test_the_parts_of_a_requests_time_make_up_its_total(vit, pools):
    replica = Replica(vit, pools)
    with replica as client:
        for _ in range(3):
            client.post("/predict", content=image_bytes())
    parts = [replica.recorded.values["mqmk_request_duration_seconds", stage] for stage in STAGES]
    for *times, total in zip(*parts, replica.recorded.values["mqmk_request_duration_seconds", "total"], strict=True):
        assert all(seconds >= 0 for seconds in times)
        assert 0.3 * total < sum(times) <= total


def test_time_in_the_queue_is_time_until_the_model_was_free(vit, pools):
    replica, go = Replica(vit, pools, max_batch=1), threading.Event()
    compute = replica.service._compute
    replica.service._batcher._compute = lambda key, items: (go.wait(0.2), compute(key, items))[1]

    async def scene():
        service = replica.service
        asked = [
            service.predict(f"r{number}", [service.from_bytes(image_bytes())], PredictOptions()) for number in range(2)
        ]
        await asyncio.gather(*asked)

    asyncio.run(scene())
    first, second = sorted(replica.recorded.values["mqmk_request_duration_seconds", "queue"])
    assert 0.15 < first < second - 0.15
    assert replica.recorded.values["mqmk_batch_images",] == [1, 1]
    replica.service.close()


def test_images_of_one_request_are_a_batch_and_every_one_of_them_is_measured(vit, pools):
    replica = Replica(vit, pools)
    with replica as client:
        files = [("image", (f"{seed}.png", image_bytes(seed))) for seed in range(5)]
        bodies = client.post("/predict?matcher=mqmk-ei", files=files).json()
    recorded = replica.recorded
    assert recorded.values["mqmk_batch_images",] == [5]
    assert recorded.values["mqmk_queries_per_image", "mqmk-ei"] == [body["queries"] for body in bodies]
    assert recorded.values["mqmk_match_score", "mqmk-ei"] == [body["match"]["score"] for body in bodies]
    assert recorded.values["mqmk_match_margin", "mqmk-ei"] == [body["match"]["margin"] for body in bodies]
    assert recorded.counters["mqmk_answers_total", "task-v1"] == 5
    assert len(recorded.values["mqmk_request_duration_seconds", "match"]) == 1


def test_the_estimate_is_the_sum_of_the_calibrated_probabilities(vit, pools, calibrated):
    replica = Replica(vit, pools)
    with replica as client:
        bodies = [client.post("/predict", content=image_bytes(seed)).json() for seed in range(100, 110)]
    calibration = read_confidence(calibrated.matching, "mqmk").calibration
    expected = sum(calibration.probability(body["match"]["score"], body["match"]["margin"]) for body in bodies)
    assert replica.recorded.counters["mqmk_estimated_matches_total", "task-v1"] == pytest.approx(expected)
    assert replica.recorded.counters["mqmk_estimated_answers_total", "task-v1"] == 10
    assert 0.5 < expected / 10 < 0.95


def test_unknown_images_are_reported_in_the_answer_and_counted(vit, calibrated, tmp_path):
    for threshold, expected in ((2.0, True), (-2.0, False)):
        unknown = {"mqmk": {"threshold": threshold, "false_alarm": 0.01}}
        publish(tmp_path / f"{threshold}", calibrated.with_matching({**calibrated.matching, "unknown": unknown}), 1)
        replica = Replica(vit, tmp_path / f"{threshold}")
        with replica as client:
            assert client.post("/predict", content=image_bytes()).json()["match"]["unknown"] is expected
            assert client.post("/predict?matcher=cascade", content=image_bytes()).json()["match"]["unknown"] is None
        assert replica.recorded.counters["mqmk_unknown_answers_total", "mqmk"] == expected
        assert replica.recorded.counters["mqmk_calibrated_answers_total", "mqmk"] == 1
        assert ("mqmk_calibrated_answers_total", "cascade") not in replica.recorded.counters


def test_a_pool_as_it_is_built_tells_known_images_from_unknown_ones(vit, pools):
    replica = Replica(vit, pools)
    with replica as client:
        found = [client.post("/predict", content=image_bytes(seed)).json()["match"]["unknown"] for seed in range(20)]
    assert found.count(True) <= 1 and found.count(None) == 0


def test_each_label_of_feedback_is_counted_under_one_verdict_and_once(vit, pools):
    replica = Replica(vit, pools)
    with replica as client:
        for name in ("right", "wrong", "other task", "zebra"):
            label = client.post("/predict", content=image_bytes(), headers={"X-Request-Id": name[:5]}).json()["label"]
        other = "label-v1-b" if label == "label-v1-a" else "label-v1-a"
        labels = {"right": label, "wrong": other, "other": "kept0-a", "zebra": "zebra"}
        for name, true in labels.items():
            client.post("/feedback", json={"id": name, "label": true})
            replica.service.export()
        client.post("/feedback", json={"id": "zebra", "label": "zebra"})
        client.post("/feedback", json={"id": "never", "label": "x"})
    counters = replica.recorded.counters
    counted = {verdict: counters["mqmk_feedback_total", verdict] for verdict in FEEDBACK_RESULTS}
    assert counted == {"right": 1, "wrong": 2, "label_unknown": 1, "id_unknown": 1, "repeated": 1}
    assert counters["mqmk_labelled_matches_total", "task-v1", "matched"] == 2
    assert counters["mqmk_labelled_matches_total", "task-v1", "mismatched"] == 1


@pytest.mark.parametrize(("spread", "drifts"), [(1.0, False), (0.1, True)], ids=["usual", "of another kind"])
def test_usual_traffic_does_not_drift_and_another_kind_does(vit, calibrated, tmp_path, spread, drifts):
    usual = asdict(build_reference([number / 100 for number in range(100)]))
    reference = {"matcher": "mqmk", "tasks": {"task-v1": {"score": usual, "margin": usual}}}
    publish(tmp_path, calibrated.with_matching({"reference": reference}), 1)
    replica = Replica(vit, tmp_path)
    answer = answer_of(vit, replica.live_pool.loaded.pool, "mqmk")
    for number in range(200):
        value = spread * (number % 100) / 100
        replica.service.metrics.count_answer(replica.live_pool.loaded, replace(answer, score=value, margin=value), None)
    replica.service.export()
    gauges = replica.recorded.gauges
    assert gauges["mqmk_drift_window_images", "task-v1"] == 200
    assert gauges["mqmk_drift_window_images", "kept0"] == 0
    assert [gauges["mqmk_drift_index", "task-v1", value] > 0.25 for value in ("score", "margin")] == [drifts] * 2
    replica.service.close()


def test_drift_begins_anew_with_another_pool_and_ignores_answers_of_the_one_before(vit, pools):
    replica = Replica(vit, pools)
    old = replica.live_pool.loaded
    with replica as client:
        client.post("/predict", content=image_bytes())
        replica.service.export()
        assert replica.recorded.gauges["mqmk_drift_window_images", "task-v1"] == 1
        publish(pools, calibrated_pool(vit, 2), 2)
        replica.live_pool.poll()
        replica.service.export()
        late = answer_of(vit, old.pool, "mqmk")
        replica.service.metrics.count_answer(old, late, None)
        client.post("/predict", content=image_bytes())
    gauges = replica.recorded.gauges
    assert (gauges["mqmk_drift_window_images", "task-v1"], gauges["mqmk_drift_window_images", "task-v2"]) == (0, 1)
    assert replica.recorded.counters["mqmk_answers_total", "task-v1"] == 2
    assert replica.recorded.counters["mqmk_answers_total", "task-v2"] == 1


def test_tasks_beyond_the_limit_share_a_label(vit, pools):
    replica = Replica(vit, pools, task_labels=2)
    with replica as client:
        client.post("/predict", content=image_bytes(), headers={"X-Request-Id": "mine"})
        client.post("/feedback", json={"id": "mine", "label": "label-v1-a"})
    labels = {series[1] for series in replica.recorded.counters if series[0] == "mqmk_answers_total"}
    assert labels == {"kept0", "kept1", OTHER}
    assert replica.recorded.counters["mqmk_answers_total", OTHER] == 1
    assert replica.recorded.counters["mqmk_labelled_matches_total", OTHER, "matched"] == 1
    assert replica.recorded.gauges["mqmk_drift_window_images", OTHER] == 1


def test_tasks_that_come_and_go_never_have_more_series_than_allowed(vit, pools):
    replica = Replica(vit, pools, task_labels=5)
    for version in range(2, 5):  # each with a task of its own and without that of the version before
        publish(pools, calibrated_pool(vit, version), version)
        replica.live_pool.poll()
        replica.service.export()
    labels = {series[1] for series in replica.recorded.counters if series[0] == "mqmk_answers_total"}
    assert labels == {"kept0", "kept1", "kept2", "task-v1", "task-v2", OTHER}
    replica.service.close()


def sampled(vit, pools, prediction_of, **changes):
    """What `Agreement` says about the answers that `prediction_of` changes."""
    live_pool, found = LivePool(PoolStore(pools), vit, PredictSettings()), []
    live_pool.poll()
    image = prepare(decode(image_bytes()), vit.info)
    answer = answer_of(vit, live_pool.loaded.pool, "cascade")
    agreement = Agreement(vit, 1.0, lambda *each: found.append(each), **changes)
    for prediction in prediction_of(answer):
        agreement.sample(live_pool.loaded, image, prediction)
    agreement.close(wait=True)
    return found


def test_an_answer_agrees_when_exact_matching_finds_the_same_task(vit, pools):
    assert sampled(vit, pools, lambda answer: [answer]) == [("cascade", True)]
    assert sampled(vit, pools, lambda answer: [replace(answer, task="kept0")]) == [("cascade", False)]
    assert sampled(vit, pools, lambda answer: [replace(answer, matcher="mqmk")]) == [("mqmk", True)]


def test_comparisons_are_few_however_many_answers_there_are(vit, pools):
    assert len(sampled(vit, pools, lambda answer: [answer] * 50)) == 1
    assert sampled(vit, pools, lambda answer: [answer] * 50, chance=lambda: 1.0) == []


def test_a_share_of_answers_is_compared(vit, pools):
    replica = Replica(vit, pools, agreement_share=1.0)
    with replica as client:
        client.post("/predict?matcher=cascade", content=image_bytes())
    assert replica.recorded.counters["mqmk_agreement_answers_total", "cascade", "same"] == 1
    with pytest.raises(ServeError, match="agreement_share: expected 0 to 1, got 2"):
        spec_of(pools, agreement_share=2)


def test_numbers_are_exported_from_time_to_time_and_at_once_for_another_pool(vit, pools):
    recorded, now = RecordingMetrics(), [0.0]
    metrics = RequestMetrics(recorded, spec_of(pools), every_seconds=2.0, clock=lambda: now[0])
    live_pool, feedback = LivePool(PoolStore(pools), vit, PredictSettings()), RecentAnswers(1).totals

    def inside(number: int) -> float:
        metrics.export(live_pool.loaded, number, feedback)
        return recorded.gauges["mqmk_inflight_images",]

    assert [inside(1), inside(2)] == [1, 1]
    live_pool.poll()
    assert [inside(3), inside(4)] == [3, 3]
    now[0] = 2.0
    assert inside(5) == 5


def test_metrics_that_fail_do_not_end_the_watcher(vit, pools, caplog):
    replica = Replica(vit, pools)
    replica.recorded.set = lambda *_: 1 / 0
    replica.service.export()
    assert "metrics could not be exported" in caplog.text


def test_the_pool_is_returned_without_the_reference_of_drift(vit, pools):
    with Replica(vit, pools) as client:
        assert client.get("/pool").json()["matching"].keys() == {"calibration", "unknown"}


@pytest.mark.parametrize(
    "change", [{"score_spread": 0.0}, {"colour": 1}, {"intercept": "x"}], ids=["zero", "unknown field", "no number"]
)
def test_a_pool_with_a_calibration_that_cannot_be_used_is_refused(vit, calibrated, tmp_path, change):
    broken = {"cascade": calibrated.matching["calibration"]["cascade"] | change}
    publish(tmp_path, calibrated.with_matching({"calibration": broken}), 1)
    live_pool = LivePool(PoolStore(tmp_path), vit, PredictSettings())
    assert not live_pool.poll()
    assert dict(live_pool.rejections) == {"warm-up": 1}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of pydantic, in Serve's own settings
def test_ray_accepts_every_declared_metric_and_is_handed_sums_and_every_observation(monkeypatch):
    door, handed, observed = RayMetrics(), [], []
    for name, made in door._metrics.items():
        assert made.info["name"] == name
    made = door._metrics["mqmk_answers_total"]
    monkeypatch.setattr(made, "inc", lambda value, tags: handed.append((value, tags)))
    door.add("mqmk_answers_total", 0.0, "birds")
    door.flush()
    for _ in range(3):
        door.add("mqmk_answers_total", 1.0, "birds")
    door.flush()
    door.flush()
    assert handed == [(5e-324, {"task": "birds"}), (3.0, {"task": "birds"})]
    histogram = door._metrics["mqmk_batch_images"]
    monkeypatch.setattr(histogram, "observe", lambda value, tags: observed.append((value, tags)))
    for images in range(40):
        door.observe("mqmk_batch_images", images)
    assert observed == [], "a request waits for nothing"
    door.flush()
    door.flush()
    assert observed == [(images, {}) for images in range(40)]
