"""The doctor finds what does not work, says what to do, and changes nothing."""

import http.server
import json
import os
import shutil
import socket
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.daemons.daemon import upgraded_release
from support.servers.http_server import served

from mqmk.daemon.cli.doctor import doctor as doctor_command
from mqmk.daemon.config.load import load
from mqmk.daemon.config.sections import Config
from mqmk.daemon.errors import DaemonError
from mqmk.daemon.host import doctor, port_checks
from mqmk.daemon.host.lock import DaemonLock, LockOwner
from mqmk.daemon.host.port_checks import TAKEN_OVER
from mqmk.daemon.ports import free_port
from mqmk.daemon.ray_runtime.head import Head, _to_record
from mqmk.daemon.ray_runtime.head_command import Ports
from mqmk.daemon.ray_runtime.processes import process
from mqmk.deploy.serving.telemetry.heartbeat import DEPLOYED
from mqmk.matcher.backbone import load_backbone


def config(folder: Path, **flags: object) -> Config:
    """Defaults with these settings; `__` in a name stands for a dot."""
    chosen = {name.replace("__", "."): str(value) for name, value in flags.items()}
    return load(None, {}, {"state.dir": str(folder / "state"), **chosen}, folder).config


@contextmanager
def answering(path: str, body: bytes, status: int = 200) -> Iterator[int]:
    """A web server on a free port that knows one page."""

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == path else 404)
            self.end_headers()
            self.wfile.write(body if self.path == path else b"")

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


@pytest.fixture
def unused_port() -> int:
    return free_port()


# --- running checks


def test_a_check_that_breaks_is_a_finding_and_the_others_still_run(tmp_path):
    def broken(_config: Config) -> doctor.CheckResult:
        raise DaemonError("no bucket; make one")

    def unforeseen(_config: Config) -> doctor.CheckResult:
        raise KeyError("x")

    checks = {"a": broken, "b": unforeseen, "c": lambda _config: ("ok", "fine", "")}
    first, second, third = doctor.run_checks(config(tmp_path), checks)
    assert first == doctor.Finding("a", "fail", "no bucket; make one")
    assert (second.status, second.what) == ("fail", "KeyError: 'x'")
    assert third == doctor.Finding("c", "ok", "fine")


def test_a_check_that_never_ends_is_a_finding(tmp_path):
    begun = time.monotonic()
    hangs = threading.Event()
    (found,) = doctor.run_checks(config(tmp_path), {"a": lambda _: hangs.wait(60) and ("ok", "", "")}, timeout=0.2)
    hangs.set()
    assert found.what == "no answer within 0.2 s"
    assert time.monotonic() - begun < 10


def test_a_fresh_machine_passes_and_nothing_is_made(tmp_path, unused_port):
    chosen = ["--state", str(tmp_path / "state"), "--set", f"serve.port={unused_port}", "--set", "metrics.port=0"]
    found = CliRunner().invoke(doctor_command, [*chosen, "--json"])
    findings = {finding["name"]: finding for finding in json.loads(found.output)["findings"]}
    assert set(findings) == set(doctor.CHECKS)
    assert [finding for finding in findings.values() if finding["status"] == "fail"] == []
    assert findings["backbone"]["what"].startswith("embedded, 28 px")
    assert found.exit_code == 0
    assert list(tmp_path.iterdir()) == []


def test_a_failure_is_printed_with_what_to_do_and_gives_exit_code_1(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "CHECKS", {"disk": lambda _: ("fail", "0.1 GB free", "make room"),
                                           "ray": lambda _: ("ok", "runs", "")})  # fmt: skip
    found = CliRunner().invoke(doctor_command, ["--state", str(tmp_path)])
    assert found.exit_code == 1
    assert found.output.splitlines() == [
        "fail  disk          0.1 GB free", "                    -> make room", "ok    ray           runs"
    ]  # fmt: skip


def test_a_warning_alone_gives_exit_code_0(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "CHECKS", {"disk": lambda _: ("warn", "2 GB free", "make room")})
    assert CliRunner().invoke(doctor_command, ["--state", str(tmp_path)]).exit_code == 0


# --- the machine


