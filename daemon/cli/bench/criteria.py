"""How a benchmark prints its results: JSON or tables, its criteria, and exit code 1 if one fails."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import Console

    from mqmk.learner.bench.criteria import Criterion


def print_results(
    document: Mapping[str, Any], tables: "Callable[[Console], None]", bars: "Sequence[Criterion]", as_json: bool
) -> None:
    """Print the results; exit with 1 if a criterion fails."""
    if as_json:
        click.echo(json.dumps(document, indent=2))
    else:
        from rich.console import Console

        console = Console()
        tables(console)
        for bar in bars:
            console.print(
                f"{'holds' if bar.holds else 'FAILS'}  {bar.promise}: {bar.measured:g}", highlight=False, soft_wrap=True
            )
    if not all(bar.holds for bar in bars):
        sys.exit(1)
