"""`mqmk-daemon bench compare`: our methods and their rivals on one stream of tasks, under one protocol."""

import json
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mqmk.daemon.cli.bench.accuracy import Layers
from mqmk.daemon.cli.bench.live import show_progress
from mqmk.daemon.cli.bench.stream_options import load_vit, read_stream_settings, read_train_settings, stream_options

if TYPE_CHECKING:
    from rich.table import Table

    from mqmk.learner.bench.compare import CompareSettings, MethodRun, Progress
    from mqmk.learner.bench.methods.parts.protocol import MethodInfo

RATES = {
    "accuracy": "A_T",
    "accuracy_pooled": "pooled",
    "forgetting": "F_T",
    "forgetting_max": "F_T max",
    "matching_rate": "matching",
    "task_of_answer": "task of answer",
}
COSTS = {
    "test_passes": "passes",
    "train_passes": "training passes",
    "trained": "trained",
    "kept": "kept",
    "seconds": "s",
}
PUBLISHED = {
    "cifar100": "CIFAR-100",
    "imagenet_r": "ImageNet-R",
    "matching_cifar100": "CIFAR-100 matching",
    "matching_imagenet_r": "ImageNet-R matching",
}


class Factors(click.ParamType["tuple[float, ...]"]):
    """Positive numbers, such as `1,3,10`."""

    name = "factors"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, ...]:
        """The numbers."""
        if isinstance(value, tuple):
            return value
        try:
            factors = tuple(float(each) for each in value.split(","))
        except ValueError:
            factors = ()
        if not factors or min(factors) <= 0:
            self.fail(f"expected positive numbers, such as 1,3,10, got {value!r}", param, ctx)
        return factors


def _list(ctx: click.Context, _param: click.Parameter, is_wanted: bool) -> None:
    if not is_wanted or ctx.resilient_parsing:
        return
    from mqmk.learner.bench.methods.registry import list_methods

    for name, info in list_methods().items():
        click.echo(f"{name:20} {info.family:10} {info.description}")
    ctx.exit()


@click.command()
@stream_options
@click.option("--methods", "names", default="all", show_default=True, help="Comma-separated names, see --list.")
@click.option("--list", is_flag=True, is_eager=True, expose_value=False, callback=_list, help="List the methods.")
@click.option("--rates", type=Factors(), default="1,3,10", show_default=True,
              help="Learning rates to try on a part of the first seed's task 1, times the reference's.")  # fmt: skip
@click.option("--sweep-length", "lengths", type=click.IntRange(min=1), multiple=True,
              help="With --html: also learn with e-prompts of this length; may be repeated.")  # fmt: skip
@click.option("--sweep-layers", "layers", type=Layers(), multiple=True,
              help="With --html: also learn with e-prompts in these blocks; may be repeated.")  # fmt: skip
@click.option("--jobs", type=click.IntRange(min=1), default=1, show_default=True,
              help="Processes that share the methods and the cores.")  # fmt: skip
@click.option("--leaky", is_flag=True, help="Also mqmk and dualprompt with the published batch bug. Not a result.")
@click.option("--work", type=click.Path(file_okay=False, path_type=Path), default="bench-compare", show_default=True,
              help="Folder of finished methods and seeds, which are not run again.")  # fmt: skip
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Also write all figures.")
@click.option("--html", type=click.Path(dir_okay=False, path_type=Path), help="Also write an HTML report.")
def compare(
    names: str,
    rates: tuple[float, ...],
    lengths: tuple[int, ...],
    layers: tuple[tuple[int, ...], ...],
    jobs: int,
    leaky: bool,
    work: Path,
    json_file: Path | None,
    html: Path | None,
    **chosen: Any,
) -> None:
    """Learn a folder of images as a stream of tasks with every method. Rates come from mixed batches."""
    from mqmk.learner.bench.compare import CompareSettings, estimate_time, measure_figures, to_json
    from mqmk.learner.bench.compare import compare as run_all
    from mqmk.learner.bench.methods.registry import choose_methods

    methods = choose_methods(names, leaky)
    settings = CompareSettings(
        read_stream_settings(chosen),
        read_train_settings(chosen),
        seeds=chosen["seeds"],
        rates=rates,
        figures=html is not None and any(info.shares_pool for info in methods),
        lengths=lengths,
        layers=layers,
    )
    vit = load_vit(chosen)
    seen: dict[tuple[str, int], MethodRun] = {}

    def table(progress: "Progress") -> "Table":
        seen[progress.method, progress.seed] = progress.run
        return _live_table(seen)

    estimate = estimate_time(vit, methods, settings, work)
    click.echo(f"{estimate.runs} of {len(methods) * settings.seeds} runs to do, about "
               f"{_duration(estimate.seconds_left())} on a machine that does nothing else", err=True)  # fmt: skip
    if jobs > 1:
        _run_parts(chosen, methods, settings, work, jobs)  # what follows finds their results in the work folder
    with show_progress(_line, table) as draw:
        runs = run_all(vit, methods, settings, work, draw)
    figures = measure_figures(vit, settings, work) if settings.figures else None  # the pool's are in the work folder
    document = to_json(settings, vit, methods, runs, figures)
    if json_file:
        json_file.write_text(json.dumps(document, indent=2), encoding="utf-8")
    if html:
        from mqmk.learner.report.compare_report import write_compare_report

        write_compare_report(html, document)
        click.echo(f"report: {html}", err=True)
    _print(document)


