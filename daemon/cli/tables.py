"""How commands print tables: fitted to the terminal, or in full-width plain columns for a pipe or a file."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

WIDE: Final = 100_000


def new_table(*columns: str, fold: tuple[str, ...] = (), right: tuple[str, ...] = ()) -> "Table":
    """A table whose cells stay on one line, except in columns that `fold`; numbers are aligned `right`."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    narrow = _console().is_terminal  # elsewhere two spaces separate columns; no cell contains two
    table = Table(box=SIMPLE_HEAD if narrow else None, padding=(0, 1 if narrow else 2, 0, 0), pad_edge=False)
    for name in columns:
        how: dict[str, Any] = {"overflow": "fold"} if name in fold else {"no_wrap": True}
        table.add_column(name, justify="right" if name in right else "left", **how)
    return table


def print_whole(*content: "RenderableType") -> None:
    """Print to standard output; lines are folded only on a terminal."""
    console = _console()
    for one in content:
        console.print(one)


def figure_cells(row: Mapping[str, Any]) -> tuple[str, str, str]:
    """Matching rate, accuracy and number of held-out images, as cells."""
    from mqmk.daemon.status.figures import Share

    rates = (row["matching_rate"], row["accuracy"])
    matched, right = ("" if each is None else Share(each, row["images"]).cell() for each in rates)
    return matched, right, str(row["images"] or "")


def _console() -> "Console":
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=WIDE)
