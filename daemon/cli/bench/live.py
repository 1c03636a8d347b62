"""Progress of a long benchmark: a table that is redrawn on a terminal, one line per event elsewhere."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

import click

if TYPE_CHECKING:
    from rich.table import Table

T = TypeVar("T")


@contextmanager
def show_progress(
    to_line: Callable[[T], str], to_table: "Callable[[T], Table | None]"
) -> Iterator[Callable[[T], None]]:
    """A function that shows an event; an event without a table of its own leaves the last one."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda event: click.echo(to_line(event), err=True)
        return
    from rich.console import Group
    from rich.live import Live

    with Live(console=console, refresh_per_second=4) as live:
        latest: list[Table] = []

        def draw(event: T) -> None:
            table = to_table(event)
            if table:
                latest[:] = [table]
            live.update(Group(*latest, to_line(event)), refresh=bool(table))  # shown however fast the next event is

        yield draw
