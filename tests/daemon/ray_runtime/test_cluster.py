"""What the daemon does about Ray while there is none; tests/programs/chaos/run.py kills a real one."""

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from signal import SIGKILL, SIGSTOP, SIGTERM
from typing import TYPE_CHECKING
from urllib.request import urlopen

import pytest
from click.testing import CliRunner
from support.daemons.daemon import daemon, small_config
from support.daemons.running_daemon import RunningDaemon

from mqmk.daemon.bucket.scanner import Bucket
from mqmk.daemon.cli.main import cli
from mqmk.daemon.config.sections import Pools, Ray, S3Url
from mqmk.daemon.errors import RayError
from mqmk.daemon.host import lock
from mqmk.daemon.host.lock import LockOwner
from mqmk.daemon.jobs import Build, Learn, Validate
from mqmk.daemon.ledger.ledger import Ledger
from mqmk.daemon.loop import DaemonLoop
from mqmk.daemon.metrics.server import serve_metrics
from mqmk.daemon.ports import free_port
from mqmk.daemon.ray_runtime.head import find_head, head_processes, stop_head
from mqmk.daemon.ray_runtime.head_command import temp_folder
from mqmk.daemon.ray_runtime.processes import process
from mqmk.daemon.ray_runtime.watchdog import HeadHealth
from mqmk.daemon.workers.ray_pool import RayWorkers, WarmWorkers
from mqmk.deploy.serving.settings import ServeSettings, ServiceSpec
from mqmk.deploy.serving.telemetry.heartbeat import ReplicaStatus, StatusFile

if TYPE_CHECKING:
    from mqmk.daemon.ray_runtime.cluster import RayCluster

pytestmark = pytest.mark.filterwarnings("ignore:Using extra keyword arguments on `Field`")  # importing ray.serve


def test_between_two_rays_there_is_room_for_no_job_and_none_is_started_inside_the_daemon(tmp_path: Path) -> None:
    import ray

    assert not ray.is_initialized()
    workers = RayWorkers(small_config(tmp_path), trainers=2)
    assert not any(workers.has_capacity(kind) for kind in (Validate, Learn, Build))
    assert workers.poll() == [] and not ray.is_initialized()


@dataclass
class TroubledGround:
    """A Ray that cannot be mended."""

    metrics_target: str | None = None
    tended: int = 0

    def reconcile(self) -> None:
        self.tended += 1
        raise RayError("it does not start")


