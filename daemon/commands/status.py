"""`status`, `tasks`, `show`, `versions`: what is known about every task and version, and what happens next."""

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from mqmk.daemon.commands.options import config_options

if TYPE_CHECKING:
    from rich.console import RenderableType

    from mqmk.daemon.config_sources import Loaded
    from mqmk.daemon.ledger import Ledger
    from mqmk.daemon.overview import Overview

COLOURS = {
    "SERVING": "green", "PUBLISHED": "cyan", "QUARANTINED": "red", "CONFLICT": "red", "HELD": "yellow",
    "TRAINING": "magenta", "FORGOTTEN": "dim",
}  # fmt: skip

WAITING = ("QUARANTINED", "CONFLICT", "HELD")


@contextmanager
def opened_ledger(loaded: "Loaded") -> "Iterator[Ledger]":
    """The ledger of a state directory; DaemonError if there is none."""
    from mqmk.daemon.errors import DaemonError
    from mqmk.daemon.ledger import Ledger

    config = loaded.config
    if not config.ledger_file.exists():
        raise DaemonError(
            f"{config.state.dir} has no ledger: no daemon ever ran there; `mqmk-daemon start`, or --state"
        )
    ledger = Ledger(config.ledger_file)
    try:
        yield ledger
    finally:
        ledger.close()


@contextmanager
def _overview(loaded: "Loaded") -> "Iterator[Overview]":
    from mqmk.daemon.overview import Overview

    with opened_ledger(loaded) as ledger:
        yield Overview(loaded.config, ledger)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.option("--watch", is_flag=True, help="Keep the table on the terminal up to date until Ctrl-C.")
@config_options
def status(loaded: "Loaded", as_json: bool, watch: bool) -> None:
    """Is it fine, what is it doing, what waits for me? Exit code 0 if it runs well, 3 if not, 4 if it is stopped."""
    with _overview(loaded) as overview:
        if as_json:
            document = overview.status()
            click.echo(json.dumps(document, indent=2))
        elif watch:
            document = _watch(overview)
        else:
            from rich.console import Console

            document = overview.status()
            Console().print(drawn(document))
    raise SystemExit({"running": 0, "degraded": 3, "stopped": 4}[document["state"]])


def _watch(overview: "Overview") -> dict[str, Any]:
    from rich.live import Live

    document = overview.status()
    with Live(drawn(document), refresh_per_second=4) as live:
        try:
            while True:
                time.sleep(0.5)
                document = overview.status()
                live.update(drawn(document))
        except KeyboardInterrupt:
            return document


def drawn(document: Mapping[str, Any]) -> "RenderableType":
    """The status as a person likes to see it."""
    from rich.console import Group
    from rich.text import Text

    from mqmk.daemon.glance import in_words

    serving, matching = document["serving"], in_words(document["matching"])
    versions = ", ".join(str(each["pool_version"]) for each in serving["replicas"]) or "none"
    lines = [f"{document['state']}   version {document['pool_version'] or 'none yet'}   replicas hold {versions}"]
    lines += [f"serving at {serving['url']}"] if serving["url"] else []
    lines += [matching] if matching else []
    lines += [_behind(each) for each in serving["replicas"] if each["last_failure"]]
    lines += [f"{each['part']} does not work: {each['says']}" for each in document["health"] if not each["up"]]
    lines += [f"waiting: {each['kind']} {each['subject']}" for each in document["commands"]]
    aside = ", ".join(each["name"] for each in document["tasks"] if each["state"] in WAITING)
    lines += [f"waiting for you: {aside}; `mqmk-daemon show TASK` says what to type"] if aside else []
    return Group(*(Text(line) for line in lines), _task_table(document["tasks"], document["progress"]))


def _behind(replica: Mapping[str, Any]) -> str:
    """Why a replica does not follow CURRENT."""
    doing = f"keeps version {replica['pool_version']}" if replica["ready"] else "waits"
    return f"replica {replica['id']} {doing}: {replica['last_failure']}"


