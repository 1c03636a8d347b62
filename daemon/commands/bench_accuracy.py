"""`mqmk-daemon bench accuracy`: learn a folder as a stream of tasks and print the paper's table for it."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mqmk.learner.presets import PRESETS
from mqmk.learner.settings import TrainSettings

if TYPE_CHECKING:
    from rich.table import Table

    from mqmk.learner.bench_accuracy import AccuracySettings, Step
    from mqmk.matcher.prompted_vit import FrozenViT

COLUMNS = ("matching_rate", "accuracy_task", "accuracy_all", "forgetting", "forgetting_max", "recall_at_3", "queries")
DEFAULTS = TrainSettings()
TRAINING = ("epochs", "batch", "keys", "g_prompt", "start", "e_length", "e_layers", "patches", "learning_rate")


class Layers(click.ParamType["tuple[int, ...]"]):
    """Blocks of the ViT, as `2-10` or `2,3,5`."""

    name = "layers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """The numbers of the blocks, counted from 0."""
        if isinstance(value, tuple):
            return value
        try:
            first, dash, last = value.partition("-")
            return tuple(range(int(first), int(last) + 1)) if dash else tuple(int(n) for n in value.split(","))
        except ValueError:
            self.fail(f"expected blocks such as 2-10 or 2,3,5, got {value!r}", param, ctx)


@click.command()
@click.option("--data", type=click.Path(exists=True, file_okay=False, path_type=Path), required=True,
              help="Folder with train/CLASS/* and test/CLASS/*.")  # fmt: skip
@click.option("--preset", type=click.Choice(list(PRESETS)), help="The paper's settings; other options go before them.")
@click.option("--tasks", type=click.IntRange(min=1), show_default="10")
@click.option("--backbone", show_default="embedded", help="`embedded`, or a timm ViT.")
@click.option("--weights", type=click.Path(exists=True, dir_okay=False, path_type=Path),
              help="safetensors file of the backbone; without it, the model hub is asked.")  # fmt: skip
@click.option("--image-size", type=click.IntRange(min=8), help="Pixels; the backbone's own by default.")
@click.option("--train-per-class", type=click.IntRange(min=1), help="At most this many; all by default.")
@click.option("--test-per-class", type=click.IntRange(min=1), help="At most this many; all by default.")
@click.option("--epochs", type=click.IntRange(min=1), show_default=str(DEFAULTS.epochs))
@click.option("--batch", type=click.IntRange(min=1), show_default=str(DEFAULTS.batch), help="Pictures of one step.")
@click.option("--matchers", help="Comma-separated; all by default.")
@click.option("--seeds", type=click.IntRange(min=1), default=1, show_default=True)
@click.option("--keys", type=click.Choice(["closed-form", "learned"]), show_default=DEFAULTS.keys)
@click.option("--g-prompt", type=click.Choice(["first", "always"]), show_default=DEFAULTS.g_prompt)
@click.option("--start", type=click.Choice(["first", "previous", "random"]), show_default=DEFAULTS.start,
              help="What a new e-prompt is a copy of.")  # fmt: skip
@click.option("--e-length", type=click.IntRange(min=1), show_default=str(DEFAULTS.e_length))
@click.option("--e-layers", type=Layers(), help="Blocks with an e-prompt, as 2-10 or 2,3,5.")
@click.option("--patches", type=click.FloatRange(0, 1, min_open=True), show_default=str(DEFAULTS.patches),
              help="Share of a picture's patches that a training step looks at.")  # fmt: skip
@click.option("--learning-rate", type=click.FloatRange(0, min_open=True), show_default=str(DEFAULTS.learning_rate))
@click.option("--joint/--no-joint", help="Also train all classes as one task, the upper row of the paper's tables.")
@click.option("--ablations/--no-ablations", help="Also keys per task, top-K, classifier and shortlist.")
@click.option("--html", type=click.Path(dir_okay=False, path_type=Path), help="Also write a report to look at.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document; progress goes to standard error.")
def accuracy(html: Path | None, as_json: bool, **chosen: Any) -> None:
    """Learn a folder of pictures as a stream of tasks and report every matcher. Rates come from mixed batches."""
    from mqmk.learner.bench_accuracy import as_document, run_stream

    settings = _settings(chosen)
    vit = _backbone(chosen)
    begun = time.monotonic()
    with drawing() as draw:
        runs = [run_stream(vit, settings, seed, draw) for seed in range(settings.seeds)]
    document = as_document(settings, vit, runs, time.monotonic() - begun)
    if html:
        from mqmk.learner.report import write_report

        write_report(html, settings, vit, runs, document)
        click.echo(f"report: {html}", err=True)
    if as_json:
        click.echo(json.dumps(document, indent=2))
    else:
        _print(document)


def _settings(chosen: dict[str, Any]) -> "AccuracySettings":
    """What was typed goes before the preset, and the preset before the defaults."""
    from mqmk.learner.bench_accuracy import AccuracySettings
    from mqmk.learner.streams import StreamSettings
    from mqmk.matcher.matchers import MATCHERS

    preset = PRESETS.get(chosen["preset"] or "")
    matchers = tuple(chosen["matchers"].split(",")) if chosen["matchers"] else tuple(MATCHERS)
    if unknown := set(matchers) - set(MATCHERS):
        raise click.BadParameter(f"{', '.join(sorted(unknown))}; choose among {', '.join(MATCHERS)}")
    typed = {name: chosen[name] for name in TRAINING if chosen[name] is not None}
    return AccuracySettings(
        StreamSettings(
            data=chosen["data"],
            tasks=chosen["tasks"] or (preset.tasks if preset else 10),
            train_per_class=chosen["train_per_class"],
            test_per_class=chosen["test_per_class"],
            classes=preset.classes if preset else None,
        ),
        replace(preset.train if preset else DEFAULTS, **typed),
        matchers,
        chosen["seeds"],
        chosen["joint"],
        chosen["ablations"],
    )


def _backbone(chosen: dict[str, Any]) -> "FrozenViT":
    from mqmk.matcher.backbone import EMBEDDED, HUB, load_backbone
    from mqmk.matcher.prompted_vit import FrozenViT

    preset = PRESETS.get(chosen["preset"] or "")
    name = chosen["backbone"] or (preset.backbone if preset else EMBEDDED)
    size = chosen["image_size"] or (preset.image_size if preset else None)
    vit = load_backbone(name, weights=chosen["weights"] or HUB, image_size=size)
    if preset is None:
        return vit
    info = replace(vit.info, mean=preset.mean, std=preset.std, crop=preset.crop)
    return FrozenViT(vit._vit, info, vit.device)  # the same ViT, with pictures prepared as the paper does


@contextmanager
def drawing() -> Iterator[Callable[["Step"], None]]:
    """A table that is redrawn in place on a terminal, a line for each event elsewhere."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _draw_line
        return
    from rich.console import Group
    from rich.live import Live

    with Live(console=console, refresh_per_second=4) as live:
        latest: list[Table] = []

        def draw(step: "Step") -> None:
            if step.tallies:
                latest[:] = [_live_table(step)]
            live.update(Group(*latest, _line(step)), refresh=bool(step.tallies))  # no task is too fast to be seen

        yield draw


