"""What the daemon does about Ray while there is none; tests/chaos.py kills a real one."""

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from signal import SIGKILL, SIGSTOP, SIGTERM
from urllib.request import urlopen

import pytest
from daemon_parts import daemon, small_config
from ports import free_port
from running_daemon import RunningDaemon

from mqmk.daemon.bucket import Bucket
from mqmk.daemon.config import Pools, Ray, S3Url, Serve
from mqmk.daemon.errors import RayError
from mqmk.daemon.jobs import Build, Learn, Validate
from mqmk.daemon.ledger import Ledger
from mqmk.daemon.metrics import serve_metrics
from mqmk.daemon.processes import process
from mqmk.daemon.ray_head import find_head, head_processes, stop_head
from mqmk.daemon.ray_workers import RayWorkers
from mqmk.daemon.service import Service
from mqmk.deploy.settings import ServeSettings

pytestmark = pytest.mark.filterwarnings("ignore:Using extra keyword arguments on `Field`")  # importing ray.serve


def test_between_two_rays_there_is_room_for_no_job_and_none_is_started_inside_the_daemon(tmp_path: Path) -> None:
    import ray

    assert not ray.is_initialized()
    workers = RayWorkers(small_config(tmp_path), trainers=2)
    assert not any(workers.room_for(kind) for kind in (Validate, Learn, Build))
    assert workers.news() == [] and not ray.is_initialized()


@dataclass
class TroubledGround:
    """A Ray that cannot be mended."""

    metrics_target: str | None = None
    tended: int = 0

    def tend(self) -> None:
        self.tended += 1
        raise RayError("it does not start")


def test_ray_is_looked_after_in_a_long_pause_too_and_its_trouble_ends_nothing(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    config = replace(config, bucket=replace(config.bucket, poll_seconds=60.0, max_poll_seconds=60.0),
                     metrics=replace(config.metrics, port=0))  # fmt: skip
    parts, ground = daemon(config), TroubledGround()
    metrics = serve_metrics(config, config.ledger_file)
    bucket = Bucket(config.bucket_url, settle_seconds=60.0)
    service = Service(config, parts.ledger, bucket, ground, parts.orchestrator, metrics)
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
    from mqmk.daemon.cluster import RayCluster

    config, deployed = replace(small_config(tmp_path), ray=Ray(num_cpus=1), serve=Serve(port=free_port())), []

    def deploy(settings: ServeSettings) -> None:
        deployed.append(settings)
        if len(deployed) == 1:
            trouble(config.ray_folder)

    ledger = Ledger(config.ledger_file)
    cluster = RayCluster(config, ledger, deploy=deploy)
    try:
        cluster.start()
        assert [(each.up, said in each.says) for each in ledger.health()] == [(False, True)]
        assert not cluster.workers.room_for(Validate)
        deadline = time.monotonic() + 120
        while len(deployed) < 2 and time.monotonic() < deadline:
            cluster.tend()
            time.sleep(0.1)
        assert len(deployed) == 2 and cluster.workers.room_for(Validate)
        assert [each.up for each in ledger.health()] == [True]
    finally:
        cluster.stop()
        stop_head(config.ray_folder)
        ledger.close()


def test_nobody_speaks_to_ray_while_there_is_none_lest_another_one_is_started_inside_the_daemon(tmp_path: Path) -> None:
    import ray

    from mqmk.daemon.cluster import RayCluster

    config = replace(small_config(tmp_path), ray=Ray(address="127.0.0.1:1"), pools=Pools(url=S3Url("s3://none/here")))
    ledger = Ledger(config.ledger_file)
    cluster = RayCluster(config, ledger)
    cluster._join_again = lambda *_: None
    cluster.tend()
    assert not ray.is_initialized()
    ledger.close()


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
        assert "Ray is not ready" not in daemon.log
    finally:
        daemon.end()
