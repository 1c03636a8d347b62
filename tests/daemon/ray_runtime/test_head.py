"""A real Ray head: started once, found again, killed in its parts, repaired, stopped. One head for nearly all of it."""

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest
from support.exposure import beyond_loopback, listening_addresses, ports_of
from support.servers.ports import HOLD_PORT_PROGRAM, bind_port
from support.servers.ray_session import small_head

from mqmk.daemon.errors import RayError
from mqmk.daemon.ray_runtime.attach import ExternalCluster, attach, detach
from mqmk.daemon.ray_runtime.head import Head, ensure_head, find_head, head_processes, stop_head
from mqmk.daemon.ray_runtime.head_command import (
    RayHeadSettings,
    choose_ports,
)
from mqmk.daemon.ray_runtime.processes import Process, arguments, is_alive, process
from mqmk.daemon.ray_runtime.watchdog import (
    PROXY_SECONDS,
    Action,
    HeadHealth,
    Part,
    Watch,
    check,
    decide,
    repair,
)

pytestmark = pytest.mark.filterwarnings("ignore:Using extra keyword arguments on `Field`")  # importing ray.serve

STARTER = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from support.servers.ray_session import small_head
from mqmk.daemon.ray_runtime.head import ensure_head
print(ensure_head(small_head(Path(sys.argv[2]))).pid, flush=True)
time.sleep(600)
"""


def starter(folder: Path) -> subprocess.Popen[str]:
    """A process that ensures a head, says its id and stays."""
    command = [sys.executable, "-c", STARTER, str(Path(__file__).resolve().parents[2]), str(folder)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def kill(found: subprocess.Popen[str]) -> None:
    found.kill()
    found.wait()
    assert found.stdout
    found.stdout.close()


def wait_for(what, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.1)


@pytest.fixture(scope="module")
def folder():
    path = Path(tempfile.mkdtemp(prefix="mqmk-head-"))
    yield path
    detach()
    stop_head(path)
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def two_starters(folder) -> list[int]:
    """Which head each of two starters found that began at once, after a third was killed during its start."""
    unlucky = starter(folder)
    wait_for(lambda: head_processes(folder))
    kill(unlucky)
    assert not (folder / "head.json").exists()
    starters = [starter(folder), starter(folder)]
    found = [int(each.stdout.readline()) for each in starters]
    for each in starters:
        kill(each)
    return found


@pytest.fixture(scope="module")
def settings(folder) -> RayHeadSettings:
    return small_head(folder)


@pytest.fixture(scope="module")
def head(settings, two_starters) -> Head:
    assert two_starters
    return ensure_head(settings)


def test_two_starters_at_once_end_with_one_head(two_starters, head):
    assert two_starters == [head.pid, head.pid]
    leaders = {each.session for each in head_processes(head.token_file.parent)}
    assert leaders == {head.pid}  # the head of the starter that was killed during its start is gone too


def test_a_head_outlives_the_killed_process_that_started_it_and_answers(head):
    assert check(head) == HeadHealth()
    assert process(head.pid).session == head.pid


def test_the_token_and_the_folders_are_for_the_owner_only(head):
    assert head.token_file.stat().st_mode & 0o777 == 0o600
    assert len(head.token_file.read_text()) == 64
    assert head.temp_folder.parent.stat().st_mode & 0o077 == 0  # Ray opens its own folder for everybody


def test_the_record_says_where_the_head_is(head, folder):
    record = json.loads((folder / "head.json").read_text())
    assert (record["address"], record["pid"]) == (head.address, head.pid)
    assert find_head(folder) == head


def test_a_look_costs_less_than_ten_milliseconds(head):
    begun = time.process_time()
    for _ in range(20):
        check(head)
    assert (time.process_time() - begun) / 20 < 0.010


def test_a_silent_gcs_is_seen_and_given_some_time(head):
    os.kill(head.gcs.pid, signal.SIGSTOP)
    try:
        wait_for(lambda: check(head, timeout=0.3) == HeadHealth(silent=(Part.GCS,)), seconds=5)
    finally:
        os.kill(head.gcs.pid, signal.SIGCONT)
    wait_for(lambda: check(head).is_healthy)


def test_a_wrong_token_is_refused_soon(head, tmp_path):
    wrong = tmp_path / "token"
    wrong.write_text("0" * 64)
    begun = time.monotonic()
    with pytest.raises(RayError, match="refuses the token"):
        attach(replace(head, token_file=wrong), deadline_seconds=15)
    assert time.monotonic() - begun < 5


@pytest.fixture(scope="module")
def attached(head) -> Head:
    attach(head)
    return head


@pytest.fixture(scope="module")
def proxy_port(attached) -> int:
    """A Serve application; gives the port of Serve's proxy."""
    port = choose_ports(small_head(attached.temp_folder), None).gcs
    serve_at(port)
    return port


