"""When a Ray that is not well is restarted, and what counts as an answer; the real head is in test_ray_head."""

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from mqmk.daemon.ray_runtime.attach import AbortCheck, GivenUpError, run_until
from mqmk.daemon.ray_runtime.head import Head
from mqmk.daemon.ray_runtime.head_command import Ports
from mqmk.daemon.ray_runtime.probe import PREFACE, SETTINGS_FRAME, speaks_grpc, speaks_http
from mqmk.daemon.ray_runtime.processes import process
from mqmk.daemon.ray_runtime.watchdog import (
    API_SECONDS,
    CLUSTER_SECONDS,
    PROXY_SECONDS,
    SILENCE_SECONDS,
    Action,
    ClusterCheck,
    HeadHealth,
    Part,
    Watch,
    check,
    decide,
)


def test_only_lasting_silence_leads_to_a_restart():
    silent = HeadHealth(silent=(Part.GCS, Part.PROXY))
    watch, action = decide(Watch(), silent, now=100.0)
    assert action is Action.WAIT
    assert decide(watch, silent, now=100.0 + SILENCE_SECONDS)[1] is Action.RESTART
    healed, action = decide(watch, HeadHealth(), now=110.0)
    assert (healed, action) == (Watch(), Action.NONE)
    assert decide(healed, silent, now=200.0)[1] is Action.WAIT


def test_a_proxy_that_serve_does_not_replace_costs_serve_a_restart_and_never_the_head():
    silent = HeadHealth(silent=(Part.PROXY,))
    watch, action = decide(Watch(), silent, now=0.0)
    assert action is Action.WAIT
    assert decide(watch, silent, now=PROXY_SECONDS - 1)[1] is Action.WAIT
    assert decide(watch, silent, now=PROXY_SECONDS) == (Watch(), Action.RESTART_SERVE)


