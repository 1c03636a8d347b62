"""Whatever becomes of copies to S3 and MLflow, commands are answered and signals obeyed."""

import os
import shutil
import socket
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from support.daemons.daemon import RELEASED
from support.daemons.running_daemon import RunningDaemon
from support.flaky_proxy import FlakyProxy
from support.servers.mlflow_servers import mlflow_server

from mqmk.daemon.pipeline import outbound
from mqmk.daemon.pipeline.outbound import OutboundThread

FULL = os.environ.get("FAULT_TEST") == "full"


class Blocked:
    """A server that swallows what it is sent."""

    def __init__(self) -> None:
        self.reached, self.free = threading.Event(), threading.Event()

    def catch_up(self) -> None:
        self.reached.set()
        self.free.wait(60)


def test_the_end_waits_only_so_long_for_a_copy_that_is_under_way(monkeypatch) -> None:
    monkeypatch.setattr(outbound, "STOP_SECONDS", 0.1)
    blocked = Blocked()
    thread = OutboundThread(blocked)
    thread.start()
    assert blocked.reached.wait(5) and not thread.stop()
    blocked.free.set()
    assert thread.stop()


@pytest.mark.parametrize("error", [sqlite3.OperationalError("database is locked"), KeyError("digest")])
def test_a_copy_that_fails_is_tried_again(monkeypatch, error) -> None:
    monkeypatch.setattr(outbound, "POLL_SECONDS", 0.01)

    class Failing(Blocked):
        tries = 0

        def catch_up(self) -> None:
            self.tries += 1
            if self.tries < 3:
                raise error
            self.reached.set()

    failing = Failing()
    thread = OutboundThread(failing)
    thread.start()
    assert failing.reached.wait(5) and thread.stop()


def test_an_end_before_the_start_is_an_end() -> None:
    assert OutboundThread(Blocked()).stop()


@contextmanager
def silent(_: Path) -> Iterator[str]:
    """Connections are made, and nothing is ever said."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@contextmanager
def slow(folder: Path) -> Iterator[str]:
    """A real server behind a line of far less than 1 MB/s."""
    with (
        mlflow_server(folder, f"sqlite:///{folder / 'mlflow.db'}") as url,
        FlakyProxy(int(url.rpartition(":")[2]), {"slow": 1.0}) as proxy,
    ):
        yield proxy.endpoint


@pytest.mark.parametrize(
    "server",
    [silent, pytest.param(slow, marks=pytest.mark.skipif(not FULL, reason="`make fault-test`: a server of MLflow"))],
)
def test_rollback_is_answered_in_two_seconds_and_a_signal_handled_whatever_mlflow_does(server, tmp_path: Path) -> None:
    shutil.copytree(RELEASED, tmp_path / "state")
    with server(tmp_path) as url:
        settings = {"ray.address": "none", "mlflow.tracking_uri": url, "metrics.port": "0"}
        product = RunningDaemon(tmp_path, settings)
        product.start()
        product.wait_for(lambda: "daemon.started" in product.log, 60, "start")
        time.sleep(2)  # it is in the middle of recording two versions
        for number in ("1", "2"):
            product.run("rollback", number, "--wait", "20")
        asked = time.monotonic()
        assert product.terminate() == 0
        took = time.monotonic() - asked
    with closing(sqlite3.connect(tmp_path / "state" / "ledger.sqlite")) as db:
        asked_at = [row[0] for row in db.execute("SELECT at FROM commands ORDER BY id")]
        told_at = [row[0] for row in db.execute("SELECT at FROM events WHERE event = 'command.rollback' ORDER BY at")]
        assert db.execute("SELECT sum(recorded) FROM versions").fetchone()[0] < 2, "the server was not slow enough"
    assert max(told - asked for told, asked in zip(told_at, asked_at, strict=True)) < 2, product.log[-2000:]
    assert took < 10, "systemd kills it after a while"
