"""What the daemon does about Ray while there is none; tests/chaos.py kills a real one."""

from pathlib import Path

from daemon_parts import small_config

from mqmk.daemon.jobs import Build, Learn, Validate
from mqmk.daemon.ray_workers import RayWorkers


def test_between_two_rays_there_is_room_for_no_job_and_none_is_started_inside_the_daemon(tmp_path: Path) -> None:
    import ray

    assert not ray.is_initialized()
    workers = RayWorkers(small_config(tmp_path), trainers=2)
    assert not any(workers.room_for(kind) for kind in (Validate, Learn, Build))
    assert workers.news() == [] and not ray.is_initialized()