def _task_table(tasks: Iterable[Mapping[str, Any]], progress: Iterable[Mapping[str, Any]] = ()) -> "RenderableType":
    """A row for each task; what there is to say about one stands below, where a narrow terminal has room for it."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    running = {each["task"]: each for each in progress}
    table, remarks = Table(), []
    table.add_column("task", overflow="fold")
    for column in ("state", "version", "classes", "samples", "matched", "accuracy"):
        table.add_column(column, no_wrap=True)
    for row in tasks:
        table.add_row(
            Text(row["name"]), Text(row["state"], style=COLOURS.get(row["state"], "")), str(row["version"] or ""),
            str(len(row["classes"]) or ""), str(row["samples"] or ""), _share(row["matching_rate"]),
            _share(row["accuracy"]),
        )  # fmt: skip
        if remark := _remark(row, running):
            remarks.append(Text(f"{row['name']}: {remark}"))
    return Group(table, *remarks)


def _remark(row: Mapping[str, Any], running: Mapping[str, Mapping[str, Any]]) -> str:
    if row["name"] not in running or row["state"] != "TRAINING":
        return str(row["reason"] or "")
    now = running[row["name"]]
    return (
        f"epoch {now['epoch']}/{now['epochs']}, loss {now['loss']:.3f}, "
        f"{now['images_per_second']:.0f} images/s, {now['seconds_left']:.0f} s left"
    )


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@config_options
def tasks(loaded: "Loaded", as_json: bool) -> None:
    """Every task with its state and reason."""
    with _overview(loaded) as overview:
        rows = overview.status()["tasks"]
    if as_json:
        click.echo(json.dumps(rows, indent=2))
    else:
        from rich.console import Console

        Console().print(_task_table(rows))


@click.command()
@click.argument("task")
@click.option("--wait", type=float, default=0.0, metavar="SECONDS",
              help="Wait until it is served or put aside; exit with 1 if it is not served by then.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@config_options
def show(loaded: "Loaded", task: str, wait: float, as_json: bool) -> None:
    """Everything about one task: why it is where it is, what comes next, and its history."""
    if wait:
        from mqmk.daemon.settled import wait_until_settled

        wait_until_settled(loaded.config, task, wait)
    with _overview(loaded) as overview:
        found = overview.show(task)
    if as_json:
        click.echo(json.dumps(found, indent=2))
    else:
        _print_tasks(found)
    if wait and found[-1]["state"] != "SERVING":
        raise SystemExit(1)


def _print_tasks(found: Iterable[Mapping[str, Any]]) -> None:
    for each in found:
        click.echo(f"{each['name']}: {each['state']}" + (f", {each['reason']}" if each["reason"] else ""))
        click.echo(f"  next: {each['next']}" + (f", not before {each['next_try']}" if each["next_try"] else ""))
        click.echo(f"  {each['samples']} samples of {len(each['classes'])} classes, identity {each['identity']}")
        for warning in each["warnings"]:
            click.echo(f"  warning: {warning}")
        for event in each["events"]:
            detail = ", ".join(f"{key}={_short(value)}" for key, value in event["detail"].items())
            click.echo(f"  {event['at']}  {event['event']:<20} {detail[:160]}")


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@config_options
def versions(loaded: "Loaded", as_json: bool) -> None:
    """Every pool version: what made it and how good it is."""
    with _overview(loaded) as overview:
        rows = overview.versions()
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table()  # fits 80 columns
    table.add_column("version", no_wrap=True)
    table.add_column("made by", overflow="fold")
    for column in ("matcher", "matched", "accuracy", "MLflow"):
        table.add_column(column, no_wrap=True)
    table.add_column("created")
    for row in rows:
        table.add_row(
            f"{'→' if row['current'] else ' '} {row['version']}", Text(f"{row['kind']} {row['task'] or ''}"),
            row["matcher"] or "", _share(row["matching_rate"]), _share(row["accuracy"]),
            _recorded(row, loaded.config.mlflow.enabled), row["created_at"].replace("T", " "),
        )  # fmt: skip
    Console().print(table)


def _recorded(row: Mapping[str, Any], enabled: bool) -> str:
    """What MLflow has of a version, and whether the pool store still has it."""
    if not row["stored"]:
        return "recorded only" if row["recorded"] else "gone"
    return ("recorded" if row["recorded"] else "waiting") if enabled else "off"
