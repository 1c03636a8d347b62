"""A Ray head with the service on it, in a process of its own: `serve_process.py POOLS TEMP SETTINGS_AS_JSON`.

Says `ready` when it answers. A line `deploy` on its input deploys again, `metrics` asks for the port of Ray's metrics.
The end of its input ends everything.
"""

import json
import os
import sys
from pathlib import Path


def main(pools: str, temp: str, given: str) -> None:
    token = Path(temp) / "token"
    token.touch(mode=0o600)
    token.write_text("0" * 32 + os.urandom(16).hex())
    os.environ |= {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # loopback, as the daemon's head
        "RAY_worker_niceness": "0",  # as there, too
    }
    import ray

    from mqmk.deploy import serving
    from mqmk.deploy.settings import ServeSettings

    defaults = {"num_cpus": 0.2, "max_queue": 64, "retry_seconds": 1.0, "private": Path(temp)}
    settings = ServeSettings(Path(pools), **(defaults | json.loads(given)))
    ray.init(
        num_cpus=2, num_gpus=1, namespace="mqmk", _temp_dir=temp, object_store_memory=100 * 2**20,
        include_dashboard=False, log_to_driver=False, _system_config={"metrics_report_interval_ms": 2000},
    )  # fmt: skip # the GPU is one that Ray believes in; whether there is one, replicas ask torch
    try:
        serving.deploy(settings)
        serving.wait_until_live(settings, 240)
        print("ready", flush=True)
        for line in sys.stdin:
            if line.strip() == "deploy":
                serving.deploy(settings)
                serving.hint()
                print(f"deployed {serving.application_status()}", flush=True)
            if line.strip() == "metrics":
                print(ray.nodes()[0]["MetricsExportPort"], flush=True)
    finally:
        serving.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
