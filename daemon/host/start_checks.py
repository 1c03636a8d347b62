"""The checks of `doctor` that also guard `start`: a daemon that could not run as configured creates nothing."""

import logging
from collections.abc import Mapping
from typing import Final

from mqmk.daemon.config.sections import Config
from mqmk.daemon.errors import DaemonError
from mqmk.daemon.host.doctor import api_keys, backbone, run_checks, state_folder
from mqmk.daemon.host.finding import Check
from mqmk.daemon.host.lock import already_running, lock_owner
from mqmk.daemon.host.port_checks import TAKEN_OVER, metrics_port, serve_port
from mqmk.daemon.logs import event

log = logging.getLogger(__name__)
TIMEOUT_SECONDS: Final = 600.0
"""For one check: a large backbone may have to be downloaded."""
START_CHECKS: Final[Mapping[str, Check]] = {
    "state folder": state_folder,
    "API keys": api_keys,
    "serve port": serve_port,
    "metrics port": metrics_port,
    "backbone": backbone,
}
"""The backbone comes last: it takes longest, and its finding describes it."""


def check_before_start(config: Config, timeout: float = TIMEOUT_SECONDS) -> str:
    """Run the checks; DaemonError with what to do for the first that fails, else a description of the backbone."""
    if owner := lock_owner(config.state.dir):
        raise already_running(config.state.dir, owner)
    if config.backbone.name != "embedded":
        log.info(f"loading backbone {config.backbone.name}", extra=event("backbone.load_started"))
    what = ""
    for finding in run_checks(config, START_CHECKS, timeout):
        what = finding.what
        if finding.status == "fail":
            raise DaemonError("; ".join(part for part in (what, finding.to_do) if part))
        if TAKEN_OVER in what:
            log.info(what, extra=event("serve.taken_over"))
    return what
