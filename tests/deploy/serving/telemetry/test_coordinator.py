"""Replicas that do not see the daemon's folders report through the coordinator, and learn its credentials there."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from mqmk.deploy.serving.telemetry import coordinator
from mqmk.deploy.serving.telemetry.heartbeat import ReplicaStatus, live_replicas
from mqmk.matcher.errors import PoolError

pytestmark = [pytest.mark.usefixtures("ray_head"), pytest.mark.timeout(180)]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    coordinator.ensure_coordinator(tmp_path / "replicas")
    yield tmp_path / "replicas"
    ray.kill(ray.get_actor(coordinator.NAME, namespace=coordinator.NAMESPACE))


@pytest.fixture
def status() -> Iterator[coordinator.RemoteStatus]:
    one = coordinator.RemoteStatus("far")
    yield one
    one.remove()


def until(what: Callable[[], bool], seconds: float = 40) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.05)


def versions(folder: Path) -> list[tuple[str, int | None]]:
    return [(each.replica_id, each.pool_version) for each in live_replicas(folder)]


@ray.remote(num_cpus=0)
class OtherProcess:
    """A process of its own, as a replica is."""

    def variable(self, name: str) -> str | None:
        coordinator.adopt_credentials()
        return os.environ.get(name)


def test_a_report_becomes_a_file_that_stays_fresh_without_news_and_goes_at_the_end(folder: Path) -> None:
    status = coordinator.RemoteStatus("far")
    status.write(ReplicaStatus("far", 1, True, 1))
    until(lambda: versions(folder) == [("far", 1)])
    status.write(ReplicaStatus("far", 1, True, 2))
    until(lambda: versions(folder) == [("far", 2)])
    time.sleep(3)
    (seen,) = live_replicas(folder)
    assert seen.age_seconds < 2.5, "nobody looked at the pointer meanwhile, and its heart beats"
    status.remove()
    until(lambda: versions(folder) == [])


def test_a_coordinator_that_is_killed_comes_back_and_hears_of_everybody_again(
    folder: Path, status: coordinator.RemoteStatus
) -> None:
    status.write(ReplicaStatus("far", 1, True, 1))
    until(lambda: versions(folder) == [("far", 1)])
    pid = ray.get(ray.get_actor(coordinator.NAME, namespace=coordinator.NAMESPACE).pid.remote())
    os.kill(pid, signal.SIGKILL)
    status.write(ReplicaStatus("far", 1, True, 2))
    until(lambda: versions(folder) == [("far", 2)])


def test_a_coordinator_at_another_folder_is_replaced_and_one_at_this_folder_is_not(
    tmp_path: Path, folder: Path
) -> None:
    def pid() -> int:
        return int(ray.get(ray.get_actor(coordinator.NAME, namespace=coordinator.NAMESPACE).pid.remote()))

    first = pid()
    coordinator.ensure_coordinator(folder)
    assert pid() == first
    coordinator.ensure_coordinator(tmp_path / "other")
    assert pid() != first


@pytest.mark.usefixtures("folder")
def test_other_processes_learn_our_credentials_and_new_ones_when_reminded(monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = OtherProcess.remote()  # type: ignore[attr-defined]
    assert ray.get(elsewhere.variable.remote("AWS_MQMK_TEST")) is None
    before = coordinator.credentials_fingerprint()
    monkeypatch.setenv("AWS_MQMK_TEST", "secret")
    assert coordinator.credentials_fingerprint() != before and "secret" not in coordinator.credentials_fingerprint()
    coordinator.refresh_credentials()
    until(lambda: ray.get(elsewhere.variable.remote("AWS_MQMK_TEST")) == "secret")


def test_without_a_coordinator_nothing_is_lost_but_the_reports(
    status: coordinator.RemoteStatus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_MQMK_TEST", "own")
    coordinator.adopt_credentials()
    coordinator.refresh_credentials()
    status.write(ReplicaStatus("far", 1, True, 1))
    assert os.environ["AWS_MQMK_TEST"] == "own"


@pytest.mark.usefixtures("folder")
def test_a_coordinator_that_lost_the_credentials_learns_them_from_a_replica_while_no_daemon_runs(
    status: coordinator.RemoteStatus, monkeypatch: pytest.MonkeyPatch
) -> None:
    def actor() -> Any:
        return ray.get_actor(coordinator.NAME, namespace=coordinator.NAMESPACE)

    monkeypatch.setattr(coordinator, "_adopted", {})
    ray.get(actor().set_credentials.remote({"AWS_MQMK_TEST": "secret"}))
    monkeypatch.setenv("AWS_MQMK_TEST", "")
    assert coordinator.adopt_credentials(), "they are new here"
    assert not coordinator.adopt_credentials(), "and not any more"
    status.write(ReplicaStatus("far", 1, True, 1))
    os.kill(ray.get(actor().pid.remote()), signal.SIGKILL)
    elsewhere = OtherProcess.remote()  # type: ignore[attr-defined]
    until(lambda: ray.get(elsewhere.variable.remote("AWS_MQMK_TEST")) == "secret")


def test_credentials_are_asked_for_again_but_not_all_the_time_and_used_in_the_end() -> None:
    now, new, reconnected = [0.0], [False], []

    def reconnect() -> None:
        reconnected.append(now[0])
        if len(reconnected) == 1:
            raise PoolError("no answer in time")

    asked: list[float] = []
    renewal = coordinator.CredentialRenewal(reconnect, 5.0, lambda: (asked.append(now[0]), new[0])[1], lambda: now[0])
    renewal.renew()
    assert (asked, reconnected) == ([0.0], []), "the coordinator knows nothing yet"
    now[0], new[0] = 4.0, True
    renewal.renew()
    assert (asked, reconnected) == ([0.0], []), "too soon"
    now[0] = 6.0
    with pytest.raises(PoolError):
        renewal.renew()
    now[0], new[0] = 12.0, False
    renewal.renew()
    now[0] = 18.0
    renewal.renew()
    assert (asked, reconnected) == ([0.0, 6.0, 12.0, 18.0], [6.0, 12.0]), "what failed is tried again, then no more"


def test_a_report_that_is_lost_without_a_word_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mute:
        """An actor whose calls fail with an error that has no text."""

        receive = property(lambda self: self)
        remote = staticmethod(lambda _: None)

    def fails(*_: object, **__: object) -> None:
        raise ray.exceptions.RayError("")

    status = coordinator.RemoteStatus.__new__(coordinator.RemoteStatus)
    status._coordinator = Mute()
    monkeypatch.setattr(coordinator.ray, "get", fails)
    status._send(ReplicaStatus("far", 1, True, 1))
    assert status._coordinator is None


def test_a_ray_that_does_not_answer_ends_no_thread_of_a_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise ray.exceptions.GetTimeoutError("the GCS does not answer")

    monkeypatch.setattr(coordinator.ray, "get_actor", fails)
    status = coordinator.RemoteStatus.__new__(coordinator.RemoteStatus)
    status._coordinator = None
    status._send(ReplicaStatus("far", 1, True, 1))
    assert not coordinator.adopt_credentials()
