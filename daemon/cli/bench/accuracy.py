"""`mqmk-daemon bench accuracy`: learn a folder as a stream of tasks and print the paper's table."""

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mqmk.daemon.cli.bench.live import show_progress
from mqmk.daemon.cli.bench.stream_options import (
    DEFAULTS,
    load_vit,
    read_stream_settings,
    read_train_settings,
    stream_options,
)
from mqmk.matcher.matcher_info import MATCHER_INFO

if TYPE_CHECKING:
    from rich.table import Table

    from mqmk.learner.bench.accuracy import AccuracySettings, Step

COLUMNS = ("accuracy", "matching_rate", "calibration_error", "accuracy_task", "accuracy_all", "forgetting",
           "forgetting_max", "recall_at_3", "queries")  # fmt: skip
TRAINING = ("epochs", "steps", "anchor_steps", "anchor_length", "batch", "keys", "g_prompt", "start", "e_length",
            "e_layers", "patches", "learning_rate")  # fmt: skip


class Layers(click.ParamType["tuple[int, ...]"]):
    """Blocks of the ViT, such as `2-10` or `2,3,5`."""

    name = "layers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """The numbers of the blocks, counted from 0."""
        if isinstance(value, tuple):
            return value
        try:
            first, dash, last = value.partition("-")
            layers = tuple(range(int(first), int(last) + 1)) if dash else tuple(int(n) for n in value.split(","))
        except ValueError:
            layers = ()
        if not layers or list(layers) != sorted(set(layers)):
            self.fail(f"expected blocks in ascending order, such as 2-10 or 2,3,5, got {value!r}", param, ctx)
        return layers


@click.command()
@stream_options
@click.option("--matchers", help="Comma-separated.  [default: all]")
@click.option("--keys", type=click.Choice(["closed-form", "learned"]), show_default=DEFAULTS.keys,
              help="How class keys are computed.")  # fmt: skip
@click.option("--g-prompt", type=click.Choice(["first", "always"]), show_default=DEFAULTS.g_prompt,
              help="Which tasks train the g-prompt.")  # fmt: skip
@click.option("--start", type=click.Choice(["first", "previous", "random"]), show_default=DEFAULTS.start,
              help="How a new e-prompt is initialised.")  # fmt: skip
@click.option("--anchor-steps", type=click.IntRange(min=0), show_default=str(DEFAULTS.anchor_steps),
              help="Minimum number of optimiser steps for the anchor prompt; 0 trains none.")  # fmt: skip
@click.option("--anchor-length", type=click.IntRange(min=1), show_default=str(DEFAULTS.anchor_length),
              help="Rows of the anchor prompt in each block.")  # fmt: skip
@click.option("--e-length", type=click.IntRange(min=1), show_default=str(DEFAULTS.e_length),
              help="Rows of an e-prompt in each block.")  # fmt: skip
@click.option("--e-layers", type=Layers(), help="Blocks with an e-prompt, such as 2-10 or 2,3,5.")
@click.option("--patches", type=click.FloatRange(0, 1, min_open=True), show_default=str(DEFAULTS.patches),
              help="Share of an image's patches used in a training step.")  # fmt: skip
@click.option("--learning-rate", type=click.FloatRange(0, min_open=True), show_default=str(DEFAULTS.learning_rate),
              help="Initial learning rate.")  # fmt: skip
@click.option("--joint/--no-joint", help="Also train all classes as one task: the upper bound in the paper's tables.")
@click.option("--ablations/--no-ablations", help="Also vary keys per task, top-K, classifier and shortlist.")
@click.option("--sweep-length", type=click.IntRange(min=1), multiple=True,
              help="Also learn with e-prompts of this length; may be repeated.")  # fmt: skip
@click.option("--sweep-layers", type=Layers(), multiple=True,
              help="Also learn with e-prompts in these blocks; may be repeated.")  # fmt: skip
@click.option("--html", type=click.Path(dir_okay=False, path_type=Path), help="Also write an HTML report.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document; progress goes to standard error.")
def accuracy(html: Path | None, as_json: bool, **chosen: Any) -> None:
    """Learn a folder of images as a stream of tasks and score every matcher. Rates come from mixed batches."""
    from mqmk.learner.bench.accuracy import run_stream, sweep_prompts, to_json

    settings = _settings(chosen)
    vit = load_vit(chosen)
    begun = time.monotonic()
    with show_progress(_line, _live_table) as draw:
        runs = [run_stream(vit, settings, seed, draw) for seed in range(settings.seeds)]
        sweeps = sweep_prompts(vit, settings, draw)
    document = to_json(settings, vit, runs, time.monotonic() - begun, sweeps)
    if html:
        from mqmk.learner.report.accuracy_report import write_report

        write_report(html, settings, vit, runs, document)
        click.echo(f"report: {html}", err=True)
    if as_json:
        click.echo(json.dumps(document, indent=2))
    else:
        _print(document)


def _settings(chosen: dict[str, Any]) -> "AccuracySettings":
    """Options override the preset, and the preset overrides the defaults."""
    from mqmk.learner.bench.accuracy import AccuracySettings

    matchers = tuple(chosen["matchers"].split(",")) if chosen["matchers"] else tuple(MATCHER_INFO)
    if unknown := set(matchers) - set(MATCHER_INFO):
        raise click.BadParameter(f"{', '.join(sorted(unknown))}; choose among {', '.join(MATCHER_INFO)}")
    return AccuracySettings(
        read_stream_settings(chosen),
        read_train_settings(chosen, TRAINING),
        matchers,
        chosen["seeds"],
        chosen["joint"],
        chosen["ablations"],
        chosen["sweep_length"],
        chosen["sweep_layers"],
    )


def _live_table(step: "Step") -> "Table | None":
    from rich.table import Table

    if not step.tallies:
        return None
    table = Table("matcher", "accuracy", "matching rate", "matched task's head", "all heads", "recall@3", "queries",
                  title=f"after {step.task + 1} of {step.tasks} tasks")  # fmt: skip
    for column in table.columns[1:]:
        column.justify = "right"
    for name, tally in step.tallies.items():
        rates = (
            tally.accuracy, tally.matching_rate, tally.accuracy_task, tally.accuracy_all, tally.recall_at_3
        )  # fmt: skip
        table.add_row(name, *(f"{rate:.1%}" for rate in rates), f"{tally.num_queries:.1f}")
    return table


def _line(step: "Step") -> str:
    where = f"seed {step.seed}  task {step.task + 1}/{step.tasks}"
    if step.progress:
        p = step.progress
        held_out = "" if p.held_out_accuracy is None else f"  held-out {p.held_out_accuracy:.1%}"
        rate = f"{p.images_per_second:.0f} images/s"
        return f"{where}  epoch {p.epoch}/{p.epochs}  loss {p.loss:.3f}{held_out}  {rate}"
    rates = "  ".join(f"{name} {tally.accuracy:.1%}" for name, tally in (step.tallies or {}).items())
    return f"{where}  accuracy: {rates}"


def _print(document: dict[str, Any]) -> None:
    from rich.console import Console

    console = Console()
    console.print(_table(document))
    console.print(f"no prompts, nearest class mean: {document['plain_ncm']:.1%}", highlight=False)
    if document["joint"] is not None:
        console.print(f"all classes as one task: {document['joint']:.1%}", highlight=False)
    for choice, values in document["ablations"].items():
        console.print(_ablation(choice, values))
    console.print(f"{document['seconds']:.0f} s ({document['train_seconds']:.0f} training, "
                  f"{document['evaluate_seconds']:.0f} evaluating)", highlight=False)  # fmt: skip


def _table(document: dict[str, Any]) -> "Table":
    from rich.table import Table

    table = Table("matcher", *(name.replace("_", " ") for name in COLUMNS))
    for column in table.columns[1:]:
        column.justify = "right"
    several = document["settings"]["seeds"] > 1
    for name, row in document["matchers"].items():
        spread = {c: f" ± {row[f'{c}_spread']:.1%}" if several else "" for c in COLUMNS}
        cells = [f"{row[c]:.1f}" if c == "queries" else f"{row[c]:.1%}{spread[c]}" for c in COLUMNS]
        table.add_row(name, *cells)
    return table


def _ablation(choice: str, values: dict[str, dict[str, float]]) -> "Table":
    from rich.table import Table

    table = Table(choice, "matching rate", "accuracy", "all classes", "queries")
    for column in table.columns[1:]:
        column.justify = "right"
    for value, row in values.items():
        rates = [f"{row[key]:.1%}" for key in ("matching_rate", "accuracy_task", "accuracy_all")]
        table.add_row(value, *rates, f"{row['queries']:.1f}")
    return table
