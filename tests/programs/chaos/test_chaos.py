"""Any process may be killed at any time and clients hardly notice; and the analysis detects violations.

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
from programs.chaos.analysis import (
    attribute_failures,
    failure_windows,
    find_gaps,
    find_version_regressions,
    find_wrong_answers,
    summarize_kills,
)
from programs.chaos.clients import RequestRecord
from programs.chaos.kills import ROUND, Kill, Kind, ProcessSnapshot, plan_kills

TESTS = Path(__file__).resolve().parents[2]
CARDS = {
    1: {"tasks": [{"name": "sea", "classes": ["crab", "whale"]}]},
    2: {"tasks": [{"name": "sea", "classes": ["crab", "whale"]}, {"name": "birds", "classes": ["owl", "swan"]}]},
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Results of one minute of kills. It uses both cores for minutes, so it does not run beside other tests."""
    if not os.environ.get("MINUTES_TEST"):
        pytest.skip("a minute of kills needs the machine for itself: make minutes-test")
    file = tmp_path_factory.mktemp("chaos") / "chaos.json"
    command = [sys.executable, "-m", "programs.chaos.run", "--seconds", "60", "--every", "15", "--seed", "1"]
    command += ["--json", str(file)]
    done = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, timeout=1500, check=False)
    assert file.exists(), (done.stdout + done.stderr)[-6000:]
    print(done.stdout)
    found: dict[str, Any] = json.loads(file.read_text())
    return found


@pytest.mark.timeout(1600)
def test_after_a_minute_of_kills_every_task_is_served_once_and_every_failed_request_is_explained(
    results: dict[str, Any],
) -> None:
    assert results["problems"] == [], f"repeat with --seed {results['seed']}"
    assert {row["kind"] for row in results["table"]} == set(ROUND)
    assert results["unexplained"] == 0 and results["tasks"] >= 4 and results["requests"] > 500


def test_the_death_of_the_daemon_fails_no_request(results: dict[str, Any]) -> None:
    first = results["first_kill"]
    assert (first["kind"], first["failed"]) == ("daemon", 0) and first["requests"] > 50


def answer(began: float, version: int = 1, label: str = "crab", task: str = "sea", **other: Any) -> RequestRecord:
    options = {"image": "crab", "probability": 0.5, "top": ((label, task),)} | other
    return RequestRecord(began, began + 0.1, version=version, label=label, task=task, **options)


def failure(began: float, ended: float, error: str = "ServerDisconnectedError: ") -> RequestRecord:
    return RequestRecord(began, ended, "crab", error)


def snapshot_processes(at: float, proxy: int, raylet: int = 7) -> ProcessSnapshot:
    return ProcessSnapshot(at, {Kind.PROXY: (proxy,) if proxy else (), Kind.RAYLET: (raylet,) if raylet else ()})


def numbers(
    records: list[RequestRecord], kills: list[Kill], snapshots: list[ProcessSnapshot]
) -> tuple[dict[int, int], int]:
    by_kill, rest = attribute_failures(records, failure_windows(kills, snapshots, records))
    return {number: len(own) for number, own in by_kill.items()}, len(rest)


@pytest.mark.parametrize("kind", [Kind.DAEMON, Kind.TRAINER, Kind.CONTROLLER])
def test_a_kill_that_must_cost_nothing_explains_nothing(kind: Kind) -> None:
    kills = [Kill(0, kind, 10.0, 1)]
    assert numbers([failure(9.9, 10.1), failure(10.5, 10.6)], kills, [snapshot_processes(9.0, 1)]) == ({}, 2)


def test_a_dead_replica_explains_what_was_under_way_and_no_more() -> None:
    kills = [Kill(0, Kind.REPLICA, 10.0, 1)]
    records = [failure(*times, "500: Internal Server Error") for times in ((9.8, 9.9), (9.9, 10.2), (13.0, 13.1))]
    assert numbers(records, kills, [snapshot_processes(9.0, 1)]) == ({0: 1}, 2)
    assert numbers([failure(9.9, 10.2)], kills, [snapshot_processes(9.0, 1)]) == ({}, 1), "a proxy was there to answer"