def test_ray_is_looked_after_in_a_long_pause_too_and_its_trouble_ends_nothing(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    config = replace(config, bucket=replace(config.bucket, poll_seconds=60.0, max_poll_seconds=60.0),
                     metrics=replace(config.metrics, port=0))  # fmt: skip
    parts, ground = daemon(config), TroubledGround()
    metrics = serve_metrics(config, config.ledger_file)
    bucket = Bucket(config.bucket_url, settle_seconds=60.0)
    service = DaemonLoop(config, parts.ledger, bucket, ground, parts.orchestrator, metrics)
    thread = threading.Thread(target=service.run)
    thread.start()
    try:
        deadline = time.monotonic() + 20
        while ground.tended < 3 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert ground.tended >= 3 and thread.is_alive()
    finally:
        service.stopping = True
        thread.join(30)
        metrics.close()
        bucket.close()
        parts.close()


def a_proxy_dies(_: Path) -> None:
    raise RuntimeError("a proxy that was killed while it started")


def the_gcs_dies(ray_folder: Path) -> None:
    os.kill(find_head(ray_folder).gcs.pid, SIGKILL)
    threading.Event().wait()  # as Ray's calls do then


def the_gcs_hangs(ray_folder: Path) -> None:
    os.kill(find_head(ray_folder).gcs.pid, SIGSTOP)
    threading.Event().wait()


@pytest.mark.parametrize(
    ("trouble", "said"),
    [
        (a_proxy_dies, "killed while it started"),
        (the_gcs_dies, "GCS is dead"),
        (the_gcs_hangs, "GCS does not answer"),
    ],
)
def test_a_service_that_dies_while_it_starts_for_the_first_time_is_started_again(
    tmp_path: Path, trouble: Callable[[Path], None], said: str
) -> None:
    from mqmk.daemon.ray_runtime.cluster import RayCluster

    config, deployed = replace(small_config(tmp_path), ray=Ray(num_cpus=1), serve=ServeSettings(port=free_port())), []

    def deploy(spec: ServiceSpec, **_: object) -> None:
        deployed.append(spec)
        if len(deployed) == 1:
            trouble(config.ray_folder)

    ledger = Ledger(config.ledger_file)
    cluster = RayCluster(config, ledger, deploy=deploy)
    try:
        cluster.start()
        assert [(each.up, said in each.message) for each in ledger.health()] == [(False, True)]
        assert not cluster.workers.has_capacity(Validate)
        deadline = time.monotonic() + 120
        while len(deployed) < 2 and time.monotonic() < deadline:
            cluster.reconcile()
            time.sleep(0.1)
        assert len(deployed) == 2 and cluster.workers.has_capacity(Validate)
        assert [each.up for each in ledger.health()] == [True]
    finally:
        cluster.stop()
        stop_head(config.ray_folder)
        ledger.close()


def test_nobody_speaks_to_ray_while_there_is_none_lest_another_one_is_started_inside_the_daemon(tmp_path: Path) -> None:
    import ray

    from mqmk.daemon.ray_runtime.cluster import RayCluster

    config = replace(small_config(tmp_path), ray=Ray(address="127.0.0.1:1"), pools=Pools(url=S3Url("s3://none/here")))
    ledger = Ledger(config.ledger_file)
    cluster = RayCluster(config, ledger)
    cluster._reconnect = lambda *_: None
    cluster.reconcile()
    assert not ray.is_initialized()
    ledger.close()


@dataclass
class Outside:
    """Somebody's cluster, as far as the daemon can tell; nothing of Ray runs."""

    cluster: "RayCluster"
    ledger: Ledger
    deployed: list[dict[str, object]]
    nodes: Callable[[], object]
    gcs: bool = True
    now: float = 1000.0

    def reconcile(self, seconds: float) -> None:
        """Let so much time pass, look, and let the thread that asks come back."""
        self.now += seconds
        self.cluster.reconcile()
        time.sleep(0.02)

    @property
    def health(self) -> tuple[bool, str]:
        (found,) = self.ledger.health()
        return found.up, found.message


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Outside]:
    from mqmk.daemon.ray_runtime import cluster, watchdog

    config = replace(small_config(tmp_path), ray=Ray(address="127.0.0.1:1"))
    ledger, deployed = Ledger(config.ledger_file), []
    made = cluster.RayCluster(config, ledger, deploy=lambda _, **given: deployed.append(given))
    found = Outside(made, ledger, deployed, lambda: None)
    monkeypatch.setattr(cluster, "attach", lambda *_, **__: None)
    monkeypatch.setattr(cluster, "detach", lambda: None)
    monkeypatch.setattr(cluster.ray, "nodes", lambda: found.nodes())
    monkeypatch.setattr(cluster.time, "monotonic", lambda: found.now)
    monkeypatch.setattr(watchdog, "speaks_grpc", lambda *_, **__: found.gcs)
    monkeypatch.setattr(made.workers, "warm_up", lambda: WarmWorkers(1, object(), object()))
    made.start()
    yield found
    ledger.close()


def test_a_head_that_cannot_be_started_is_said_as_it_is_and_tried_again_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mqmk.daemon.ray_runtime import cluster

    tried = []

    def ensure_head(_: object) -> None:
        tried.append(1)
        raise RayError("the Ray head ended at once") if len(tried) == 1 else OSError("no room")

    monkeypatch.setattr(cluster, "ensure_head", ensure_head)
    monkeypatch.setattr(cluster, "detach", lambda: None)
    config = replace(small_config(tmp_path), ray=Ray())
    ledger = Ledger(config.ledger_file)
    with pytest.raises(RayError, match="ended at once"):
        cluster.RayCluster(config, ledger).start()
    troubled = cluster.RayCluster(config, ledger)
    troubled.start()
    troubled.reconcile()
    assert len(tried) == 3
    assert [each.message for each in ledger.health()] == ["OSError: no room"]
    ledger.close()


