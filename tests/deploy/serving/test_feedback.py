"""Labels among several replicas: counted at one of them, and never so many questions at once as clients like."""

import asyncio
from dataclasses import dataclass, field
from functools import partial

import pytest
from support.serving.fingerprints import image_bytes, marked_pool, publish
from support.serving.service_specs import spec_of

from mqmk.deploy.serving.errors import BusyError, NotReadyError, UnknownRequestIdError
from mqmk.deploy.serving.feedback import RecentAnswer, RecentAnswers, record_once
from mqmk.deploy.serving.inference import MAX_BROADCASTS, PredictOptions, Service
from mqmk.deploy.serving.pools.live_pool import LivePool
from mqmk.matcher.backbone import load_backbone
from mqmk.matcher.pool_store import PoolStore
from mqmk.matcher.predictor import PredictSettings


def answer(at: float) -> RecentAnswer:
    return RecentAnswer(1, "birds", "owl", ("owl", "heron"), (("owl", "heron"), ("crab",)), answered_at=at)


@dataclass
class Replicas:
    """Several memories, and a broadcast that reaches all of them; those in `dead` answer with an error."""

    answers: dict[str, RecentAnswers] = field(default_factory=lambda: {name: RecentAnswers(10) for name in "abc"})
    dead: set[str] = field(default_factory=set)

    async def broadcast(self, method: str, *given: str) -> list[object]:
        return [
            RuntimeError("died") if name in self.dead else self._call(name, method, *given) for name in self.answers
        ]

    def _call(self, name: str, method: str, *given: str) -> object:
        if method == "find_answer":
            return self.answers[name].find(name, *given)
        replica, request_id, label = given
        return self.answers[name].record_label(request_id, label) if replica == name else None

    def record(self, request_id: str, label: str = "owl"):
        return asyncio.run(record_once(self.broadcast, request_id, label))

    def counted(self) -> dict[str, int]:
        return {name: each.counts["right"] for name, each in self.answers.items() if each.counts["right"]}


def test_an_answer_that_two_replicas_gave_is_counted_once_at_the_later_one():
    found = Replicas()
    found.answers["a"].remember("retried", answer(at=1))
    found.answers["c"].remember("retried", answer(at=2))
    assert found.record("retried").counted
    assert not found.record("retried").counted
    assert found.counted() == {"c": 1}


def test_an_answer_that_is_given_again_after_its_label_is_not_counted_again():
    found = Replicas()
    found.answers["a"].remember("retried", answer(at=1))
    assert found.record("retried").counted
    found.answers["b"].remember("retried", answer(at=2))  # on another replica
    found.answers["a"].remember("retried", answer(at=3))  # and on the same one
    assert not found.record("retried").counted
    assert found.counted() == {"a": 1}


@pytest.mark.parametrize(
    ("label", "correct", "matched"),
    [("owl", True, True), ("heron", False, True), ("crab", False, False), ("truck", False, None)],
)
def test_a_label_says_whether_the_match_was_right_unless_no_task_of_that_pool_knows_it(label, correct, matched):
    found = Replicas()
    found.answers["a"].remember("asked", answer(at=1))
    feedback = found.record("asked", label)
    assert (feedback.correct, feedback.matched) == (correct, matched)


def test_labels_that_come_at_once_are_counted_once():
    found = Replicas()
    for at, name in enumerate("abc"):
        found.answers[name].remember("retried", answer(at))

    async def all_at_once() -> list:
        return await asyncio.gather(*(record_once(found.broadcast, "retried", "owl") for _ in range(20)))

    results = asyncio.run(all_at_once())
    assert sum(result.counted for result in results) == 1
    assert found.counted() == {"c": 1}


def test_a_replica_that_died_is_passed_over_and_an_id_that_nobody_knows_is_nobodys():
    found = Replicas(dead={"b"})
    found.answers["a"].remember("asked", answer(at=1))
    assert found.record("asked").counted
    assert found.record("never") is None


@pytest.fixture(scope="module")
def vit():
    return load_backbone()


def service(vit, pools, other_replicas, **changes) -> Service:
    publish(pools, marked_pool(vit, 1), 1)
    live_pool = LivePool(PoolStore(pools), vit, PredictSettings())
    live_pool.poll()
    return Service(vit, live_pool, spec_of(pools, **changes), other_replicas)


async def flood(service: Service, count: int) -> list[type]:
    """How each of many labels for ids that nobody knows ends."""
    ended = await asyncio.gather(*(service.feedback(f"never-{n}", "owl") for n in range(count)), return_exceptions=True)
    return [type(each) for each in ended]


def test_a_flood_of_unknown_ids_asks_the_replicas_a_few_at_a_time_and_the_rest_is_refused(vit, tmp_path):
    now, most, asked = 0, 0, 0

    async def slow(_id: str, _label: str) -> None:
        nonlocal now, most, asked
        now, asked = now + 1, asked + 1
        most = max(most, now)
        await asyncio.sleep(0.01)
        now -= 1

    ended = asyncio.run(flood(service(vit, tmp_path / "pools", slow, max_queue=20), 100))
    assert (ended.count(UnknownRequestIdError), ended.count(BusyError)) == (20, 80)
    assert (most, asked) == (MAX_BROADCASTS, 20)


def test_replicas_that_do_not_answer_in_time_are_reported(vit, tmp_path):
    async def never(_id: str, _label: str) -> None:
        await asyncio.sleep(60)

    async def late(_id: str, _label: str) -> None:
        raise TimeoutError

    for other_replicas in (never, late):
        asked = service(vit, tmp_path / other_replicas.__name__, other_replicas, timeout_seconds=0.1)
        assert asyncio.run(flood(asked, 6)) == [NotReadyError] * 6


def test_answers_of_many_versions_share_the_names_that_they_keep(vit, tmp_path):
    live_pool = LivePool(PoolStore(tmp_path), vit, PredictSettings())
    service = Service(vit, live_pool, spec_of(tmp_path))
    for version in (1, 2):
        publish(tmp_path, marked_pool(vit, version), version)
        assert live_pool.poll()
        asyncio.run(service.predict(f"v{version}", [service.from_bytes(image_bytes())], PredictOptions()))
    first, second = service.answers._answers.values()
    assert [first.classes, second.classes] == [("label-v1-a", "label-v1-b"), ("label-v2-a", "label-v2-b")]
    assert all(one is other for one, other in zip(first.pool_classes[:3], second.pool_classes[:3], strict=True))
    service.close()


def test_a_replica_that_is_alone_asks_nobody(vit, tmp_path):
    alone = service(vit, tmp_path / "pools", None)
    alone.answers.remember("asked", answer(at=1))
    assert asyncio.run(alone.feedback("asked", "owl")).counted
    assert asyncio.run(flood(alone, 100)) == [UnknownRequestIdError] * 100


def test_among_several_the_own_answer_is_found_like_any_other(vit, tmp_path):
    found = Replicas()
    one = service(vit, tmp_path / "pools", partial(record_once, found.broadcast))
    one.answers = found.answers["a"]
    found.answers["b"].remember("retried", answer(at=2))
    one.answers.remember("retried", answer(at=1))
    assert asyncio.run(one.feedback("retried", "owl")).counted
    assert found.counted() == {"b": 1}