def serve_at(port: int) -> None:
    from ray import serve

    @serve.deployment(ray_actor_options={"num_cpus": 0})
    class Answer:
        async def __call__(self, request) -> str:
            return "served"

    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(Answer.bind(), name="answer")


def answer(port: int) -> str | None:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=2) as reply:
            return reply.read().decode()
    except (OSError, urllib.error.URLError):
        return None


def test_everything_listens_on_loopback_but_a_port_of_each_replica_which_wants_the_token(attached, proxy_port, folder):
    assert answer(proxy_port) == "served"
    found = listening_addresses([each.pid for each in head_processes(folder)] + [os.getpid()])
    assert {attached.ports.gcs, attached.ports.raylet, attached.ports.metrics, proxy_port} <= ports_of(found)
    others = beyond_loopback(found)
    assert {owner.strip() for owner in others.values()} <= {"ray::ServeReplica:answer:Answer"}  # ours closes it, too
    assert all(refuses_strangers(port) for port in ports_of(others))


def refuses_strangers(port: int) -> bool:
    import grpc

    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        with pytest.raises(grpc.RpcError) as refusal:
            channel.unary_unary("/ray.serve.ASGIService/HandleRequest")(b"", timeout=10)
        return refusal.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_the_metrics_of_ray_can_be_scraped(attached):
    with urllib.request.urlopen(f"http://127.0.0.1:{attached.metrics_port}/metrics", timeout=5) as reply:
        assert b"ray_" in reply.read()


@pytest.mark.usefixtures("attached")
def test_attaching_leaves_our_handler_of_sigterm_alone():
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize("part", [Part.RAYLET, Part.GCS])
def test_a_killed_part_is_noticed_and_repaired_and_the_head_serves_again(settings, folder, proxy_port, part, caplog):
    broken = ensure_head(settings)
    os.kill((broken.raylet if part is Part.RAYLET else broken.gcs).pid, signal.SIGKILL)
    wait_for(lambda: check(broken, ("127.0.0.1", proxy_port)).dead, seconds=5)
    health = check(broken, ("127.0.0.1", proxy_port))
    assert part in health.dead
    assert decide(Watch(), health, now=0.0) == (Watch(), Action.RESTART)
    with caplog.at_level(logging.INFO, logger="mqmk"):
        repaired = repair(settings, health)
    assert f"{part} is dead" in caplog.text
    assert (repaired.address, repaired.metrics_port) == (broken.address, broken.metrics_port)
    assert repaired.pid != broken.pid
    attach(repaired)
    serve_at(proxy_port)
    assert answer(proxy_port) == "served"
    assert check(repaired, ("127.0.0.1", proxy_port)).is_healthy
    assert {each.session for each in head_processes(folder)} == {repaired.pid}


def test_a_killed_serve_proxy_is_noticed_and_serve_replaces_it(settings, folder, proxy_port):
    head = ensure_head(settings)
    proxy = next(each for each in head_processes(folder) if "ProxyActor" in arguments(each.pid)[0])
    os.kill(proxy.pid, signal.SIGKILL)
    wait_for(lambda: check(head, ("127.0.0.1", proxy_port)) == HeadHealth(silent=(Part.PROXY,)), seconds=5)
    wait_for(lambda: check(head, ("127.0.0.1", proxy_port)).is_healthy, seconds=PROXY_SECONDS)


