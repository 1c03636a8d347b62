"""`mqmk-daemon bench serving`: the speed of the service, on a separate Ray head."""

import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mqmk.daemon.cli.bench.criteria import print_results

if TYPE_CHECKING:
    from rich.console import Console

    from mqmk.daemon.bench.serving import ServingReport

PARTS = ("predictor", "plain", "haproxy")
"""As bench.serving.PARTS, whose import is slow."""


@click.command()
@click.option("--backbone", default="deit_tiny_patch16_224", show_default=True, help="timm ViT.")
@click.option(
    "--weights", default="random", show_default=True, help="safetensors file; random weights are just as fast."
)
@click.option("--tasks", type=click.IntRange(min=1), default=10, show_default=True)
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True)
@click.option(
    "--seconds", type=click.FloatRange(min=0.5), default=4.0, show_default=True, help="Duration of one measurement."
)
@click.option("--part", "parts", multiple=True, type=click.Choice(PARTS), help="May be repeated. [default: all]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document; progress goes to standard error.")
def serving(
    backbone: str, weights: str, tasks: int, rounds: int, seconds: float, parts: tuple[str, ...], as_json: bool
) -> None:
    """Compare the service with the bare predictor and with plain servers. Exits with 1 if a criterion fails."""
    from mqmk.daemon.bench.serving import BenchSettings, measure_serving

    settings = BenchSettings(backbone, weights, tasks, rounds=rounds, seconds=seconds)
    with redirect_stdout(sys.stderr), _private_ray(settings.cores) as folder:  # Ray prints to standard output
        report = measure_serving(settings, folder, parts or PARTS, lambda line: click.echo(line, err=True))
    print_results(report.as_json(), lambda console: _tables(report, console), report.bars, as_json)


@contextmanager
def _private_ray(cores: int) -> Iterator[Path]:
    """A Ray head that ends with the block, and a folder beside it, with a path short enough for Unix sockets."""
    from mqmk.daemon.ray_runtime.attach import attach, detach
    from mqmk.daemon.ray_runtime.head import ensure_head, stop_head
    from mqmk.daemon.ray_runtime.head_command import RayHeadSettings

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the head is stopped, too
    with tempfile.TemporaryDirectory(prefix="mqb-", dir="/tmp") as name:
        folder = Path(name)
        try:
            attach(ensure_head(RayHeadSettings(folder / "ray", num_cpus=2 * cores, num_gpus=0)))
            yield folder
        finally:
            detach()
            stop_head(folder / "ray")


def _tables(report: "ServingReport", console: "Console") -> None:
    from rich.table import Table

    def table(*columns: str) -> Table:
        made = Table(*columns)
        for column in made.columns[2:]:
            column.justify = "right"
        return made

    rates = table("backbone", "way", "clients", "images/s", "p50 ms", "p99 ms")
    for row in report.rows:
        rates.add_row(row.backbone, row.way, str(row.clients), f"{row.rate:.1f}", _ms(row.p50_ms), _ms(row.p99_ms))
    parts = table("backbone", "way", "total ms", "outside", "decode", "queue", "model", "answer", "beyond the model")
    for part in report.parts:
        spent = (part.total, part.outside, part.decode, part.queue, part.match, part.answer, part.beyond_the_model)
        parts.add_row(part.backbone, part.way, *(f"{value:.2f}" for value in spent))
    for made in (rates, parts):
        console.print(made)
    for name, value in report.facts.items():
        console.print(f"{name}: {value:.2f}", highlight=False)


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"
