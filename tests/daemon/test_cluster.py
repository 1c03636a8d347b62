"""What the daemon does about Ray while there is none; tests/chaos.py kills a real one."""

import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

from daemon_parts import daemon, small_config

from mqmk.daemon.bucket import Bucket
from mqmk.daemon.errors import RayError
from mqmk.daemon.jobs import Build, Learn, Validate
from mqmk.daemon.metrics import serve_metrics
from mqmk.daemon.ray_workers import RayWorkers
from mqmk.daemon.service import Service


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
