"""What replicas say about themselves, and who is still alive; and who may ask."""

import os
import shutil
import time

import pytest

from mqmk.deploy.serving.api_keys import ApiKeys, hash_key, new_key, read_keys
from mqmk.deploy.serving.errors import ServeError
from mqmk.deploy.serving.telemetry.heartbeat import ReplicaStatus, StatusFile, live_replicas


def test_a_report_comes_back_as_it_was_written(tmp_path):
    report = ReplicaStatus("a", 1, True, 3, "ab" * 32, 2, 1, {"read": 1}, "version 4: read: cut short", {"right": 1})
    StatusFile(tmp_path, "a").write(report)
    (found,) = live_replicas(tmp_path)
    assert found.age_seconds < 5
    assert ReplicaStatus(**(vars(found) | {"age_seconds": 0.0})) == report


def test_a_replica_that_fell_silent_is_not_alive_and_its_file_goes_in_the_end(tmp_path):
    for name, age in (("alive", 0), ("silent", 10), ("long gone", 100)):
        StatusFile(tmp_path, name).write(ReplicaStatus(name, 1, True))
        os.utime(tmp_path / f"{name}.json", (time.time() - age,) * 2)
    assert [report.replica_id for report in live_replicas(tmp_path)] == ["alive"]
    StatusFile(tmp_path, "new")
    assert sorted(path.stem for path in tmp_path.glob("*.json")) == ["alive", "silent"]


def test_a_heartbeat_renews_the_file_and_a_change_replaces_it(tmp_path, monkeypatch):
    reporter, now = StatusFile(tmp_path, "a"), [100.0]
    monkeypatch.setattr("mqmk.deploy.serving.telemetry.heartbeat.time.monotonic", lambda: now[0])
    reporter.write(ReplicaStatus("a", 1, False))
    os.utime(tmp_path / "a.json", (0, 0))
    reporter.write(ReplicaStatus("a", 1, False))
    assert not live_replicas(tmp_path)  # too soon
    now[0] += 2
    reporter.write(ReplicaStatus("a", 1, False))
    assert [report.ready for report in live_replicas(tmp_path)] == [False]
    reporter.write(ReplicaStatus("a", 1, True))
    assert [report.ready for report in live_replicas(tmp_path)] == [True]
    reporter.remove()
    assert not live_replicas(tmp_path)


def test_a_file_that_is_no_report_and_a_folder_that_is_gone_are_passed_over(tmp_path):
    for text in ("", "[]", "{}", '{"replica_id": 1}', "null"):
        (tmp_path / "x.json").write_text(text)
        assert live_replicas(tmp_path) == []
    reporter = StatusFile(tmp_path / "gone" / "replicas", "a")
    shutil.rmtree(tmp_path / "gone")
    reporter.write(ReplicaStatus("a", 1, True))
    assert live_replicas(tmp_path / "gone" / "replicas") == []
    assert not (tmp_path / "gone").exists(), "a state directory that was removed stays removed"


def test_a_lost_report_is_written_again_by_the_next_heartbeat(tmp_path, monkeypatch):
    folder, now = tmp_path / "replicas", [100.0]
    reporter, report = StatusFile(folder, "a"), ReplicaStatus("a", 1, True, 3)
    monkeypatch.setattr("mqmk.deploy.serving.telemetry.heartbeat.time.monotonic", lambda: now[0])
    reporter.write(report)
    for lose in (lambda: (folder / "a.json").unlink(), lambda: shutil.rmtree(folder)):
        lose()
        now[0] += 2
        reporter.write(report)
        assert [found.pool_version for found in live_replicas(folder)] == [3]


def test_keys_are_accepted_by_their_hash(tmp_path):
    key = new_key()
    (tmp_path / "keys").write_text(f"# ours\n{hash_key(key)}  alice\n\n{hash_key('other').upper()}\n")
    keys = read_keys(tmp_path / "keys")
    assert keys.accept(key)
    assert keys.accept("other")
    assert not any(keys.accept(wrong) for wrong in (None, "", key[:-1], hash_key(key), "\udc80"))
    assert ApiKeys().accept(None)
    assert key not in (tmp_path / "keys").read_text()


@pytest.mark.parametrize("text", ["", "# nothing\n", "secret\n", "a" * 63])
def test_a_file_without_hashes_is_refused(tmp_path, text):
    (tmp_path / "keys").write_text(text)
    with pytest.raises(ServeError, match="sha256 of one API key per line"):
        read_keys(tmp_path / "keys")
    with pytest.raises(ServeError, match="cannot be read"):
        read_keys(tmp_path / "absent")