@pytest.mark.parametrize(
    ("host", "address"),
    [("127.0.0.1", "127.0.0.1"), ("192.168.1.10", "192.168.1.10"), ("0.0.0.0", "127.0.0.1"), ("::", "::1")],
)
def test_the_proxy_of_our_own_ray_is_probed_where_it_is_configured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str, address: str
) -> None:
    from mqmk.daemon.ray_runtime import cluster

    probed = []
    monkeypatch.setattr(cluster, "check", lambda _, proxy: probed.append(proxy) or HeadHealth())
    settings = ServeSettings(host=host, port=8123, open=True, replicas=3)
    config = replace(small_config(tmp_path), ray=Ray(), serve=settings)
    ledger, now = Ledger(config.ledger_file), time.monotonic()
    made = cluster.RayCluster(config, ledger, head=object(), _connected=True, _served_at=now)  # type: ignore[arg-type]
    assert made.wanted_replicas() == 3
    made.reconcile()
    StatusFile(cluster.service_spec(config).replicas_folder, "r").write(ReplicaStatus("r", os.getpid(), ready=True))
    made._checked_at = 0.0
    made.reconcile()
    ledger.close()
    assert probed == [None, (address, 8123)], "before there is a replica, nobody need answer"


def test_on_somebodys_cluster_the_service_is_deployed_again_when_no_replica_lives(outside: Outside) -> None:
    assert len(outside.deployed) == 1 and outside.deployed[0]["ours"] is False
    for _ in range(10):
        outside.reconcile(5)
    assert len(outside.deployed) == 1, "replicas may take their time"
    for _ in range(5):
        outside.reconcile(5)
    assert len(outside.deployed) == 2 and outside.deployed[1]["restart"] is False


def test_a_cluster_that_goes_away_is_reported_left_and_joined_again(outside: Outside) -> None:
    outside.reconcile(5)
    assert outside.health == (True, "")

    def gone() -> object:
        raise ConnectionError("no GCS")

    outside.nodes = gone
    for _ in range(3):
        outside.reconcile(5)
    assert outside.health == (False, "Ray cluster does not answer")
    outside.gcs = False
    for _ in range(8):
        outside.reconcile(5)
    assert not outside.cluster._connected and not outside.cluster.workers._idle, (
        "it was left before Ray ends this process"
    )
    outside.nodes, outside.gcs = lambda: None, True
    for _ in range(3):
        outside.reconcile(5)
    assert outside.health == (True, "") and outside.cluster._connected


def test_what_was_given_up_neither_hires_workers_nor_deploys_when_it_wakes_up(
    outside: Outside, monkeypatch: pytest.MonkeyPatch
) -> None:
    woken, hired = threading.Event(), threading.Event()

    def warm_up() -> WarmWorkers:
        woken.wait(20)  # as a call to a Ray that died
        hired.set()
        return WarmWorkers(9, object(), object())

    monkeypatch.setattr(outside.cluster.workers, "warm_up", warm_up)
    monkeypatch.setattr(outside.cluster, "_give_up_reason", lambda: lambda: "GCS is dead")
    outside.cluster.start()
    assert outside.health == (False, "TimeoutError: GCS is dead")
    woken.set()
    assert hired.wait(20)
    time.sleep(0.1)
    workers = outside.cluster.workers
    assert (workers._closed, workers._idle, workers.trainers) == (True, [], 1)
    assert len(outside.deployed) == 1, "by the start before it"


def test_an_error_without_text_ends_a_job_and_not_the_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mqmk.daemon.workers import ray_pool

    workers = RayWorkers(small_config(tmp_path), trainers=1)
    job = Validate(1, 1, "birds", "birds", None, {})
    workers._running = [ray_pool._RunningJob(job, object(), object())]

    def lost(_: object) -> object:
        raise ray_pool.ray.exceptions.RayError("")

    monkeypatch.setattr(ray_pool.ray, "wait", lambda found, **_: (found, []))
    monkeypatch.setattr(ray_pool.ray, "get", lost)
    monkeypatch.setattr(ray_pool.ray, "kill", lambda _: None)
    (news,) = workers.poll()
    assert str(news.error) == "the worker of birds died: RayError"


