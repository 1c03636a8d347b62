"""`mqmk-daemon bench`: measure speed and accuracy."""

import json
import sys
from typing import TYPE_CHECKING

import click

from mqmk.daemon.commands.bench_accuracy import accuracy
from mqmk.daemon.commands.bench_serving import serving

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import Console

    from mqmk.learner.bench_speed import Row, SpeedReport
    from mqmk.matcher.promises import Bar


@click.group()
def bench() -> None:
    """Measure speed and accuracy."""


bench.add_command(accuracy)
bench.add_command(serving)


@bench.command()
@click.option(
    "--backbone", "backbones", multiple=True, help="A timm ViT; may be repeated. [default: DeiT-Ti, ViT-B/16]"
)
@click.option("--tasks", multiple=True, type=click.IntRange(min=1), help="M; may be repeated. [default: 10, 20, 100]")
@click.option("--images", type=click.IntRange(min=1), default=2, show_default=True)
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document; progress goes to standard error.")
def speed(backbones: tuple[str, ...], tasks: tuple[int, ...], images: int, rounds: int, as_json: bool) -> None:
    """Time every matcher against whole forward passes, and check the speed promises. Exits with 1 if one fails."""
    from mqmk.learner.bench_speed import SpeedSettings, measure_speed

    settings = SpeedSettings(
        backbones=backbones or SpeedSettings.backbones,
        tasks=tasks or SpeedSettings.tasks,
        images=images,
        rounds=rounds,
    )
    report = measure_speed(settings, lambda row: click.echo(_line(row), err=True))
    if as_json:
        click.echo(json.dumps(report.as_json(), indent=2))
    else:
        _print_tables(report)
    if not all(bar.holds for bar in report.bars):
        sys.exit(1)


@bench.command()
@click.option("--backbone", default="deit_tiny_patch16_224", show_default=True, help="A timm ViT.")
@click.option("--batch", type=click.IntRange(min=1), default=16, show_default=True)
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def training(backbone: str, batch: int, rounds: int, as_json: bool) -> None:
    """Time a training step against the published two-pass step. Exits with 1 if a promise fails."""
    from dataclasses import asdict

    from rich.console import Console

    from mqmk.learner.bench_training import measure_training

    rows, bars = measure_training(backbone, batch, rounds)
    if as_json:
        click.echo(json.dumps({"rows": [asdict(row) for row in rows], "bars": [asdict(bar) for bar in bars]}, indent=2))
    else:
        for row in rows:
            speed = f"{row.images_per_second:8.1f} images/s  {row.ratio_to_two_pass:.2f} x"
            click.echo(f"{row.backbone:24} {row.step:28} {speed}")
        _print_bars(Console(), bars)
    if not all(bar.holds for bar in bars):
        sys.exit(1)


def _line(row: "Row") -> str:
    return f"{row.backbone:24} {row.tasks:4} tasks  {row.matcher:8} {row.ms_per_image:10.1f} ms an image"


def _print_tables(report: "SpeedReport") -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    machine = report.machine
    console.print(f"{machine.processor}, {machine.cores} cores, {machine.device}, torch {machine.torch}, "
                  f"matrix products {machine.matmul_gflops:g} GFLOP/s", highlight=False)  # fmt: skip
    table = Table("backbone", "tasks", "matcher", "ms/image", "of naive", "of plain", "peak MB")
    for column in table.columns[1:]:
        column.justify = "right"
    for row in report.rows:
        table.add_row(row.backbone, str(row.tasks), row.matcher, f"{row.ms_per_image:.1f}", f"{row.ratio_to_naive:.3f}",
                      f"{row.ratio_to_plain:.2f}", f"{row.peak_mb:.0f}")  # fmt: skip
    console.print(table)
    for name, share in report.matmul_share.items():
        console.print(f"{name}: a plain pass reaches {share:.0%} of the matrix-product rate", highlight=False)
    _print_bars(console, report.bars)


def _print_bars(console: "Console", bars: "Iterable[Bar]") -> None:
    for bar in bars:
        console.print(f"{'holds' if bar.holds else 'FAILS'}  {bar.promise}: {bar.measured:g}", highlight=False)