def test_a_package_that_is_too_old_or_missing_is_named(tmp_path, monkeypatch):
    wanted = ["click>=99", "no-such-package>=1", "rich>=13", "no-such-extra; extra == 'dev'"]
    monkeypatch.setattr("importlib.metadata.requires", lambda _: wanted)
    status, what, to_do = doctor.versions(config(tmp_path))
    assert status == "fail"
    assert what.endswith("is not >=99; no-such-package is missing")
    assert to_do


@pytest.mark.parametrize("flags", [{"ray__trainer_gpus": 99}, {"serve__replicas": 9999}, {"serve__num_gpus": 99.5}])
def test_more_than_the_machine_has_is_refused(tmp_path, flags):
    assert doctor.devices(config(tmp_path, **flags))[0] == "fail"


def test_a_cluster_may_have_more_than_this_machine(tmp_path):
    assert doctor.devices(config(tmp_path, ray__trainer_gpus=99, ray__address="head:6379"))[0] == "ok"


def test_little_disk_is_a_warning_and_hardly_any_a_failure(tmp_path, monkeypatch):
    for free, status in ((50 * 2**30, "ok"), (5 * 2**30, "warn"), (2**29, "fail")):
        monkeypatch.setattr("shutil.disk_usage", lambda _, free=free: type("Usage", (), {"free": free}))
        assert doctor.disk(config(tmp_path))[0] == status


def test_a_state_folder_below_a_file_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    status, what, to_do = doctor.state_folder(config(tmp_path, state__dir=tmp_path / "file" / "state"))
    assert (status, what) == ("fail", f"{tmp_path / 'file'} is not writable: Not a directory")
    assert "state.dir" in to_do


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_state_folder_of_somebody_else_cannot_be_written(tmp_path):
    (tmp_path / "state").mkdir(mode=0o500)
    assert doctor.state_folder(config(tmp_path))[0] == "fail"


def test_a_state_folder_that_others_may_write_is_a_warning(tmp_path):
    (tmp_path / "state").mkdir()
    (tmp_path / "state").chmod(0o777)
    assert doctor.state_folder(config(tmp_path))[::2] == ("warn", f"chmod go-w {tmp_path / 'state'}")
    (tmp_path / "state").chmod(0o755)
    assert doctor.state_folder(config(tmp_path))[0] == "ok"


# --- ports


def test_a_free_port_is_fine(tmp_path, unused_port):
    assert doctor.serve_port(config(tmp_path, serve__port=unused_port))[:2] == (
        "ok",
        f"127.0.0.1:{unused_port} is free",
    )


@pytest.mark.parametrize("keys", [(), ("a key",)], ids=["open", "asks for a key"])
def test_a_port_with_the_service_of_another_state_directory_is_named(tmp_path, keys):
    with served(load_backbone(), upgraded_release() / "pools", *keys) as url:
        port = int(url.rpartition(":")[2])
        status, what, to_do = doctor.serve_port(config(tmp_path, serve__port=port))
        assert (status, what) == ("fail", f"the service of another state directory listens at 127.0.0.1:{port}")
        assert "`mqmk-daemon stop --state THAT`" in to_do
        elsewhere = config(tmp_path, serve__port=port, ray__address="head:6379")
        assert doctor.serve_port(elsewhere)[:2] == ("ok", f"127.0.0.1:{port} is ours")


def living_head(folder: Path) -> Head:
    """This process in the place of `ray start`: whoever looks only asks whether it lives."""
    me = process(os.getpid())
    assert me
    return Head("127.0.0.1:1", me, me, me, Ports(1, 2, 3), folder, folder, datetime.now(UTC), "2")


