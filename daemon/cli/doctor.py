"""`mqmk-daemon doctor`: check that everything the daemon needs works, and what to do if not."""

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from mqmk.daemon.cli.options import new_state_options

if TYPE_CHECKING:
    from mqmk.daemon.config.load import Loaded
    from mqmk.daemon.config.sections import Config
    from mqmk.daemon.host.finding import Finding

COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


@click.command()
@new_state_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.option("--rebuild", is_flag=True, help="Rebuild lost pools and a lost ledger from MLflow.")
def doctor(loaded: "Loaded", as_json: bool, rebuild: bool) -> None:
    """Check that everything the daemon needs works on this machine. Exits with 1 if something does not."""
    from mqmk.daemon.host.doctor import run_checks

    if rebuild:
        _rebuild(loaded.config, as_json)
        return
    findings = []
    for finding in run_checks(loaded.config):
        findings.append(finding)
        if not as_json:
            _print(finding)
    if as_json:
        click.echo(json.dumps({"findings": [_document(finding) for finding in findings]}, indent=2))
    sys.exit(int(any(finding.status == "fail" for finding in findings)))


def _rebuild(config: "Config", as_json: bool) -> None:
    from mqmk.daemon.app import registry_for
    from mqmk.daemon.errors import DaemonError
    from mqmk.daemon.host.lock import DaemonLock
    from mqmk.daemon.registry.rebuild import rebuild
    from mqmk.daemon.state_dir import StateDir

    registry = registry_for(config)
    if registry is None:
        raise DaemonError("mlflow.enabled is false: there is nothing to rebuild from")
    lock = DaemonLock(config.state.dir).take()
    done = rebuild(StateDir(config.state.dir), config.ledger_file, registry)
    registry.close()
    lock.release()
    if as_json:
        click.echo(json.dumps(asdict(done)))
        return
    click.echo(f"fetched versions: {', '.join(map(str, done.fetched)) or 'none were missing'}")
    if done.lost:
        click.echo(f"lost, neither here nor in MLflow: {', '.join(map(str, done.lost))}")
    click.echo(f"ledger: {'rebuilt from pools and MLflow' if done.ledger else 'exists, unchanged'}")
    click.echo(f"current version: {done.current}")


def _document(finding: "Finding") -> dict[str, str]:
    return {"name": finding.name, "status": finding.status, "what": finding.what, "to_do": finding.to_do}


def _print(finding: "Finding") -> None:
    mark = click.style(f"{finding.status:4}", fg=COLOURS[finding.status])
    click.echo(f"{mark}  {finding.name:13} {finding.what}")
    if finding.to_do:
        click.echo(f"      {'':13} -> {finding.to_do}")
