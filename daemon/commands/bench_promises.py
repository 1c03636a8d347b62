"""How a benchmark ends: one JSON document or tables, its promises, and an exit code that says whether they hold."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import Console

    from mqmk.matcher.promises import Bar


def tell(
    document: Mapping[str, Any], tables: "Callable[[Console], None]", bars: "Sequence[Bar]", as_json: bool
) -> None:
    """Print what was measured; exit with 1 if a promise fails."""
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