def _live_table(step: "Step") -> "Table":
    from rich.table import Table

    table = Table("matcher", "matching rate", "accuracy", "all classes", "recall@3", "queries",
                  title=f"after {step.task + 1} of {step.tasks} tasks")  # fmt: skip
    for column in table.columns[1:]:
        column.justify = "right"
    for name, tally in (step.tallies or {}).items():
        rates = (tally.matching_rate, tally.accuracy_task, tally.accuracy_all, tally.recall_at_3)
        table.add_row(name, *(f"{rate:.1%}" for rate in rates), f"{tally.queries:.1f}")
    return table


def _draw_line(step: "Step") -> None:
    click.echo(_line(step), err=True)


def _line(step: "Step") -> str:
    where = f"seed {step.seed}  task {step.task + 1}/{step.tasks}"
    if step.progress:
        p = step.progress
        held_out = "" if p.held_out_accuracy is None else f"  held-out {p.held_out_accuracy:.1%}"
        rate = f"{p.images_per_second:.0f} images/s"
        return f"{where}  epoch {p.epoch}/{p.epochs}  loss {p.loss:.3f}{held_out}  {rate}"
    rates = "  ".join(f"{name} {tally.matching_rate:.1%}" for name, tally in (step.tallies or {}).items())
    return f"{where}  matching rate: {rates}"


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