def test_a_dead_proxy_explains_failures_until_another_proxy_has_answered() -> None:
    kills, snapshots = (
        [Kill(4, Kind.PROXY, 10.0, 1)],
        [snapshot_processes(9.0, 1), snapshot_processes(11.0, 0), snapshot_processes(12.0, 2)],
    )
    records = [answer(9.9), failure(10.5, 10.6), failure(13.0, 13.1), answer(14.0), failure(15.0, 15.1)]
    assert numbers(records, kills, snapshots) == ({4: 2}, 1)
    (row,) = summarize_kills(kills, records, failure_windows(kills, snapshots, records))
    assert (row.kills, row.failed, row.max_per_kill) == (1, 2, 2) and row.longest_gap == pytest.approx(4.1)


def test_a_dead_raylet_explains_failures_until_the_proxy_of_another_head_has_answered() -> None:
    kills, snapshots = (
        [Kill(0, Kind.RAYLET, 10.0, 7)],
        [snapshot_processes(9.0, 1), snapshot_processes(11.0, 1, 0), snapshot_processes(20.0, 2, 8)],
    )
    records = [answer(10.2), failure(11.0, 11.1), failure(21.0, 21.1), answer(22.0), failure(23.0, 23.1)]
    assert numbers(records, kills, snapshots) == ({0: 2}, 1)


def test_what_never_comes_back_has_a_window_without_an_end() -> None:
    kills, snapshots = [Kill(0, Kind.PROXY, 10.0, 1)], [snapshot_processes(9.0, 1), snapshot_processes(11.0, 0)]
    (window,) = failure_windows(kills, snapshots, [answer(9.9), failure(12.0, 12.1)])
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
    records = [answer(9.9), answer(13.9), answer(14.0)]
    found = failure_windows(kills, [snapshot_processes(0.0, 1), snapshot_processes(13.0, 2)], records)
    ((blamed, seconds),) = find_gaps(kills, records, found)
    assert (blamed.kind if blamed else None) == culprit and seconds == pytest.approx(4.0)


def test_answers_that_agree_with_their_version_and_each_other_are_right() -> None:
    records = [answer(1.0), answer(2.0), answer(3.0, 2, "owl", "birds"), answer(4.0, 2, "owl", "birds")]
    assert find_wrong_answers(records, CARDS, {1: 0.5, 2: 2.9}) == []


WRONG = {
    "a class that its version does not have": [answer(1.0, 1, "owl", "birds")],
    "a label of another task": [answer(1.0, 2, "owl", "sea")],
    "a list that begins with another class": [answer(1.0, top=(("whale", "sea"), ("crab", "sea")))],
    "a version that does not exist": [answer(1.0, 3)],
    "another label for the same image": [answer(1.0), answer(1.5, 1, "whale")],
    "another probability for the same image": [answer(1.0), answer(1.5, probability=0.6)],
    "a version behind the one that is served everywhere": [answer(2.5, 1)],
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_answer_is_noticed(what: str) -> None:
    assert find_wrong_answers(WRONG[what], CARDS, {1: 0.5, 2: 2.0})


def test_a_replica_that_goes_back_is_noticed_and_a_new_one_is_not_taken_for_it() -> None:
    assert find_version_regressions([("a", 1), ("b", 1), ("a", 2), ("b", 2), ("c", None), ("c", 2)]) == []
    assert find_version_regressions([("a", 2), ("b", 2), ("a", 1)])


def test_a_seed_gives_the_same_throws_and_every_kind_has_its_turn() -> None:
    assert plan_kills(5, 60) == plan_kills(5, 60) != plan_kills(6, 60)
    assert {planned.kind for planned in plan_kills(5, 600)} == set(Kind)
    for seed in range(50):
        assert {planned.kind for planned in plan_kills(seed, 60)} == set(ROUND)
