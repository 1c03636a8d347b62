"""`mqmk-daemon bench accuracy`: learn a folder as a stream of tasks and print the paper's table for it."""

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from mqmk.learner.bench_accuracy import Step

COLUMNS = ("matching_rate", "accuracy_task", "accuracy_all", "forgetting", "forgetting_max", "recall_at_3", "queries")


@click.command()
@click.option("--data", type=click.Path(exists=True, file_okay=False, path_type=Path), required=True,
              help="Folder with train/CLASS/* and test/CLASS/*.")  # fmt: skip
@click.option("--tasks", type=click.IntRange(min=1), default=10, show_default=True)
@click.option("--backbone", default="embedded", show_default=True, help="`embedded`, or a timm ViT.")
@click.option("--weights", type=click.Path(exists=True, dir_okay=False, path_type=Path),
              help="safetensors file of the backbone; without it, the model hub is asked.")  # fmt: skip
@click.option("--image-size", type=click.IntRange(min=8), help="Pixels; the backbone's own by default.")
@click.option("--train-per-class", type=click.IntRange(min=1), help="At most this many; all by default.")
@click.option("--test-per-class", type=click.IntRange(min=1), help="At most this many; all by default.")
@click.option("--epochs", type=click.IntRange(min=1), default=6, show_default=True)
@click.option("--matchers", help="Comma-separated; all by default.")
@click.option("--seeds", type=click.IntRange(min=1), default=1, show_default=True)
@click.option("--keys", type=click.Choice(["closed-form", "learned"]), default="closed-form", show_default=True)
@click.option("--g-prompt", type=click.Choice(["first", "always"]), default="first", show_default=True)
@click.option("--e-length", type=click.IntRange(min=1), default=20, show_default=True)
@click.option("--joint/--no-joint", help="Also train all classes as one task, the upper row of the paper's tables.")
@click.option("--html", type=click.Path(dir_okay=False, path_type=Path), help="Also write a report to look at.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document; progress goes to standard error.")
def accuracy(
    data: Path,
    tasks: int,
    backbone: str,
    weights: Path | None,
    image_size: int | None,
    train_per_class: int | None,
    test_per_class: int | None,
    epochs: int,
    matchers: str | None,
    seeds: int,
    keys: str,
    g_prompt: str,
    e_length: int,
    joint: bool,
    html: Path | None,
    as_json: bool,
) -> None:
    """Learn a folder of pictures as a stream of tasks and report every matcher. Rates come from mixed batches."""
    from mqmk.learner.bench_accuracy import AccuracySettings, as_document, run_stream
    from mqmk.learner.settings import TrainSettings
    from mqmk.learner.streams import StreamSettings
    from mqmk.matcher.backbone import HUB, load_backbone
    from mqmk.matcher.matchers import MATCHERS

    chosen = tuple(matchers.split(",")) if matchers else tuple(MATCHERS)
    if unknown := set(chosen) - set(MATCHERS):
        raise click.BadParameter(f"{', '.join(sorted(unknown))}; choose among {', '.join(MATCHERS)}")
    settings = AccuracySettings(
        StreamSettings(data, tasks, train_per_class, test_per_class),
        TrainSettings(epochs=epochs, keys=keys, g_prompt=g_prompt, e_length=e_length),  # type: ignore[arg-type]
        chosen,
        seeds,
        joint,
    )
    vit = load_backbone(backbone, weights=weights or HUB, image_size=image_size)
    begun = time.monotonic()
    runs = [run_stream(vit, settings, seed, _draw) for seed in range(seeds)]
    document = as_document(settings, vit, runs, time.monotonic() - begun)
    if html:
        from mqmk.learner.report import write_report

        write_report(html, settings, vit, runs, document)
        click.echo(f"report: {html}", err=True)
    if as_json:
        click.echo(json.dumps(document, indent=2))
    else:
        _print(document)


def _draw(step: "Step") -> None:
    where = f"seed {step.seed}  task {step.task + 1}/{step.tasks}"
    if step.progress:
        p = step.progress
        held_out = "" if p.held_out_accuracy is None else f"  held-out {p.held_out_accuracy:.1%}"
        rate = f"{p.images_per_second:.0f} images/s"
        click.echo(f"{where}  epoch {p.epoch}/{p.epochs}  loss {p.loss:.3f}{held_out}  {rate}", err=True)
    if step.tallies:
        rates = "  ".join(f"{name} {tally.matching_rate:.1%}" for name, tally in step.tallies.items())
        click.echo(f"{where}  matching rate: {rates}", err=True)


def _print(document: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("matcher", *(name.replace("_", " ") for name in COLUMNS))
    for column in table.columns[1:]:
        column.justify = "right"
    for name, row in document["matchers"].items():
        cells = [f"{row[c]:.1f}" if c == "queries" else f"{row[c]:.1%} ± {row[f'{c}_spread']:.1%}" for c in COLUMNS]
        table.add_row(name, *cells)
    console = Console()
    console.print(table)
    console.print(f"no prompts, nearest class mean: {document['plain_ncm']:.1%}", highlight=False)
    if document["joint"] is not None:
        console.print(f"all classes as one task: {document['joint']:.1%}", highlight=False)
    console.print(f"{document['seconds']:.0f} s ({document['train_seconds']:.0f} training, "
                  f"{document['evaluate_seconds']:.0f} evaluating)", highlight=False)  # fmt: skip