def _run_parts(
    chosen: dict[str, Any], methods: "Sequence[MethodInfo]", settings: "CompareSettings", work: Path, jobs: int
) -> None:
    from mqmk.learner.bench.estimate import split_methods

    parts, threads = split_methods(methods, jobs), max(1, (os.cpu_count() or 1) // jobs)
    with ProcessPoolExecutor(len(parts), mp_context=get_context("spawn")) as pool:
        running = []
        for part in parts:
            own = replace(settings, figures=settings.figures and any(info.shares_pool for info in part))
            names = tuple(info.name for info in part)
            running.append(pool.submit(_run_part, chosen, names, own, work, threads))
        for each in running:
            each.result()


def _run_part(
    chosen: dict[str, Any], names: tuple[str, ...], settings: "CompareSettings", work: Path, threads: int
) -> None:
    import torch

    from mqmk.learner.bench.compare import compare as run_all
    from mqmk.learner.bench.methods.registry import list_methods

    torch.set_num_threads(threads)
    methods = [list_methods()[name] for name in names]
    run_all(load_vit(chosen), methods, settings, work, lambda progress: click.echo(_line(progress), err=True))


def _line(progress: "Progress") -> str:
    run = progress.run
    figures, last = run.figures(), run.steps[-1]
    where = f"{progress.method}  seed {progress.seed}  task {len(last.task_accuracy)}/{progress.tasks}"
    known = "  (known)" if progress.is_known else ""
    matching = "" if last.matching_rate is None else f"  matching rate {last.matching_rate:.1%}"
    left = "" if progress.seconds_left is None else f"  {_duration(progress.seconds_left)} left"
    return f"{where}  accuracy {figures['accuracy']:.1%}{matching}{known}{left}"


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"


def _live_table(seen: "dict[tuple[str, int], MethodRun]") -> "Table":
    table = _new_table("method", "seed", "tasks", *RATES.values())
    for (name, seed), run in seen.items():
        figures = run.figures()
        rates = [_rate(figures[column]) for column in RATES]
        table.add_row(name, str(seed), str(len(run.steps[-1].task_accuracy)), *rates)
    return table


def _print(document: dict[str, Any]) -> None:
    from rich.console import Console

    console = Console()
    rates, costs, published = (
        _new_table("method", *names.values()) for names in (RATES, COSTS, PUBLISHED | {"source": "source"})
    )
    for name, row in document["methods"].items():
        title, spread = name + (" (NOT A RESULT)" if row["is_leaky"] else ""), row["spread"]
        rates.add_row(
            title,
            *(_rate(row[column]) + (f" ± {spread[column]:.1%}" if spread[column] else "") for column in RATES),
        )
        costs.add_row(
            title, *(f"{row[column]:.3g}" if row[column] < 1000 else f"{row[column]:,.0f}" for column in COSTS)
        )
        if found := row["published"]:
            published.add_row(title, *(_published(found[column]) for column in PUBLISHED), found["source"])
    for table in (rates, costs, published):
        console.print(table)
    console.print(f"{document['note']}; passes in plain queries of one image", highlight=False, soft_wrap=True)
    for name, row in document["methods"].items():
        if row["deviations"]:
            console.print(f"{name}: {'; '.join(row['deviations'])}", highlight=False, soft_wrap=True)


def _published(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _new_table(*names: str) -> "Table":
    from rich.table import Table

    table = Table(*names)
    for column in table.columns[1:]:
        column.justify = "right"
    return table
