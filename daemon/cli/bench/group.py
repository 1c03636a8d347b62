"""`mqmk-daemon bench`: measure speed and accuracy."""

from typing import TYPE_CHECKING

import click

from mqmk.daemon.cli.bench.accuracy import accuracy
from mqmk.daemon.cli.bench.compare import compare
from mqmk.daemon.cli.bench.criteria import print_results
from mqmk.daemon.cli.bench.prepare import prepare
from mqmk.daemon.cli.bench.serving import serving

if TYPE_CHECKING:
    from rich.console import Console

    from mqmk.learner.bench.speed import Row, SpeedReport


@click.group()
def bench() -> None:
    """Measure speed and accuracy."""


bench.add_command(accuracy)
bench.add_command(compare)
bench.add_command(prepare)
bench.add_command(serving)


@bench.command()
@click.option("--backbone", "backbones", multiple=True, help="timm ViT; may be repeated. [default: DeiT-Ti, ViT-B/16]")
@click.option(
    "--tasks",
    multiple=True,
    type=click.IntRange(min=1),
    help="Number of tasks; may be repeated. [default: 10, 20, 100]",
)
@click.option("--images", type=click.IntRange(min=1), default=2, show_default=True, help="Batch size.")
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document; progress goes to standard error.")
def speed(backbones: tuple[str, ...], tasks: tuple[int, ...], images: int, rounds: int, as_json: bool) -> None:
    """Time every matcher against full forward passes, and check the speed criteria. Exits with 1 if one fails."""
    from mqmk.learner.bench.speed import SpeedSettings, measure_speed

    settings = SpeedSettings(
        backbones=backbones or SpeedSettings.backbones,
        tasks=tasks or SpeedSettings.tasks,
        images=images,
        rounds=rounds,
    )
    report = measure_speed(settings, lambda row: click.echo(_line(row), err=True))
    print_results(report.to_json(), lambda console: _tables(report, console), report.bars, as_json)


@bench.command()
@click.option("--backbone", default="deit_tiny_patch16_224", show_default=True, help="timm ViT.")
@click.option("--batch", type=click.IntRange(min=1), default=16, show_default=True)
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def training(backbone: str, batch: int, rounds: int, as_json: bool) -> None:
    """Time a training step against the published two-pass step. Exits with 1 if a criterion fails."""
    from dataclasses import asdict

    from mqmk.learner.bench.training import measure_training

    rows, bars = measure_training(backbone, batch, rounds)

    def lines(console: "Console") -> None:
        for row in rows:
            speed = f"{row.images_per_second:8.1f} images/s  {row.ratio_to_two_pass:.2f} x"
            console.print(f"{row.backbone:24} {row.step:28} {speed}", highlight=False, soft_wrap=True)

    print_results({"rows": [asdict(row) for row in rows], "bars": [asdict(bar) for bar in bars]}, lines, bars, as_json)


def _line(row: "Row") -> str:
    return f"{row.backbone:24} {row.tasks:4} tasks  {row.matcher:8} {row.ms_per_image:10.1f} ms per image"


def _tables(report: "SpeedReport", console: "Console") -> None:
    from rich.table import Table

    machine = report.machine
    console.print(f"{machine.processor}, {machine.cores} cores, {machine.device}, torch {machine.torch}, "
                  f"matmul {machine.matmul_gflops:g} GFLOP/s", highlight=False)  # fmt: skip
    table = Table("backbone", "tasks", "matcher", "ms/image", "of naive", "of plain", "peak MB")
    for column in table.columns[1:]:
        column.justify = "right"
    for row in report.rows:
        table.add_row(row.backbone, str(row.tasks), row.matcher, f"{row.ms_per_image:.1f}", f"{row.ratio_to_naive:.3f}",
                      f"{row.ratio_to_plain:.2f}", f"{row.peak_mb:.0f}")  # fmt: skip
    console.print(table)
    for name, share in report.matmul_share.items():
        console.print(f"{name}: a plain forward pass reaches {share:.0%} of the matmul rate", highlight=False)
