"""Kill the Ray node that trains and finish on another: `python -m programs.nodes.two_nodes FOLDER`.

Prints one JSON line: the final state of the task, the epoch at the kill, all epochs and all events.
"""

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "two-nodes-of-a-test" * 2}
os.environ |= {"RAY_enable_worker_prestart": "0", "RAY_health_check_period_ms": "500"}

import ray
from ray.cluster_utils import Cluster
from support.daemons.daemon import daemon, drop, small_config

from mqmk.daemon.config.sections import Gate
from mqmk.daemon.config.sections import Ray as RaySettings
from mqmk.daemon.workers.ray_pool import RayWorkers
from mqmk.learner.settings import TrainSettings


def main(folder: Path) -> None:
    """Train on the second node, kill it, and continue on a third."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": 80_000_000})
    first = cluster.add_node(num_cpus=1, object_store_memory=80_000_000)
    ray.init(address=cluster.address, namespace="mqmk", log_to_driver=False)
    config = small_config(
        folder,
        train=TrainSettings(epochs=5, batch=16),
        gate=Gate(accuracy_floor=0.0, fresh_process=False),
        ray=RaySettings(trainer_cpus=1.0),
    )
    config = replace(config, retry=replace(config.retry, attempts=5))
    parts = daemon(config, workers=lambda config: RayWorkers(config, trainers=1))
    drop(folder / "bucket", "sea", per_class=40)
    deadline = time.monotonic() + 400
    killed_after = None
    while parts.states != {"sea": "PUBLISHED"} and time.monotonic() < deadline:
        parts.run_pass()
        time.sleep(0.05)
        progress = [*parts.ledger.progress().values()]
        if killed_after is None and progress:
            killed_after = progress[0]["epoch"]
            cluster.remove_node(first, allow_graceful=False)
            cluster.add_node(num_cpus=1, object_store_memory=80_000_000)
    (sea,) = parts.ledger.tasks()
    events = [event.event for event in parts.ledger.events(sea)]
    epochs = [event.detail["epoch"] for event in parts.ledger.events(sea) if event.event == "task.epoch_finished"]
    print(json.dumps({"state": sea.state, "killed_after": killed_after, "epochs": epochs, "events": events}))
    parts.close()
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