def test_stop_ends_serving_even_if_the_daemon_does_not_end(tmp_path: Path) -> None:
    daemon = RunningDaemon(tmp_path)
    (daemon.state / "ray").mkdir(parents=True)
    Ledger(daemon.state / "ledger.sqlite").close()
    hangs = (
        "import signal, sys, time; from pathlib import Path; from mqmk.daemon.host.lock import DaemonLock\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); DaemonLock(Path(sys.argv[1])).take(); print(1, flush=True)\n"
        "time.sleep(60)"
    )
    hung = subprocess.Popen([sys.executable, "-c", hangs, str(daemon.state)], stdout=subprocess.PIPE)
    sleeps = [sys.executable, "-c", "import time; time.sleep(60)", "--head"]
    head = subprocess.Popen([*sleeps, f"--temp-dir={temp_folder(daemon.state / 'ray')}"], start_new_session=True)
    try:
        assert hung.stdout and hung.stdout.readline() == b"1\n"
        kept = daemon.run("stop", "--seconds", "0.2", "--keep-serving", check=False)
        assert kept.returncode == 1 and head.poll() is None
        done = daemon.run("stop", "--seconds", "0.2", check=False)
        assert done.returncode == 1 and f"`kill -9 {hung.pid}` is safe" in done.stderr
        assert "serving stopped" in done.stdout and head.wait(10) is not None
    finally:
        for process in (hung, head):
            process.kill()
            process.wait()
        hung.stdout.close()


def test_stop_does_not_mind_a_daemon_that_ends_by_itself(tmp_path: Path, monkeypatch) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    owners = [LockOwner(gone.pid, 0.0), None]
    monkeypatch.setattr(lock, "lock_owner", lambda _: owners.pop(0))
    done = CliRunner().invoke(cli, ["stop", "--set", f"state.dir={tmp_path}", "--set", "ray.address=none"])
    assert (done.exit_code, done.stdout) == (0, f"daemon {gone.pid} stopped\n")


def test_a_port_that_another_program_has_is_said_at_once_with_what_to_type(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        daemon = RunningDaemon(tmp_path, {"serve.port": str(port), "metrics.port": "0", "mlflow.enabled": "false"})
        daemon.start()
        try:
            assert daemon.process is not None and daemon.process.wait(90) == 1
            assert f"another program listens at 127.0.0.1:{port}" in daemon.log and "serve.port" in daemon.log
            assert "Traceback" not in daemon.log
        finally:
            daemon.end()


def test_the_service_is_back_after_a_reboot_and_after_the_death_of_the_gcs(tmp_path: Path) -> None:
    port = free_port()
    daemon = RunningDaemon(tmp_path, {"serve.port": str(port), "metrics.port": "0", "mlflow.enabled": "false"})
    ray_folder = daemon.state / "ray"

    def lives() -> bool:
        with suppress(OSError), urlopen(f"http://127.0.0.1:{port}/v2/health/live", timeout=5) as answer:
            return answer.status == 200
        return False

    try:
        daemon.start()
        daemon.wait_for(lives, 120, "the service answers")
        for signal in (SIGTERM, SIGKILL):  # as a machine that is shut down: everybody is asked, then nobody
            for each in [*head_processes(ray_folder), process(daemon.process.pid)]:
                with suppress(ProcessLookupError):
                    os.kill(each.pid, signal)
            time.sleep(2)
        daemon.process.wait()
        assert not lives()
        daemon.start()
        daemon.wait_for(lives, 120, "the service answers after a reboot")

        before = find_head(ray_folder)
        os.kill(before.gcs.pid, SIGKILL)
        daemon.wait_for(lambda: find_head(ray_folder) not in (None, before), 60, "there is another head")
        daemon.wait_for(lives, 120, "the service answers without its GCS")
        assert "cannot connect to Ray" not in daemon.log
    finally:
        daemon.end()