def test_a_port_with_the_service_of_an_earlier_daemon_will_be_taken_over(tmp_path, monkeypatch):
    monkeypatch.setattr(port_checks, "ANSWER_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        found = config(tmp_path, serve__port=port)
        replica_folder = found.state.dir / "replicas"
        for folder in (found.ray_folder, replica_folder):
            folder.mkdir(parents=True)
        (found.ray_folder / "head.json").write_text(json.dumps(_to_record(living_head(tmp_path))))
        (replica_folder / DEPLOYED).write_text(json.dumps({"settings": "x", "url": f"http://127.0.0.1:{port}"}))
        assert doctor.serve_port(found) == ("ok", f"127.0.0.1:{port} is ours: {TAKEN_OVER}", "")
        lock = DaemonLock(found.state.dir).take()
        assert doctor.serve_port(found) == ("ok", f"127.0.0.1:{port} is ours", "")
        lock.release()
        (replica_folder / DEPLOYED).write_text(json.dumps({"settings": "x", "url": "http://127.0.0.1:1"}))
        assert doctor.serve_port(found)[0] == "fail", "it serves, but elsewhere"


def test_a_port_with_our_own_metrics_is_fine_and_another_daemons_is_not(tmp_path):
    with answering("/metrics", b"mqmk_tasks 3\n") as port:
        found = config(tmp_path, metrics__port=port)
        assert doctor.metrics_port(found)[1] == f"the daemon of another state directory listens at 127.0.0.1:{port}"
        lock = DaemonLock(found.state.dir).take()
        lock.write_owner(LockOwner(os.getpid(), 0.0, f"http://127.0.0.1:{port}/metrics"))
        assert doctor.metrics_port(found)[:2] == ("ok", f"127.0.0.1:{port} is ours")
        lock.release()


def test_a_port_of_another_program_is_named_with_a_way_out(tmp_path):
    with answering("/metrics", b"node_load1 1\n") as port:
        status, what, to_do = doctor.metrics_port(config(tmp_path, metrics__port=port))
    assert (status, what) == ("fail", f"another program listens at 127.0.0.1:{port}")
    assert "--set metrics.port=" in to_do


def test_a_port_whose_owner_speaks_no_http_is_not_ours(tmp_path, monkeypatch):
    monkeypatch.setattr(port_checks, "ANSWER_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert doctor.serve_port(config(tmp_path, serve__port=silent.getsockname()[1]))[0] == "fail"


def test_an_address_that_is_not_of_this_machine_is_refused(tmp_path):
    found = doctor.serve_port(config(tmp_path, serve__host="192.0.2.1", serve__open="true"))
    assert found[0] == "fail"
    assert "serve.host" in found[2]


def test_no_port_is_needed_where_nothing_is_served(tmp_path):
    with answering("/", b"") as port:
        for flags in ({"serve__enabled": "no"}, {"ray__address": "none"}):
            assert doctor.serve_port(config(tmp_path, serve__port=port, **flags))[0] == "ok"


@pytest.mark.parametrize(("flags", "status"), [
    ({}, "ok"), ({"serve__host": "0.0.0.0", "serve__open": "yes"}, "warn"), ({"metrics__host": "0.0.0.0"}, "warn"),
    ({"serve__host": "0.0.0.0", "serve__api_keys": "/keys"}, "ok"),
])  # fmt: skip
def test_what_is_open_to_the_network_is_said(tmp_path, flags, status):
    assert doctor.exposure(config(tmp_path, **flags))[0] == status


# --- the parts


def test_a_bucket_folder_that_can_be_listed_is_fine(tmp_path):
    (tmp_path / "data" / "tasks").mkdir(parents=True)
    assert doctor.bucket(config(tmp_path, bucket__url=tmp_path / "data"))[0] == "ok"


def test_a_bucket_folder_that_is_not_there_is_a_warning_with_the_command(tmp_path):
    found = doctor.bucket(config(tmp_path, bucket__url=tmp_path / "data"))
    assert (found[0], found[2]) == ("warn", f"mkdir -p {tmp_path / 'data'}/tasks, or correct bucket.url")


def test_the_pool_store_is_the_folder_or_what_s3_says(tmp_path, s3_environment, monkeypatch):
    assert doctor.pool_store(config(tmp_path))[1] == f"the folder {tmp_path / 'state' / 'pools'}"
    remote = config(tmp_path, pools__url=s3_environment.url())
    assert doctor.pool_store(remote)[1].endswith("can be read; no version is current there")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    status, what, to_do = doctor.pool_store(remote)
    assert status == "fail" and "SignatureDoesNotMatch" in what and "pools.url" in to_do


def test_a_card_that_cannot_be_read_is_named_with_a_way_out(tmp_path):
    chosen = config(tmp_path)
    shutil.copytree(upgraded_release() / "pools", chosen.pools_folder)
    assert doctor.pool_store(chosen)[0] == "ok"
    old, current = sorted((chosen.pools_folder / "versions").iterdir())
    for card, is_current in ((current, True), (old, False)):
        card.write_bytes(b"cut")
        status, what, to_do = doctor.pool_store(chosen)
        assert status == "warn" and f"{card} cannot be read: wrong sha256" in what
        assert "mqmk-daemon doctor --rebuild" in to_do and (f"rm {card}" in to_do) is not is_current
    assert "and 1 more" in what


def test_a_bucket_that_cannot_be_reached_is_a_failure(tmp_path, monkeypatch, unused_port):
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{unused_port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "somebody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
    (found,) = doctor.run_checks(config(tmp_path, bucket__url="s3://images"), {"bucket": doctor.bucket})
    assert found.status == "fail"
    assert found.what.startswith("s3://images: ")
    assert "AWS_ENDPOINT_URL" in found.to_do
    assert "hunter2" not in found.what


def test_a_backbone_that_cannot_be_loaded_is_a_failure(tmp_path):
    chosen = config(tmp_path, backbone__name="vit_tiny_patch16_224", backbone__weights="/no.safetensors")
    (found,) = doctor.run_checks(chosen, {"backbone": doctor.backbone})
    assert (found.status, found.what) == ("fail", "/no.safetensors: no such file")


def test_a_ray_that_answers_is_fine_and_one_that_does_not_is_a_failure(tmp_path, unused_port):
    chosen = config(tmp_path)
    assert doctor.ray(chosen)[0] == "ok"  # not running yet
    chosen.ray_folder.mkdir(parents=True)
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"
        chosen.ray_head_file.write_text(json.dumps({"address": address}))
        assert doctor.ray(chosen)[:2] == ("ok", f"{address} answers")
        assert doctor.ray(config(tmp_path, ray__address=address))[0] == "ok"
        assert doctor.ray(config(tmp_path, ray__address=f"ray://{address}"))[0] == "ok"
    assert doctor.ray(config(tmp_path, ray__address=f"127.0.0.1:{unused_port}"))[0] == "fail"
    status, what, to_do = doctor.ray(chosen)
    assert (status, what) == ("fail", f"{address} does not answer: Connection refused")
    assert "mqmk-daemon stop" in to_do


@pytest.mark.parametrize("text", ["", "[]", "{}"])
def test_a_ray_head_file_that_cannot_be_understood_is_a_failure(tmp_path, text):
    chosen = config(tmp_path)
    chosen.ray_folder.mkdir(parents=True)
    chosen.ray_head_file.write_text(text)
    assert doctor.ray(chosen)[0] == "fail"


def test_an_mlflow_file_is_opened_and_not_changed(tmp_path):
    file = tmp_path / "mlflow.db"
    chosen = config(tmp_path, mlflow__tracking_uri=f"sqlite:///{file}")
    assert doctor.mlflow(chosen)[:2] == ("ok", f"{file} does not exist yet")
    connection = sqlite3.connect(file)
    connection.execute("CREATE TABLE runs (id)")
    connection.close()
    before = file.read_bytes()
    assert doctor.mlflow(chosen)[:2] == ("ok", str(file))
    assert file.read_bytes() == before
    file.write_text("no database " * 100)
    assert doctor.mlflow(chosen)[:2] == ("fail", f"{file}: file is not a database")


def test_an_mlflow_server_is_asked_for_its_health(tmp_path, unused_port):
    with answering("/health", b"OK") as port:
        assert doctor.mlflow(config(tmp_path, mlflow__tracking_uri=f"http://127.0.0.1:{port}"))[0] == "ok"
    with answering("/health", b"", status=401) as port:
        status, what, to_do = doctor.mlflow(config(tmp_path, mlflow__tracking_uri=f"http://127.0.0.1:{port}/"))
    assert (status, what) == ("fail", f"http://127.0.0.1:{port}/ answers 401 Unauthorized")
    assert "MLFLOW_TRACKING_USERNAME" in to_do
    assert doctor.mlflow(config(tmp_path, mlflow__tracking_uri=f"http://127.0.0.1:{unused_port}"))[0] == "fail"


def test_a_database_that_start_would_refuse_is_refused_with_the_way_to_use_it_and_without_its_password(tmp_path):
    found = doctor.mlflow(config(tmp_path, mlflow__tracking_uri="postgresql://me:hunter2@127.0.0.1/mlflow"))
    assert found[0] == "fail" and "mlflow server --backend-store-uri" in found[2]
    assert "hunter2" not in " ".join(found)


def test_mlflow_may_be_off(tmp_path):
    assert doctor.mlflow(config(tmp_path, mlflow__enabled="no", mlflow__tracking_uri="http://192.0.2.1"))[0] == "ok"