def test_slow_http_restarts_nothing_however_long_it_takes_but_is_reported_in_the_end():
    slow, watch = HeadHealth(silent=(Part.HTTP,)), Watch()
    actions = []
    for now in range(0, 3600, 2):
        watch, action = decide(watch, slow, float(now))
        actions.append(action)
    assert {*actions[: int(PROXY_SECONDS) // 2]} == {Action.NONE}
    assert {*actions[int(PROXY_SECONDS) // 2 :]} == {Action.WAIT}
    assert slow.answers, "one can attach and deploy"


def test_a_proxy_that_was_slow_before_it_went_gets_its_whole_time():
    watch, _ = decide(Watch(), HeadHealth(silent=(Part.HTTP,)), now=0.0)
    gone = HeadHealth(silent=(Part.PROXY,))
    watch, action = decide(watch, gone, now=PROXY_SECONDS + 1)
    assert action is Action.WAIT
    assert decide(watch, gone, now=2 * PROXY_SECONDS + 1)[1] is Action.RESTART_SERVE


def test_health_is_said_in_a_sentence():
    assert str(HeadHealth()) == "Ray is healthy"
    assert str(HeadHealth((Part.RAYLET,), (Part.PROXY,))) == "raylet is dead, Serve proxy does not answer"


def test_a_listener_that_says_nothing_does_not_count_as_answering():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        assert not speaks_grpc(port, timeout=0.2)
        assert not speaks_http("127.0.0.1", port, timeout=0.2)


class Answering(BaseHTTPRequestHandler):
    """As Serve's proxy answers."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/-/healthz" else 404)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing."""


class HTTPServer6(HTTPServer):
    address_family = socket.AF_INET6


@contextmanager
def proxy(host: str) -> Iterator[tuple[str, int]]:
    """An HTTP server at one address and at no other."""
    try:
        server = (HTTPServer6 if ":" in host else HTTPServer)((host, 0), Answering)
    except OSError:
        pytest.skip(f"this machine has no address {host}")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield host, server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def grpc_server() -> Iterator[int]:
    """Greets as a gRPC server does."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                connection, _ = server.accept()
                with connection:
                    if not connection.recv(len(PREFACE)):
                        return
                    connection.sendall(bytes([0, 0, 0, SETTINGS_FRAME, 0, 0, 0, 0, 0]))

        thread = threading.Thread(target=serve)
        thread.start()
        yield (port := server.getsockname()[1])
        socket.create_connection(("127.0.0.1", port)).close()
        thread.join()


def a_head(port: int) -> Head:
    me = process(os.getpid())
    ports = Ports(port, port, 0)
    return Head(f"127.0.0.1:{port}", me, me, me, ports, Path(), Path(), datetime.now(UTC), ray_version="")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1"])
def test_the_proxy_is_asked_at_the_address_where_it_listens(host):
    with grpc_server() as port:
        with proxy(host) as address:
            assert check(a_head(port), address).is_healthy
        assert check(a_head(port), address) == HeadHealth(silent=(Part.PROXY,)), "nobody listens there"


def test_a_proxy_that_accepts_and_says_nothing_is_slow_and_not_gone():
    with grpc_server() as port, socket.create_server(("127.0.0.2", 0)) as busy:
        assert check(a_head(port), busy.getsockname(), timeout=0.2) == HeadHealth(silent=(Part.HTTP,))


def test_somebodys_cluster_is_watched_without_waiting_for_it():
    hang, answers = threading.Event(), []

    def ask() -> object:
        answers.append(1)
        assert hang.wait(20)
        raise OSError("it went away")

    with grpc_server() as port:
        cluster = ClusterCheck(f"127.0.0.1:{port}", ask)
        assert cluster.check(0.0).is_healthy, "it was asked, and may take its time"
        assert cluster.check(API_SECONDS - 1).is_healthy
        late = cluster.check(API_SECONDS + 1)
        assert str(late) == "Ray cluster does not answer" and not late.answers
        watch, action = decide(Watch(), late, now=20.0)
        assert action is Action.WAIT
        assert decide(watch, late, now=20.0 + CLUSTER_SECONDS)[1] is Action.RESTART
        hang.set()
        for now in range(100):
            if len(answers) > 1:
                break
            cluster.check(30.0 + now)
            time.sleep(0.02)
        assert len(answers) > 1, "it is asked again after an error"
    assert cluster.check(200.0).silent == (Part.CLUSTER,), "without a GCS there is nothing to ask"


def test_a_cluster_that_answers_is_well_and_asked_again_and_again():
    asked = threading.Semaphore(0)
    with grpc_server() as port:
        cluster = ClusterCheck(f"127.0.0.1:{port}", asked.release)
        for now in range(6):
            assert cluster.check(float(now)).is_healthy
            time.sleep(0.05)
    assert [asked.acquire(blocking=False) for _ in range(3)] == [True] * 3


def test_a_call_that_was_given_up_ends_before_its_next_step_and_leaves_nothing_behind():
    woken, ended, steps = threading.Event(), threading.Event(), []

    def work(check_abort: AbortCheck) -> None:
        try:
            steps.append("first")
            woken.wait(20)  # as a call to Ray that wakes up on the next connection
            check_abort()
            steps.append("second")
        except GivenUpError:
            steps.append("given up")
            raise
        finally:
            ended.set()

    with pytest.raises(TimeoutError, match="it died"):
        run_until(work, give_up=lambda: "it died", poll_seconds=0.01)
    woken.set()
    assert ended.wait(20)
    assert steps == ["first", "given up"]


def test_what_a_call_returns_or_raises_arrives():
    assert run_until(lambda _: 7, give_up=lambda: None, poll_seconds=0.01) == 7
    with pytest.raises(TimeoutError, match="of its own"):
        run_until(lambda _: (_ for _ in ()).throw(TimeoutError("of its own")), lambda: None, poll_seconds=0.01)
