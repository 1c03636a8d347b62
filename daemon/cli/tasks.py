"""`mqmk-daemon tasks` and `show`: every task with its state, and everything about one."""

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import click

from mqmk.daemon.cli.options import TaskName, config_options, new_state_options
from mqmk.daemon.cli.state import open_snapshot
from mqmk.daemon.cli.tables import figure_cells, new_table, print_whole

if TYPE_CHECKING:
    from rich.console import RenderableType

    from mqmk.daemon.config.load import Loaded

COLOURS = {
    "SERVING": "green", "PUBLISHED": "cyan", "QUARANTINED": "red", "CONFLICT": "red", "HELD": "yellow",
    "TRAINING": "magenta", "FORGOTTEN": "dim",
}  # fmt: skip


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@config_options
def tasks(loaded: "Loaded", as_json: bool) -> None:
    """List every task with its state and reason."""
    with open_snapshot(loaded) as snapshot:
        rows = snapshot.tasks()
    if as_json:
        click.echo(json.dumps(rows, indent=2))
    else:
        print_whole(task_table(rows))


@click.command()
@click.argument("task", type=TaskName())
@click.option("--wait", type=float, default=0.0, metavar="SECONDS",
              help="Wait until the task is serving or set aside; exit with 1 if it is not serving.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@new_state_options  # it may wait for a daemon that is just starting
def show(loaded: "Loaded", task: str, wait: float, as_json: bool) -> None:
    """Show one task: its state and reason, what comes next, and its history."""
    if wait:
        from mqmk.daemon.cli.wait import wait_until_settled

        wait_until_settled(loaded.config, task, wait, notify=lambda line: click.echo(line, err=True))
    with open_snapshot(loaded) as snapshot:
        found = snapshot.task_details(task)
    if as_json:
        click.echo(json.dumps(found, indent=2))
    else:
        _print_tasks(found)
    if wait and found[-1]["state"] != "SERVING":
        raise SystemExit(1)


def _print_tasks(found: Iterable[Mapping[str, Any]]) -> None:
    from mqmk.daemon.words import plural

    for each in found:
        if each["same_as"]:
            click.echo(each["same_as"])
        why = each["reason"] or (each["forgotten"] or {}).get("answer")
        click.echo(f"{each['name']}: {each['state']}" + (f", {why}" if why else ""))
        click.echo(f"  next: {each['next']}" + (f", not before {each['next_try']}" if each["next_try"] else ""))
        size = f"{plural(each['samples'], 'sample')} of {plural(len(each['classes']), 'class', 'classes')}"
        click.echo(f"  {size}, identity {each['identity']}")
        if each["accuracy"] is not None:
            matched, right, images = figure_cells(each)
            click.echo(f"  accuracy {right}, matched to the right task {matched}, of {images} held-out images")
        for warning in each["warnings"]:
            click.echo(f"  warning: {warning}")
        for event in each["events"]:
            detail = ", ".join(f"{key}={_format(value)}" for key, value in event["detail"].items())
            click.echo(f"  {event['at']}  {event['event']:<20} {detail[:160]}")


def _format(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def task_table(tasks: Iterable[Mapping[str, Any]], progress: Iterable[Mapping[str, Any]] = ()) -> "RenderableType":
    """A row per task; remarks are below the table, where a narrow terminal has room for them."""
    from rich.console import Group
    from rich.text import Text

    running, remarks = {each["task"]: each for each in progress}, []
    numbers = ("classes", "samples", "matched", "accuracy", "images")
    table = new_table("task", "state", *numbers, fold=("task",), right=numbers)
    for row in tasks:
        table.add_row(
            Text(row["name"]), Text(row["state"], style=COLOURS.get(row["state"], "")), str(len(row["classes"]) or ""),
            str(row["samples"] or ""), *figure_cells(row),
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
