"""Anything may be killed at any time, and clients hardly notice; and the account that says so can say no.

`make chaos-test` runs ten minutes of it, `make chaos-test SECONDS=60` one.
"""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from chaos_account import explained, silences, table, went_back, windows, wrong_answers
from chaos_clients import Sample
from chaos_kills import BAG, Kill, Kind, Look, throws

TESTS = Path(__file__).parent.parent
CARDS = {
    1: {"tasks": [{"name": "sea", "classes": ["crab", "whale"]}]},
    2: {"tasks": [{"name": "sea", "classes": ["crab", "whale"]}, {"name": "birds", "classes": ["owl", "swan"]}]},
}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one minute of kills showed. It takes both cores for minutes, so it does not run beside other tests."""
    if not os.environ.get("MINUTES_TEST"):
        pytest.skip("a minute of kills needs the machine for itself: make minutes-test")
    file = tmp_path_factory.mktemp("chaos") / "chaos.json"
    command = [sys.executable, str(TESTS / "chaos.py"), "--seconds", "60", "--every", "15", "--seed", "1"]
    command += ["--json", str(file)]
    done = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, timeout=1500, check=False)
    assert file.exists(), (done.stdout + done.stderr)[-6000:]
    print(done.stdout)
    found: dict[str, Any] = json.loads(file.read_text())
    return found


@pytest.mark.timeout(1600)
def test_after_a_minute_of_kills_every_task_is_served_once_and_every_failed_request_is_explained(
    report: dict[str, Any],
) -> None:
    assert report["problems"] == [], f"repeat with --seed {report['seed']}"
    assert {row["kind"] for row in report["table"]} == set(BAG)
    assert report["unexplained"] == 0 and report["tasks"] >= 4 and report["requests"] > 500


def test_the_death_of_the_daemon_fails_no_request(report: dict[str, Any]) -> None:
    first = report["first_kill"]
    assert (first["kind"], first["failed"]) == ("daemon", 0) and first["requests"] > 50


def answer(began: float, version: int = 1, label: str = "crab", task: str = "sea", **other: Any) -> Sample:
    given = {"picture": "crab", "probability": 0.5, "top": ((label, task),)} | other
    return Sample(began, began + 0.1, version=version, label=label, task=task, **given)


def failure(began: float, ended: float, error: str = "ServerDisconnectedError: ") -> Sample:
    return Sample(began, ended, "crab", error)


def look(at: float, proxy: int, raylet: int = 7) -> Look:
    return Look(at, {Kind.PROXY: (proxy,) if proxy else (), Kind.RAYLET: (raylet,) if raylet else ()})


def numbers(samples: list[Sample], kills: list[Kill], looks: list[Look]) -> tuple[dict[int, int], int]:
    by_kill, rest = explained(samples, windows(kills, looks, samples))
    return {number: len(own) for number, own in by_kill.items()}, len(rest)


@pytest.mark.parametrize("kind", [Kind.DAEMON, Kind.TRAINER, Kind.CONTROLLER])
def test_a_kill_that_must_cost_nothing_explains_nothing(kind: Kind) -> None:
    kills = [Kill(0, kind, 10.0, 1)]
    assert numbers([failure(9.9, 10.1), failure(10.5, 10.6)], kills, [look(9.0, 1)]) == ({}, 2)


def test_a_dead_replica_explains_what_was_under_way_and_no_more() -> None:
    kills = [Kill(0, Kind.REPLICA, 10.0, 1)]
    samples = [failure(*times, "500: Internal Server Error") for times in ((9.8, 9.9), (9.9, 10.2), (13.0, 13.1))]
    assert numbers(samples, kills, [look(9.0, 1)]) == ({0: 1}, 2)
    assert numbers([failure(9.9, 10.2)], kills, [look(9.0, 1)]) == ({}, 1), "a proxy was there to answer"


def test_a_dead_proxy_explains_failures_until_another_proxy_has_answered() -> None:
    kills, looks = [Kill(4, Kind.PROXY, 10.0, 1)], [look(9.0, 1), look(11.0, 0), look(12.0, 2)]
    samples = [answer(9.9), failure(10.5, 10.6), failure(13.0, 13.1), answer(14.0), failure(15.0, 15.1)]
    assert numbers(samples, kills, looks) == ({4: 2}, 1)
    (row,) = table(kills, samples, windows(kills, looks, samples))
    assert (row.kills, row.failed, row.most) == (1, 2, 2) and row.silence == pytest.approx(4.1)


def test_a_dead_raylet_explains_failures_until_the_proxy_of_another_head_has_answered() -> None:
    kills, looks = [Kill(0, Kind.RAYLET, 10.0, 7)], [look(9.0, 1), look(11.0, 1, 0), look(20.0, 2, 8)]
    samples = [answer(10.2), failure(11.0, 11.1), failure(21.0, 21.1), answer(22.0), failure(23.0, 23.1)]
    assert numbers(samples, kills, looks) == ({0: 2}, 1)


def test_what_never_comes_back_has_a_window_without_an_end() -> None:
    kills, looks = [Kill(0, Kind.PROXY, 10.0, 1)], [look(9.0, 1), look(11.0, 0)]
    (window,) = windows(kills, looks, [answer(9.9), failure(12.0, 12.1)])
    assert window.end == math.inf


@pytest.mark.parametrize(
    ("killed", "culprit"),
    [
        ([(Kind.REPLICA, 2.0), (Kind.DAEMON, 9.0)], Kind.REPLICA),
        ([(Kind.PROXY, 10.5), (Kind.REPLICA, 11.0)], Kind.PROXY),
        ([(Kind.CONTROLLER, 3.0), (Kind.TRAINER, 9.0)], Kind.TRAINER),
        ([(Kind.TRAINER, 15.0)], None),
    ],
)
def test_a_silence_is_blamed_on_what_can_cause_it(killed: list[tuple[Kind, float]], culprit: Kind | None) -> None:
    kills = [Kill(number, kind, at, 1) for number, (kind, at) in enumerate(killed)]
    samples = [answer(9.9), answer(13.9), answer(14.0)]
    found = windows(kills, [look(0.0, 1), look(13.0, 2)], samples)
    ((blamed, seconds),) = silences(kills, samples, found)
    assert (blamed.kind if blamed else None) == culprit and seconds == pytest.approx(4.0)


def test_answers_that_agree_with_their_version_and_each_other_are_right() -> None:
    samples = [answer(1.0), answer(2.0), answer(3.0, 2, "owl", "birds"), answer(4.0, 2, "owl", "birds")]
    assert wrong_answers(samples, CARDS, {1: 0.5, 2: 2.9}) == []


WRONG = {
    "a class that its version does not have": [answer(1.0, 1, "owl", "birds")],
    "a label of another task": [answer(1.0, 2, "owl", "sea")],
    "a list that begins with another class": [answer(1.0, top=(("whale", "sea"), ("crab", "sea")))],
    "a version that does not exist": [answer(1.0, 3)],
    "another label for the same picture": [answer(1.0), answer(1.5, 1, "whale")],
    "another probability for the same picture": [answer(1.0), answer(1.5, probability=0.6)],
    "a version behind the one that is served everywhere": [answer(2.5, 1)],
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_answer_is_noticed(what: str) -> None:
    assert wrong_answers(WRONG[what], CARDS, {1: 0.5, 2: 2.0})


def test_a_replica_that_goes_back_is_noticed_and_a_new_one_is_not_taken_for_it() -> None:
    assert went_back([("a", 1), ("b", 1), ("a", 2), ("b", 2), ("c", None), ("c", 2)]) == []
    assert went_back([("a", 2), ("b", 2), ("a", 1)])


def test_a_seed_gives_the_same_throws_and_every_kind_has_its_turn() -> None:
    assert throws(5, 60) == throws(5, 60) != throws(6, 60)
    assert {throw.kind for throw in throws(5, 600)} == set(Kind)
    for seed in range(50):
        assert {throw.kind for throw in throws(seed, 60)} == set(BAG)
