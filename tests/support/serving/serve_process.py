"""A Ray head with the service, in its own process: `serve_process.py POOLS TEMP SETTINGS_AS_JSON`.

Prints `ready` when it answers. A line `deploy` on its input deploys again, also with other settings and as on an
external cluster (`deploy {"ours": false, "port": 1}`), `undeploy` ends the service, `metrics` prints the port of Ray's
metrics. End of input ends everything.
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
    from service_specs import changed, spec_of

    from mqmk.deploy.serving import application
    from mqmk.deploy.serving.errors import ServeError

    defaults = {"num_cpus": 0.2, "max_queue": 64, "retry_seconds": 1.0, "private": Path(temp)}
    spec = spec_of(Path(pools), **(defaults | json.loads(given)))
    ray.init(
        num_cpus=2, num_gpus=1, namespace="mqmk", _temp_dir=temp, object_store_memory=100 * 2**20,
        include_dashboard=False, log_to_driver=False, _system_config={"metrics_report_interval_ms": 2000},
    )  # fmt: skip # the GPU is one that Ray believes in; whether there is one, replicas ask torch
    try:
        application.deploy(spec)
        application.wait_until_live(spec, 240)
        print("ready", flush=True)
        for line in sys.stdin:
            word, _, given = line.strip().partition(" ")
            if word == "deploy":
                changes = json.loads(given or "{}")
                ours = changes.pop("ours", True)
                try:
                    application.deploy(changed(spec, **changes), ours=ours)
                    print(f"> deployed {application.application_status()}", flush=True)
                except ServeError as error:
                    print(f"> {error}", flush=True)
            if word == "undeploy":
                print(">", application.undeploy(spec), application.application_status(), flush=True)
            if line.strip() == "metrics":
                print(">", ray.nodes()[0]["MetricsExportPort"], flush=True)
    finally:
        application.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