@pytest.mark.usefixtures("proxy_port")
def test_stop_ends_what_is_left_of_a_half_dead_head_and_nothing_else(settings, folder):
    head = ensure_head(settings)
    detach()
    reader = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", f"--temp-dir={head.temp_folder}"])
    frozen = [each for each in head_processes(folder) if each.pid != head.pid]
    for each in frozen:
        os.kill(each.pid, signal.SIGSTOP)  # so that they cannot follow their leader by themselves
    os.kill(head.pid, signal.SIGKILL)
    begun = time.monotonic()
    try:
        assert stop_head(folder)
        assert time.monotonic() - begun < 10
        assert not any(map(is_alive, [head.leader, *frozen]))
        assert reader.poll() is None
    finally:
        reader.kill()
        reader.wait()
    assert not head.temp_folder.parent.exists()
    assert not (folder / "head.json").exists()
    assert not stop_head(folder)


def test_a_process_that_got_the_number_of_a_dead_head_is_not_ended(tmp_path):
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    try:
        seen = process(bystander.pid)
        earlier = Process(seen.pid, "ray", seen.session, seen.start_ticks - 1)
        write_record(tmp_path, earlier)
        assert find_head(tmp_path).leader == earlier
        assert head_processes(tmp_path) == []
        assert not stop_head(tmp_path)
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_what_is_left_of_a_dead_head_counts_until_its_ports_are_free(tmp_path):
    for _ in range(5):
        words = ["sh", "-c", '"$@" & wait', "sh", sys.executable, "-c", HOLD_PORT_PROGRAM]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=tmp_path, start_new_session=True) as leader:
            port = int(leader.stdout.readline())
            write_record(tmp_path, process(leader.pid))
            leader.kill()
            leader.wait()
            (orphan,) = head_processes(tmp_path)
            os.kill(orphan.pid, signal.SIGKILL)
            while head_processes(tmp_path):  # its first thread is a zombie while others still end
                pass
            bind_port(port)


def write_record(folder: Path, leader: Process) -> None:
    """A head.json as an earlier head left it."""
    one = {"pid": leader.pid, "name": leader.name, "session": leader.session, "start_ticks": leader.start_ticks}
    record = {"schema": 1, "address": "127.0.0.1:1", "leader": one, "gcs": one, "raylet": one}
    record |= {"ports": {"gcs": 1, "raylet": 2, "metrics": 3}, "ray_version": "2.60.0"}
    record |= {"token_file": "t", "temp_folder": "r", "started_at": "2026-01-01T00:00:00+00:00"}
    (folder / "head.json").write_text(json.dumps(record))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": 2}', '{"schema": 1, "address": "x"}'])
def test_a_broken_record_counts_as_none(tmp_path, text):
    (tmp_path / "head.json").write_text(text)
    assert find_head(tmp_path) is None


def test_a_start_that_fails_says_what_ray_said(tmp_path):
    with pytest.raises(RayError, match="exited at once") as failure:
        ensure_head(RayHeadSettings(tmp_path / "ray", num_cpus=-1))
    assert "nonnegative" in str(failure.value)
    assert head_processes(tmp_path / "ray") == []
    assert not stop_head(tmp_path / "ray")  # and its temporary folder is gone


def test_attaching_to_a_dead_address_fails_within_its_deadline():
    port = choose_ports(RayHeadSettings(Path("/x")), None).gcs
    begun = time.monotonic()
    with pytest.raises(RayError, match="nothing answers"):
        attach(ExternalCluster(f"127.0.0.1:{port}"), deadline_seconds=1)
    assert time.monotonic() - begun < 4


@pytest.mark.parametrize("address", ["somewhere", "host:", ":6379", "ray://host:port"])
def test_an_address_that_is_none_is_refused_with_an_example(address):
    with pytest.raises(RayError, match="HOST:PORT"):
        attach(ExternalCluster(address), deadline_seconds=1)
