"""Replicas that do not see the daemon's folders report through the desk, and learn its credentials there."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import ray

from mqmk.deploy import desk
from mqmk.deploy.reports import ReplicaReport, live_reports

pytestmark = [pytest.mark.usefixtures("ray_head"), pytest.mark.timeout(180)]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    desk.ensure_desk(tmp_path / "replicas")
    yield tmp_path / "replicas"
    ray.kill(ray.get_actor(desk.NAME, namespace=desk.NAMESPACE))


@pytest.fixture
def reporter() -> Iterator[desk.DistantReporter]:
    one = desk.DistantReporter("far")
    yield one
    one.remove()


def until(what: Callable[[], bool], seconds: float = 40) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.05)


def versions(folder: Path) -> list[tuple[str, int | None]]:
    return [(each.replica_id, each.pool_version) for each in live_reports(folder)]


@ray.remote(num_cpus=0)
class Elsewhere:
    """A process of its own, as a replica is."""

    def variable(self, name: str) -> str | None:
        desk.take_up_credentials()
        return os.environ.get(name)


def test_a_report_becomes_a_file_that_stays_fresh_without_news_and_goes_at_the_end(folder: Path) -> None:
    reporter = desk.DistantReporter("far")
    reporter.write(ReplicaReport("far", 1, True, 1))
    until(lambda: versions(folder) == [("far", 1)])
    reporter.write(ReplicaReport("far", 1, True, 2))
    until(lambda: versions(folder) == [("far", 2)])
    time.sleep(3)
    (seen,) = live_reports(folder)
    assert seen.age_seconds < 2.5, "nobody looked at the pointer meanwhile, and its heart beats"
    reporter.remove()
    until(lambda: versions(folder) == [])


def test_a_desk_that_is_killed_comes_back_and_hears_of_everybody_again(
    folder: Path, reporter: desk.DistantReporter
) -> None:
    reporter.write(ReplicaReport("far", 1, True, 1))
    until(lambda: versions(folder) == [("far", 1)])
    pid = ray.get(ray.get_actor(desk.NAME, namespace=desk.NAMESPACE).pid.remote())
    os.kill(pid, signal.SIGKILL)
    reporter.write(ReplicaReport("far", 1, True, 2))
    until(lambda: versions(folder) == [("far", 2)])


def test_a_desk_at_another_folder_is_replaced_and_one_at_this_folder_is_not(tmp_path: Path, folder: Path) -> None:
    def pid() -> int:
        return int(ray.get(ray.get_actor(desk.NAME, namespace=desk.NAMESPACE).pid.remote()))

    first = pid()
    desk.ensure_desk(folder)
    assert pid() == first
    desk.ensure_desk(tmp_path / "other")
    assert pid() != first


@pytest.mark.usefixtures("folder")
def test_other_processes_learn_our_credentials_and_new_ones_when_reminded(monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = Elsewhere.remote()  # type: ignore[attr-defined]
    assert ray.get(elsewhere.variable.remote("AWS_MQMK_TEST")) is None
    before = desk.fingerprint()
    monkeypatch.setenv("AWS_MQMK_TEST", "secret")
    assert desk.fingerprint() != before and "secret" not in desk.fingerprint()
    desk.remind()
    until(lambda: ray.get(elsewhere.variable.remote("AWS_MQMK_TEST")) == "secret")


def test_without_a_desk_nothing_is_lost_but_the_reports(
    reporter: desk.DistantReporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_MQMK_TEST", "own")
    desk.take_up_credentials()
    desk.remind()
    reporter.write(ReplicaReport("far", 1, True, 1))
    assert os.environ["AWS_MQMK_TEST"] == "own"
